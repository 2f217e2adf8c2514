"""A metric at one moment, as `get_metrics` returns it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One of `Counter`, `Gauge`, `Histogram`."""

    name: str
    labels: dict[str, str]
    help: str


@dataclass(frozen=True)
class Counter(Metric):
    """A count, or a sum of seconds, that only grows."""

    value: float


@dataclass(frozen=True)
class Gauge(Metric):
    """A value that goes up and down."""

    value: float


@dataclass(frozen=True)
class Histogram(Metric):
    """A histogram of observations."""

    count: int
    sum: float
    buckets: dict[str, int]
    """Upper bound to the number of observations up to it; the last bound is +Inf."""

"""A metric at one moment, as `get_metrics` returns it and as processes exchange it."""

import msgspec


class _Metric(msgspec.Struct, frozen=True):
    name: str
    labels: dict[str, str]
    help: str


class Counter(_Metric, frozen=True, tag="counter"):
    """A count, or a sum of seconds, that only grows."""

    value: float


class Gauge(_Metric, frozen=True, tag="gauge"):
    """A value that goes up and down."""

    value: float


class Histogram(_Metric, frozen=True, tag="histogram"):
    """A histogram of observations."""

    count: int
    sum: float
    buckets: dict[str, int]
    """Upper bound to the number of observations up to it; the last bound is +Inf."""


class Summary(_Metric, frozen=True, tag="summary"):
    """The number of observations and their sum."""

    count: int
    sum: float


Metric = Counter | Gauge | Histogram | Summary

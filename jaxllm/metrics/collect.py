"""Gathers metrics under one prefix and one set of labels."""

from collections.abc import Mapping

from jaxllm.metrics.metric import Counter, Gauge, Histogram, Metric, Summary
from jaxllm.observations import Observations

PREFIX = "jaxllm:"


class Collected:
    """A list of metrics that grows by name. A label given as None is left out, even if it is one of `labels`."""

    def __init__(self, labels: dict[str, str], *, prefix: str = PREFIX):
        self.metrics: list[Metric] = []
        self._labels = labels
        self._prefix = prefix

    def gauge(self, name: str, value: float, help: str, **labels: str | None) -> None:
        self.metrics.append(Gauge(self._prefix + name, self._all(labels), help, value))

    def counter(self, name: str, value: float, help: str, **labels: str | None) -> None:
        self.metrics.append(Counter(self._prefix + name, self._all(labels), help, value))

    def summary(self, name: str, count: int, sum: float, help: str, **labels: str | None) -> None:
        self.metrics.append(Summary(self._prefix + name, self._all(labels), help, count, sum))

    def histogram(self, name: str, observations: Observations, help: str, **labels: str | None) -> None:
        buckets, total = {}, 0
        names = [str(float(bound)) for bound in observations.bounds]
        for bound, count in zip([*names, "+Inf"], observations.counts, strict=True):
            total += count
            buckets[bound] = total
        self.metrics.append(Histogram(self._prefix + name, self._all(labels), help, total, observations.sum, buckets))

    def _all(self, labels: Mapping[str, str | None]) -> dict[str, str]:
        return {name: value for name, value in {**self._labels, **labels}.items() if value is not None}

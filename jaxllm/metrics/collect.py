"""Gathers metrics under one prefix and one set of labels."""

from jaxllm.metrics.metric import Counter, Gauge, Histogram, Metric
from jaxllm.observations import Observations

PREFIX = "jaxllm:"


class Collected:
    """A list of metrics that grows by name."""

    def __init__(self, labels: dict[str, str], *, prefix: str = PREFIX):
        self.metrics: list[Metric] = []
        self._labels = labels
        self._prefix = prefix

    def gauge(self, name: str, value: float, help: str, **labels: str) -> None:
        self.metrics.append(Gauge(self._prefix + name, {**self._labels, **labels}, help, value))

    def counter(self, name: str, value: float, help: str, **labels: str) -> None:
        self.metrics.append(Counter(self._prefix + name, {**self._labels, **labels}, help, value))

    def histogram(self, name: str, observations: Observations, help: str, **labels: str) -> None:
        buckets, total = {}, 0
        names = [str(float(bound)) for bound in observations.bounds]
        for bound, count in zip([*names, "+Inf"], observations.counts, strict=True):
            total += count
            buckets[bound] = total
        labels = {**self._labels, **labels}
        self.metrics.append(Histogram(self._prefix + name, labels, help, total, observations.sum, buckets))

"""Offers an engine's metrics to Prometheus. Values are read when a scrape asks, so recording stays plain."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from jaxllm.metrics.metric import Counter, Gauge, Histogram, Metric

_FAMILIES: dict[type, Any] = {Counter: CounterMetricFamily, Gauge: GaugeMetricFamily, Histogram: HistogramMetricFamily}


class EngineCollector(Collector):
    """Reads snapshots of one engine."""

    def __init__(self, snapshot: Callable[[], list[Metric]]):
        self._snapshot = snapshot

    def describe(self) -> list[Family]:
        """Nothing: registering must not read the engine."""
        return []

    def collect(self) -> Iterator[Family]:
        """The families of all metrics now."""
        families: dict[str, Any] = {}
        for metric in self._snapshot():
            if metric.name not in families:
                families[metric.name] = _FAMILIES[type(metric)](metric.name, metric.help, labels=list(metric.labels))
            values = list(metric.labels.values())
            if isinstance(metric, Histogram):
                families[metric.name].add_metric(values, list(metric.buckets.items()), metric.sum)
            elif isinstance(metric, (Counter, Gauge)):
                families[metric.name].add_metric(values, metric.value)
        yield from families.values()


def registry(snapshot: Callable[[], list[Metric]]) -> CollectorRegistry:
    """A registry of its own for one engine."""
    own = CollectorRegistry(auto_describe=False)
    own.register(EngineCollector(snapshot))
    return own


def exposition(metrics: Iterable[Metric], accept: str | None = None) -> tuple[bytes, str]:
    """The metrics, and those of this process: (body, content type), in the form that a scraper's Accept header prefers."""
    listed = list(metrics)
    own = registry(lambda: listed)
    ProcessCollector(registry=own)
    encode, content_type = choose_encoder(accept or "")
    return encode(own), content_type

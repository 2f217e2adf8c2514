"""Exports an engine's metrics to Prometheus. Values are read when a scrape arrives, which keeps recording simple."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from jaxllm.metrics.collect import PREFIX
from jaxllm.metrics.metric import Counter, Gauge, Histogram, Metric, Summary

EXPOSITION_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of `exposition`."""
_FAMILIES: dict[type, Any] = {
    Counter: CounterMetricFamily,
    Gauge: GaugeMetricFamily,
    Histogram: HistogramMetricFamily,
    Summary: SummaryMetricFamily,
}


class EngineCollector(Collector):
    """Reads snapshots of one engine."""

    def __init__(self, snapshot: Callable[[], list[Metric]]):
        self._snapshot = snapshot

    def describe(self) -> list[Family]:
        """Empty: registering must not read the engine."""
        return []

    def collect(self) -> Iterator[Family]:
        """The current metric families."""
        families: dict[str, Any] = {}
        for metric in self._snapshot():
            if metric.name not in families:
                families[metric.name] = _FAMILIES[type(metric)](metric.name, metric.help, labels=list(metric.labels))
            values = list(metric.labels.values())
            if isinstance(metric, Histogram):
                families[metric.name].add_metric(values, list(metric.buckets.items()), metric.sum)
            elif isinstance(metric, Summary):
                families[metric.name].add_metric(values, metric.count, metric.sum)
            else:
                families[metric.name].add_metric(values, metric.value)
        yield from families.values()


def registry(snapshot: Callable[[], list[Metric]]) -> CollectorRegistry:
    """A separate registry for one engine."""
    own = CollectorRegistry(auto_describe=False)
    own.register(EngineCollector(snapshot))
    return own


def exposition(metrics: Iterable[Metric], *, prefix: str = "jaxllm") -> bytes:
    """The metrics, and those of this process, in Prometheus's text format; `prefix` replaces jaxllm in the names.

    Not in OpenMetrics, whose encoder turns the colon after the prefix into an underscore, so that names would depend on the
    scraper.
    """
    listed = [replace(metric, name=_renamed(metric.name, prefix)) for metric in metrics]
    own = registry(lambda: listed)
    ProcessCollector(registry=own)
    return generate_latest(own)


def _renamed(name: str, prefix: str) -> str:
    return f"{prefix}:{name.removeprefix(PREFIX)}" if name.startswith(PREFIX) else name

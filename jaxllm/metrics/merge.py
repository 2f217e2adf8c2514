"""Merges the metrics of several processes."""

from collections.abc import Iterable

from msgspec.structs import replace

from jaxllm.metrics.metric import Counter, Histogram, Metric, Summary


def merged(parts: Iterable[Iterable[Metric]]) -> list[Metric]:
    """Merge lists: sums counters, histograms and summaries of the same name and labels; keeps the first of each gauge."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], Metric] = {}
    for part in parts:
        for metric in part:
            key = (metric.name, tuple(sorted(metric.labels.items())))
            found[key] = _sum(found[key], metric) if key in found else metric
    return list(found.values())


def _sum(one: Metric, other: Metric) -> Metric:
    if isinstance(one, Counter) and isinstance(other, Counter):
        return replace(one, value=one.value + other.value)
    if isinstance(one, Histogram) and isinstance(other, Histogram) and one.buckets.keys() == other.buckets.keys():
        buckets = {bound: count + other.buckets[bound] for bound, count in one.buckets.items()}
        return replace(one, count=one.count + other.count, sum=one.sum + other.sum, buckets=buckets)
    if isinstance(one, Summary) and isinstance(other, Summary):
        return replace(one, count=one.count + other.count, sum=one.sum + other.sum)
    return one

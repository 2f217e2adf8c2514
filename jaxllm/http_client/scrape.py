"""Reads a server's /metrics and computes rates between two readings. Supports the metric names of jaxllm and of vLLM."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from jaxllm.acceptance import Acceptance
from jaxllm.http_client.client import ServerClient, ServerError

PREFIXES = ("jaxllm:", "vllm:")
PERCENTILES = (50, 90, 99)
LATENCIES: Mapping[str, str] = {
    "ttft": "time_to_first_token_seconds",
    "itl": "inter_token_latency_seconds",
    "queue": "request_queue_time_seconds",
    "e2el": "e2e_request_latency_seconds",
}


@dataclass(frozen=True)
class Scrape:
    """One reading. Values of several engines are added; names are without prefix and without `_total`."""

    time: float
    """In seconds, of any clock."""
    values: dict[str, float]
    buckets: dict[str, dict[float, float]]
    """Per histogram: upper bound to cumulative number of observations."""
    by_label: dict[str, dict[str, float]]
    """Per metric in LABELS: label value to value."""
    model_names: list[str] = field(default_factory=list)
    num_engines: int = 1


LABELS: Mapping[str, str] = {
    "request_success": "finished_reason",
    "http_requests": "status",
    "awaited_programs": "state",
    "replica_state": "state",
    "spec_decode_num_accepted_tokens_per_pos": "position",
}
"""The metrics that are split by a label."""


def read_scrape(text: str, time: float) -> Scrape:
    """Parse a page of metrics. Raises ValueError if it is invalid, or has neither jaxllm's nor vLLM's metrics."""
    values: defaultdict[str, float] = defaultdict(float)
    buckets: defaultdict[str, defaultdict[float, float]] = defaultdict(lambda: defaultdict(float))
    by_label: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    models: dict[str, None] = {}
    engines: set[str] = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = _plain(sample.name)
            if name is None or math.isnan(sample.value):
                continue
            if "model_name" in sample.labels:
                models[sample.labels["model_name"]] = None
                engines.update([sample.labels["engine"]] if "engine" in sample.labels else [])
            if name.endswith("_bucket") and "le" in sample.labels:
                buckets[name.removesuffix("_bucket")][float(sample.labels["le"])] += sample.value
                continue
            values[name] += sample.value
            if (label := LABELS.get(name)) is not None:
                by_label[name][sample.labels.get(label, "")] += sample.value
    if not models:
        raise ValueError("the page has neither jaxllm's nor vLLM's metrics")
    plain_buckets = {name: dict(found) for name, found in buckets.items()}
    return Scrape(time, dict(values), plain_buckets, {n: dict(v) for n, v in by_label.items()}, list(models), len(engines) or 1)


async def scrape(client: ServerClient) -> Scrape:
    """Read a server's metrics. Raises ServerError, also if the page has none."""
    page = await client.get("/metrics")
    try:
        return read_scrape(page.decode("utf-8", "replace"), monotonic())
    except ValueError as error:
        raise ServerError(f"{client.base_url}/metrics: {error}") from None


async def scrape_if_any(client: ServerClient) -> Scrape | None:
    """A server's metrics; None if it has none."""
    try:
        return await scrape(client)
    except ServerError:
        return None


def view(before: Scrape, now: Scrape) -> dict[str, Any]:
    """The current state, and rates and latencies (ms) between two readings; None without observations."""
    seconds = max(now.time - before.time, 1e-9)

    def grown(name: str) -> float:
        # a restarted server counts from 0
        return _growth(before.values.get(name, 0.0), now.values.get(name, 0.0))

    queries = grown("prefix_cache_queries")
    drafts = acceptance(before, now)
    return {
        "models": now.model_names,
        "interval_seconds": seconds,
        "num_requests_running": now.values.get("num_requests_running", 0.0),
        "num_requests_waiting": now.values.get("num_requests_waiting", 0.0),
        "compiling": _compiling(now),
        "stalled_engines": now.by_label.get("replica_state", {}).get("stalled", 0.0),
        "kv_cache_usage": now.values.get("kv_cache_usage_perc", 0.0) / now.num_engines,
        "prefix_cache_hit_rate": grown("prefix_cache_hits") / queries if queries else None,
        "prompt_tokens_per_second": grown("prompt_tokens") / seconds,
        "generation_tokens_per_second": grown("generation_tokens") / seconds,
        "preemptions": grown("num_preemptions"),
        "encoder": _encoder(grown),
        "host_memory": _host_memory(now, grown, seconds) if "num_requests_loading" in now.values else None,
        "drafts": None if drafts is None else drafts.report(),
        "latency_ms": {
            name: _percentiles(before.buckets.get(metric, {}), now.buckets.get(metric, {}))
            for name, metric in LATENCIES.items()
            if metric in now.buckets
        },
        "finished": _by_label(before, now, "request_success"),
        "http": _by_label(before, now, "http_requests"),
    }


def acceptance(before: Scrape, now: Scrape) -> Acceptance | None:
    """How many drafts were verified and accepted between two readings; None if the server has no speculative decoding."""
    if "spec_decode_num_drafts" not in now.values:
        return None
    change = _totals_of_drafts(now) - _totals_of_drafts(before)
    return change if change.num_drafts >= 0 else _totals_of_drafts(now)  # a restarted server counts from 0


def _totals_of_drafts(scrape: Scrape) -> Acceptance:
    values, by_position = scrape.values, scrape.by_label.get("spec_decode_num_accepted_tokens_per_pos", {})
    return Acceptance(
        values.get("spec_decode_num_drafts", 0.0),
        values.get("spec_decode_num_draft_tokens", 0.0),
        values.get("spec_decode_num_accepted_tokens", 0.0),
        tuple(by_position[position] for position in sorted(by_position, key=int)),
    )


def quantile(buckets: Mapping[float, float], fraction: float) -> float | None:
    """The quantile, assuming an even distribution within each bucket. None without observations."""
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return None
    wanted = fraction * total
    low = low_count = 0.0
    for bound in bounds:
        count = buckets[bound]
        if count >= wanted and count > low_count:
            return low if math.isinf(bound) else low + (bound - low) * (wanted - low_count) / (count - low_count)
        if not math.isinf(bound):
            low = bound
        low_count = count
    return low


def _percentiles(before: Mapping[float, float], now: Mapping[float, float]) -> dict[str, float] | None:
    grown = {bound: _growth(before.get(bound, 0.0), count) for bound, count in now.items()}
    found = {f"p{percent}": quantile(grown, percent / 100) for percent in PERCENTILES}
    return {name: value * 1000 for name, value in found.items() if value is not None} or None


def _compiling(now: Scrape) -> dict[str, float] | None:
    """Programs that requests wait for: number ready, and total. None if all are ready."""
    awaited = now.by_label.get("awaited_programs", {})
    return {"ready": awaited.get("ready", 0.0), "total": sum(awaited.values())} if awaited.get("missing") else None


def _encoder(grown: Callable[[str], float]) -> dict[str, float] | None:
    """Patches of items, and those that the encoder computed for them, padding included; None: it computed nothing."""
    computed = grown("mm_encoder_computed_patches")
    return {"patches": grown("mm_encoder_patches"), "computed_patches": computed} if computed else None


def _host_memory(now: Scrape, grown: Callable[[str], float], seconds: float) -> dict[str, float | None]:
    """Blocks of the prefix cache in host memory: the part of it in use, copies in bytes per second, and the part of the tokens that the
    devices did not have which was loaded."""
    queries = grown("external_prefix_cache_queries")
    return {
        "usage": now.values["kv_offload_cpu_cache_usage_perc"] / now.num_engines,
        "num_requests_loading": now.values["num_requests_loading"],
        "store_bytes_per_second": grown("kv_offload_store_bytes") / seconds,
        "load_bytes_per_second": grown("kv_offload_load_bytes") / seconds,
        "hit_rate": grown("external_prefix_cache_hits") / queries if queries else None,
        "skipped_stores": grown("kv_offload_stores_skipped"),
    }


def _by_label(before: Scrape, now: Scrape, name: str) -> dict[str, dict[str, float]]:
    earlier = before.by_label.get(name, {})
    return {
        label: {"total": total, "new": _growth(earlier.get(label, 0.0), total)}
        for label, total in sorted(now.by_label.get(name, {}).items())
    }


def _growth(before: float, now: float) -> float:
    return now - before if now >= before else now


def _plain(name: str) -> str | None:
    """The name without prefix and `_total`; None for unused metrics."""
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix).removesuffix("_total")
    return "http_requests" if name == "http_requests_total" else None

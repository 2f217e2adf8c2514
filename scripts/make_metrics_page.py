"""Writes docs/METRICS.md from the metrics that the code offers: python scripts/make_metrics_page.py"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm.config import CacheOptions
from jaxllm.engine.async_core import ReplicaState
from jaxllm.metrics.collect import PREFIX
from jaxllm.metrics.engine_metrics import EngineMetrics, cache_labels
from jaxllm.metrics.metric import Counter, Metric
from jaxllm.metrics.replica_states import replica_states
from jaxllm.scheduler_stats import PULL_FAILURES, STORE_CALLS, SchedulerStats
from server.http_metrics import HttpMetrics, SleepOperation

PAGE = Path(__file__).resolve().parent.parent / "docs" / "METRICS.md"
HEAD = """# Metrics

`GET /metrics` answers in Prometheus's text format. Names after the prefix `jaxllm:`, and labels, are those of vLLM where it has the same
metric, so dashboards and alerts written for it work with the prefix changed; [grafana/jaxllm.json](grafana/jaxllm.json) is a dashboard
ready to import, and `jaxllm top` shows the same in the terminal. This page is written by `scripts/make_metrics_page.py`.

With several HTTP processes, counters and histograms are the sums over all of them, whichever answers. `process_*` are those of the process
that answers. Metrics of features that this engine does not have are always 0: gateways add them up.

Metrics with the prefix have the labels `model_name` and `engine`, and those of the table. Exceptions:

{exceptions}

| name | type | labels | what it counts |
|---|---|---|---|
"""
FOOT = """
**Times.** `time_to_first_token_seconds` and `e2e_request_latency_seconds` begin when the request arrives at the HTTP process. Queue and
prefill times are measured in the engine core: from its queue to the plan of the first step, and from there to the first token's return.
Inference time is prefill and decode together. Times are in seconds throughout.

**Is the GPU busy?** `engine_work_seconds` grows while requests are unfinished. In `device_wait_seconds` of it the host waited for a step's
results, so the device was computing. In `device_idle_seconds` of it no step was on the device or queued there, so the device stood still.
The idle share over five minutes is `rate(jaxllm:device_idle_seconds_total[5m]) / rate(jaxllm:engine_work_seconds_total[5m])`; it is a
lower bound, because the device may finish its last step a little before the host hears of it. One minus the same quotient with
`device_wait_seconds` is an upper bound. The gauge `device_idle_fraction` is the lower bound since the start.

**Is speculative decoding worth it?** With a `speculative_config`, `spec_decode_*` count drafts. The mean acceptance length, the tokens that
a request gets in a step with drafts, is `1 + rate(jaxllm:spec_decode_num_accepted_tokens_total[5m]) /
rate(jaxllm:spec_decode_num_drafts_total[5m])`; the acceptance rate divides by `spec_decode_num_draft_tokens_total` instead.
[SPECULATIVE.md](SPECULATIVE.md) explains them.

**Are there enough slots for adapters?** With `--enable-lora`, `lora_evictions_total` that grows with `lora_loads_total` means that more
adapters are in use than `--max-loras` has slots for. `lora_load_seconds_total` divided by `lora_loads_total` is the mean time that an
adapter's first request waited for it. [LORA.md](LORA.md) explains them.

**Do experts get as many tokens?** With `--expert-load`, the balance is `sum(rate(jaxllm:expert_load_even_tokens_total[5m])) /
sum(rate(jaxllm:expert_load_busiest_tokens_total[5m]))`: the share of the time of experts in which a device computes. Which experts get
how many is in `/expert_load`. [EXPERT_LOAD.md](EXPERT_LOAD.md) explains it.

**Is the encoder cache large enough?** Each query of `mm_cache_queries_total` that is no hit encoded an image. Prompts that the prefix
cache knows do not ask it. A `mm_cache_usage_perc` near 1 makes images wait until others are computed. Without the pages of
`mm_cache_evictions_total`, an image that is sent again would be found.

**What does the encoder compute?** `mm_encoder_computed_patches_total` has the patches of all programs that ran, and
`mm_encoder_patches_total` those of items; the rest is padding up to the sizes that are compiled, and with data-parallel ranks also of the
ranks that have no images meanwhile. The encoder's time on the device is not measured: steps follow it on the device without the host
waiting between them. A trace (`/start_profile`) has it.

**Where do prompts come from?** `prompt_tokens_by_source_total` has all prompt tokens: computed (`local_compute`), found on the devices
(`local_cache_hit`), or loaded (`external_kv_transfer`, with the label `tier`). A request that waits while another one loads the same
tokens finds them on the devices. `external_prefix_cache_hits_total` also counts what preempted requests loaded when they went on.

**Is host memory of use?** [KV_OFFLOADING.md](KV_OFFLOADING.md#what-to-watch) says what to watch. Other than in vLLM,
`kv_offload_cpu_cache_usage_perc` is the part that has contents, not the part that copies use now; that is its `read` and `write` together.
There is no `kv_offload_lookup_*_delay_seconds`: a lookup in host memory is one in a table.

**Does the engine hang?** `engine_last_tick_seconds` stays below a second while it is idle or its steps are short. It grows during a step
or a compilation, and when the engine's process gives no sign of life. `replica_state` is `stalled` once `/ready` says so
(`--stall-timeout`), which a compilation never is.

**Compiled while serving.** With `--warmup all` and `background`, `programs_compiled_after_warmup` must stay at 0: each one made all
requests of a step wait. While a step waits for programs, `awaited_programs` counts these. Requests that wait for programs while others
run are the `deferred` ones of `num_requests_waiting_by_reason`.
"""


def every_metric() -> list[Metric]:
    """Metrics of one engine and one API server, with something counted wherever a metric appears only then."""
    engine = EngineMetrics("m", 100, cache_config=cache_labels(CacheOptions()))
    engine.load = SchedulerStats(
        0,
        0,
        0.0,
        0,
        0,
        0,
        0,
        0,
        accepted_per_position=(0,),
        max_adapters=1,
        num_item_pages=1,
        blocks_per_state=1,
        num_host_slots=1,
        disk_bytes=1,
        own_store_failures=(0,) * len(STORE_CALLS),
        num_leasable_blocks=1,
        pull_failures=(0,) * len(PULL_FAILURES),
        num_kv_event_batches=1,
    )
    engine.load.even_expert_load = engine.load.busiest_expert_load = (1.0,)
    engine.media_kinds = ("image", "video", "audio")
    states = replica_states("m", [("serving", 0.0)], get_args(ReplicaState))
    http = HttpMetrics("m")
    http.request_done("GET", 200, "/", 0.0)
    for operation in get_args(SleepOperation):
        with http.sleep_mode(operation):
            pass
    return [*engine.snapshot(), *states, *http.snapshot()]


def rows(metrics: Iterable[Metric]) -> list[str]:
    """A line of the table for each name."""
    labels: dict[str, dict[str, set[str]]] = {}
    kinds: dict[str, Metric] = {}
    for metric in metrics:
        kinds.setdefault(metric.name, metric)
        own = labels.setdefault(metric.name, {})
        for label, value in metric.labels.items():
            if label not in ("model_name", "engine"):
                own.setdefault(label, set()).add(value)
    found = []
    for name, metric in kinds.items():
        shown = name + ("_total" if isinstance(metric, Counter) else "")
        kind = type(metric).__name__.lower()
        named = ", ".join(_label(label, values) for label, values in labels[name].items())
        found.append(f"| `{shown}` | {kind} | {named} | {metric.help} |")
    return found


def _label(label: str, values: set[str]) -> str:
    """`reason` (a, b) where the values are fixed, else the name alone."""
    return f"`{label}` ({', '.join(sorted(filter(None, values)))})" if len(values) > 1 else f"`{label}`"


def page() -> str:
    """The whole text."""
    metrics = every_metric()
    return HEAD.format(exceptions=_exceptions(metrics)) + "\n".join(rows(metrics)) + "\n" + FOOT


def _exceptions(metrics: Iterable[Metric]) -> str:
    """The metrics with the prefix that lack a label which the others have."""
    lacking: dict[str, dict[str, None]] = {}
    for metric in metrics:
        if metric.name.startswith(PREFIX) and "engine" not in metric.labels:
            own = "without `engine`" if "model_name" in metric.labels else "without both"
            lacking.setdefault(own, {})[f"`{metric.name.removeprefix(PREFIX)}`"] = None
    return "\n".join(f"- {own}: {', '.join(names)}" for own, names in lacking.items())


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()

from typing import Any

from jaxllm.metrics.collect import Collected
from jaxllm.metrics.engine_load import add_load
from jaxllm.metrics.merge import merged
from jaxllm.metrics.metric import Counter, Gauge, Histogram
from jaxllm.observations import COPY_SECONDS, STEP_TOKENS, Observations
from jaxllm.scheduler_stats import PULL_FAILURES
from tests.helpers.fake_engine_core import fake_stats


def collected(**stats: object) -> list:
    found = Collected({"model_name": "m", "engine": "0"})
    add_load(found, fake_stats(**stats))
    return found.metrics


def test_steps_are_a_histogram_by_their_tokens() -> None:
    steps = Observations(STEP_TOKENS)
    for tokens in (1, 5, 8, 20_000):
        steps.add(tokens)
    found = collected(step_token_counts=tuple(steps.counts), num_step_tokens=int(steps.sum))
    (histogram,) = [metric for metric in found if isinstance(metric, Histogram)]
    assert histogram.name == "jaxllm:iteration_tokens_total" and (histogram.count, histogram.sum) == (4, 20_014)
    assert (histogram.buckets["1.0"], histogram.buckets["8.0"], histogram.buckets["16384.0"]) == (1, 3, 3)


def test_requests_that_wait_for_programs_are_deferred() -> None:
    found = collected(num_waiting=5, num_deferred=2)
    by_reason = {
        metric.labels["reason"]: metric.value for metric in found if metric.name == "jaxllm:num_requests_waiting_by_reason"
    }
    assert by_reason == {"capacity": 3, "deferred": 2}


def test_idle_time_is_a_fraction_of_the_time_with_work() -> None:
    def fraction(**stats: float) -> float:
        (found,) = [metric.value for metric in collected(**stats) if metric.name == "jaxllm:device_idle_fraction"]
        return found

    assert fraction(work_seconds=8.0, device_idle_seconds=2.0) == 0.25 and fraction() == 0.0


def test_one_sleep_state_is_on() -> None:
    states = {
        metric.labels["sleep_state"]: metric.value
        for metric in collected(sleep_level=1)
        if isinstance(metric, Gauge) and metric.name == "jaxllm:engine_sleep_state"
    }
    assert states == {"awake": 0, "weights_offloaded": 1, "discard_all": 0}


def test_rejections_of_all_engines_are_one_series() -> None:
    def load(engine: str) -> list:
        found = Collected({"model_name": "m", "engine": engine})
        add_load(found, fake_stats(num_rejected_for_tokens=2))
        return found.metrics

    found = [metric for metric in merged([load("0"), load("1")]) if metric.name == "jaxllm:admission_rejections"]
    assert {tuple(metric.labels.items()): metric.value for metric in found} == {  # type: ignore[union-attr]
        (("model_name", "m"), ("reason", "max_num_queued_reqs")): 0,
        (("model_name", "m"), ("reason", "max_num_queued_tokens")): 4,
        (("model_name", "m"), ("reason", "max_queued_image_gb")): 0,
    }


def test_the_encoder_cache_is_described_where_the_model_sees_images() -> None:
    stats = {"num_item_pages": 8, "num_used_item_pages": 2, "num_item_evictions": 3, "num_encoded_patches": 100}
    stats |= {"num_computed_patches": 256, "num_encoder_runs": 2}
    found = {metric.name.removeprefix("jaxllm:"): metric.value for metric in collected(**stats) if "jaxllm:mm_" in metric.name}
    encoded = {"mm_encoder_patches": 100, "mm_encoder_computed_patches": 256, "mm_encoder_runs": 2}
    assert found == {"mm_cache_usage_perc": 0.25, "mm_cache_evictions": 3, **encoded}
    assert not [metric for metric in collected() if "jaxllm:mm_" in metric.name]


def test_events_are_counted_where_they_are_published() -> None:
    stats = {"num_kv_event_batches": 3, "num_dropped_kv_events": 2}
    found = {metric.name: metric.value for metric in collected(**stats) if "jaxllm:kv_event" in metric.name}
    assert found == {"jaxllm:kv_event_batches": 3, "jaxllm:kv_events_dropped": 2}
    assert not [metric for metric in collected() if "kv_event" in metric.name]


def test_requests_that_wait_for_blocks_are_deferred_too() -> None:
    found = collected(num_waiting=5, num_deferred=1, num_loading=2, num_host_slots=8)
    named = {(metric.name.removeprefix("jaxllm:"), metric.labels.get("reason")): metric for metric in found}
    assert named["num_requests_waiting_by_reason", "deferred"].value == 3 and named["num_requests_loading", None].value == 2


def test_host_memory_is_described_where_blocks_are_kept_there() -> None:
    times = Observations(COPY_SECONDS)
    times.add(0.003)
    stats = {"num_host_slots": 8, "num_used_host_slots": 4, "num_read_host_slots": 2, "num_written_host_slots": 1}
    stats |= {"stored_bytes": 3, "loaded_bytes": 4, "store_seconds": 0.5, "load_seconds": 0.25, "host_block_bytes": 100}
    stats |= {"num_skipped_stores": 5, "num_skipped_for_slots": 2, "num_damaged_blocks": 6}
    stats |= {"load_second_counts": tuple(times.counts), "num_allocated_host_slots": 9}
    found = [metric for metric in collected(**stats) if "_offload_" in metric.name]

    def values(kind: type) -> dict[str, float]:
        own = [metric for metric in found if isinstance(metric, kind)]
        labels = [metric.labels.get("reason") or metric.labels.get("direction") or "" for metric in own]
        names = [metric.name.removeprefix("jaxllm:kv_offload_") for metric in own]
        return {
            f"{name} {label}".strip(): getattr(metric, "value", None)
            for metric, name, label in zip(own, names, labels, strict=True)
        }

    usage = {"cpu_cache_usage_perc": 0.5, "cpu_cache_read_usage_perc": 0.25, "cpu_cache_write_usage_perc": 0.125}
    assert values(Gauge) == {**usage, "config_info": 1}
    assert values(Counter) == {
        "store_bytes": 3,
        "store_time": 0.5,
        "load_bytes": 4,
        "load_time": 0.25,
        "stores_skipped copies_behind": 3,
        "stores_skipped host_memory_in_use": 2,
        "bad_blocks": 6,
    }
    histograms = values(Histogram).keys()
    assert histograms == {"store_size", "load_size", "copy_seconds store", "copy_seconds load", "cpu_allocation_size"}
    (loads,) = [metric for metric in found if metric.labels.get("direction") == "load"]
    assert (loads.count, loads.sum, loads.buckets["0.002"], loads.buckets["0.005"]) == (1, 0.25, 0, 1)
    (info,) = [metric for metric in found if metric.name.endswith("config_info")]
    assert info.labels.items() >= {"cpu_num_chunks": "8", "blocks_per_chunk": "1", "kv_bytes_per_chunk": "100"}.items()
    assert not [metric for metric in collected() if "_offload_" in metric.name or metric.name.endswith("_loading")]


def test_the_disk_is_described_where_blocks_are_kept_there() -> None:
    stats = {"disk_bytes": 8, "used_disk_bytes": 2, "disk_written_bytes": 3, "disk_read_bytes": 4, "num_lost_blocks": 5}
    stats |= {"num_bad_files": 6, "disk_write_seconds": 0.5, "disk_read_seconds": 0.25}
    found = [metric for metric in collected(**stats) if "_offload_" in metric.name]
    assert {(metric.name.removeprefix("jaxllm:kv_offload_"), metric.labels.get("tier")): metric.value for metric in found} == {
        ("disk_usage_perc", None): 0.25,
        ("disk_store_bytes", None): 3,
        ("disk_store_time", None): 0.5,
        ("disk_load_bytes", None): 4,
        ("disk_load_time", None): 0.25,
        ("lost_blocks", None): 5,
        ("bad_blocks", "disk"): 6,
    }


def test_a_store_of_one_s_own_is_described_where_there_is_one() -> None:
    stats: dict[str, Any] = {"own_store_written_bytes": 3, "own_store_read_bytes": 4, "num_lost_blocks": 5}
    stats |= {"own_store_write_seconds": 0.5, "own_store_read_seconds": 0.25, "own_store_failures": (0, 1, 2, 3, 4)}
    found = [metric for metric in collected(**stats) if "_offload_" in metric.name]
    assert {(metric.name.removeprefix("jaxllm:kv_offload_"), metric.labels.get("call")): metric.value for metric in found} == {
        ("external_store_bytes", None): 3,
        ("external_store_time", None): 0.5,
        ("external_load_bytes", None): 4,
        ("external_load_time", None): 0.25,
        **{("external_failures", call): count for count, call in enumerate(("find", "read", "write", "discard", "clear"))},
        ("lost_blocks", None): 5,
    }


def test_blocks_between_engines_are_described_where_the_engine_has_a_role() -> None:
    stats = {"num_leasable_blocks": 9, "num_kv_leases": 1, "num_expired_kv_leases": 2, "num_refused_kv_leases": 3}
    stats |= {"pulled_bytes": 4, "pull_failures": tuple(range(len(PULL_FAILURES)))}
    found = {
        (metric.name.removeprefix("jaxllm:kv_"), metric.labels.get("reason", "")): metric.value
        for metric in collected(**stats)
        if metric.name.startswith(("jaxllm:kv_lease", "jaxllm:kv_pull"))
    }
    assert found == {
        ("leases", ""): 1,
        ("lease_expired", ""): 2,
        ("lease_refused", ""): 3,
        ("pull_bytes", ""): 4,
        **{("pull_failures", reason): index for index, reason in enumerate(PULL_FAILURES)},
    }
    assert not [metric for metric in collected() if metric.name.startswith(("jaxllm:kv_lease", "jaxllm:kv_pull"))]


def test_drafts_are_counted_where_the_engine_speculates() -> None:
    def drafts(**stats: object) -> dict[tuple[str, str], float]:
        found = [metric for metric in collected(**stats) if metric.name.startswith("jaxllm:spec_decode_")]
        return {
            (metric.name.removeprefix("jaxllm:spec_decode_"), metric.labels.get("position", "")): metric.value
            for metric in found
        }

    assert drafts() == {}
    stats = {"num_drafts": 4, "num_draft_tokens": 8, "num_accepted_tokens": 6, "accepted_per_position": (4, 2)}
    assert drafts(**stats, num_speculative_tokens=2) == {
        ("num_drafts", ""): 4,
        ("num_draft_tokens", ""): 8,
        ("num_accepted_tokens", ""): 6,
        ("num_accepted_tokens_per_pos", "0"): 4,
        ("num_accepted_tokens_per_pos", "1"): 2,
        ("num_speculative_tokens", ""): 2,
    }


def test_adapters_are_labels_where_the_engine_has_them() -> None:
    def adapters(**stats: object) -> dict[str, object]:
        return {metric.name.removeprefix("jaxllm:"): metric for metric in collected(**stats) if ":lora_" in metric.name}

    assert adapters() == {}
    found = adapters(max_adapters=2, waiting_adapters=("a",), running_adapters=("b", "c"), num_adapter_loads=3)
    assert found["lora_requests_info"].labels == {  # type: ignore[attr-defined]
        "max_lora": "2",
        "waiting_lora_adapters": "a",
        "running_lora_adapters": "b,c",
    }
    assert found["lora_loads"].value == 3 and {"lora_evictions", "lora_load_seconds"} <= found.keys()  # type: ignore[attr-defined]


def test_the_load_of_experts_is_counted_by_layer() -> None:
    def experts(**stats: object) -> dict[tuple[str, str], float]:
        found = [metric for metric in collected(**stats) if ":expert_" in metric.name]
        return {(metric.name.removeprefix("jaxllm:expert_"), metric.labels.get("layer", "")): metric.value for metric in found}

    assert experts() == {}
    found = experts(even_expert_load=(0.0, 3.0), busiest_expert_load=(0.0, 4.0), expert_balance=0.75)
    assert found == {("load_even_tokens", "1"): 3.0, ("load_busiest_tokens", "1"): 4.0, ("balance", ""): 0.75}

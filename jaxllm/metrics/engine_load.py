"""The engine core's statistics as metrics. Every API server of an engine reports the same numbers."""

import time

from jaxllm.metrics.collect import Collected
from jaxllm.observations import COPY_BLOCKS, COPY_BYTES, COPY_SECONDS, STEP_TOKENS, Observations
from jaxllm.scheduler_stats import PULL_FAILURES, STORE_CALLS, SchedulerStats

SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""By sleep level."""


def add_load(found: Collected, load: SchedulerStats) -> None:
    """Load and totals of the engine core."""
    found.gauge("num_requests_running", load.num_running, "requests in the running batch")
    found.gauge("num_requests_waiting", load.num_waiting, "requests waiting for a place in the batch")
    by_reason = "the same by reason: for capacity, or deferred until their blocks are loaded or programs that only they need are compiled"
    num_deferred = min(load.num_deferred + load.num_loading, load.num_waiting)
    found.gauge("num_requests_waiting_by_reason", load.num_waiting - num_deferred, by_reason, reason="capacity")
    found.gauge("num_requests_waiting_by_reason", num_deferred, by_reason, reason="deferred")
    found.gauge("kv_cache_usage_perc", load.cache_usage, "fraction of the KV cache in use, 0 to 1")
    found.counter("prefix_cache_queries", load.prefix_cache_queries, "tokens looked up in the prefix cache")
    found.counter("prefix_cache_hits", load.prefix_cache_hits, "tokens found in the prefix cache")
    if load.blocks_per_state:
        found.gauge(
            "prefix_state_blocks", load.num_state_blocks, "blocks of the KV cache with states by row behind cached prefixes"
        )
        found.counter("prefix_states_stored", load.num_stored_states, "states by row that were kept behind prefixes of prompts")
        found.counter("prefix_states_loaded", load.num_loaded_states, "states by row that requests continued with")
    found.counter("num_preemptions", load.num_preemptions, "times that a running request lost its place")
    turned_away = "requests turned away because too much waits, by the option that says so"
    rejected = {
        "max_num_queued_reqs": load.num_rejected_for_requests,
        "max_num_queued_tokens": load.num_rejected_for_tokens,
        "max_queued_image_gb": load.num_rejected_for_images,
    }
    for limit, count in rejected.items():
        found.counter("admission_rejections", count, turned_away, reason=limit, engine=None)
    failed = "steps that failed, by what became of their requests: computed again, or ended"
    found.counter("failed_steps", load.num_retried_steps, failed, outcome="retried")
    found.counter("failed_steps", load.num_lost_steps, failed, outcome="ended")
    found.counter("corrupted_requests", load.num_not_finite, "requests for which the model computed NaN or infinity")
    for level, state in enumerate(SLEEP_STATES):
        found.gauge("engine_sleep_state", int(level == load.sleep_level), "1 for the state that it is in", sleep_state=state)
    steps = Observations(STEP_TOKENS, load.step_token_counts, load.num_step_tokens)
    found.histogram("iteration_tokens_total", steps, "tokens computed in a step")
    found.counter("engine_work_seconds", load.work_seconds, "time with unfinished requests")
    found.counter("device_wait_seconds", load.device_wait_seconds, "time in which the host waited for the device")
    found.counter(
        "device_idle_seconds",
        load.device_idle_seconds,
        "time with unfinished requests and no step on the device or queued there",
    )
    _add_drafts(found, load)
    _add_adapters(found, load)
    _add_experts(found, load)
    _add_images(found, load)
    _add_host_memory(found, load)
    _add_disk(found, load)
    _add_own_store(found, load)
    _add_lost_blocks(found, load)
    _add_peers(found, load)
    _add_kv_events(found, load)
    num_ready, num_awaited = load.awaited_programs
    awaited = "programs that the current step waits for, by whether they are ready"
    found.gauge("awaited_programs", num_ready, awaited, state="ready")
    found.gauge("awaited_programs", num_awaited - num_ready, awaited, state="missing")
    fraction = load.device_idle_seconds / load.work_seconds if load.work_seconds > 0 else 0.0
    found.gauge("device_idle_fraction", fraction, "device_idle_seconds per engine_work_seconds since the start")


def _add_drafts(found: Collected, load: SchedulerStats) -> None:
    """Speculative decoding, where the engine has a speculative_config."""
    if not load.accepted_per_position:
        return
    found.counter("spec_decode_num_drafts", load.num_drafts, "rows of steps that had drafts to verify")
    found.counter("spec_decode_num_draft_tokens", load.num_draft_tokens, "drafts that were verified")
    found.counter("spec_decode_num_accepted_tokens", load.num_accepted_tokens, "drafts that were accepted")
    for position, count in enumerate(load.accepted_per_position):
        by_position = "the same by position among a row's drafts, from 0"
        found.counter("spec_decode_num_accepted_tokens_per_pos", count, by_position, position=str(position))
    most = "most drafts that a row gets now; 0: switched off, because they would cost more than they bring"
    found.gauge("spec_decode_num_speculative_tokens", load.num_speculative_tokens, most)


def _add_adapters(found: Collected, load: SchedulerStats) -> None:
    """LoRA adapters, where the engine has enable_lora."""
    if not load.max_adapters:
        return
    found.gauge(
        "lora_requests_info",
        time.time(),
        "time of the reading; the labels have the adapters of waiting and of running requests, and most in a step",
        max_lora=str(load.max_adapters),
        waiting_lora_adapters=",".join(load.waiting_adapters),
        running_lora_adapters=",".join(load.running_adapters),
        model_name=None,
        engine=None,
    )
    found.counter("lora_loads", load.num_adapter_loads, "adapters written into a slot on the device")
    found.counter("lora_evictions", load.num_adapter_evictions, "those of them that took the slot of another adapter")
    found.counter("lora_load_seconds", load.adapter_load_seconds, "time from an adapter's first request until it had its slot")


def _add_images(found: Collected, load: SchedulerStats) -> None:
    """The encoder cache, where prompts have images or clips of audio. Its queries and hits are always there."""
    if not load.num_item_pages:
        return
    usage = load.num_used_item_pages / load.num_item_pages
    found.gauge("mm_cache_usage_perc", usage, "fraction of the encoder cache that requests use, 0 to 1; more is cached")
    found.counter("mm_cache_evictions", load.num_item_evictions, "encoded items that left the encoder cache for others")
    found.counter(
        "mm_encoder_patches",
        load.num_encoded_patches,
        "patches of images, positions of audio, that were encoded, without padding",
    )
    computed = "patches that the encoder computed for them, those of padding included"
    found.counter("mm_encoder_computed_patches", load.num_computed_patches, computed)
    found.counter(
        "mm_encoder_runs",
        load.num_encoder_runs,
        "runs of the encoder, each over a clip of audio, or the images of a step that fit together",
    )


_DAMAGED = "blocks that were not what was stored, or could not be read, and were computed again"


def _add_host_memory(found: Collected, load: SchedulerStats) -> None:
    """Blocks in host memory, where the engine has kv_offloading_size. Queries and hits of tokens are always there."""
    if not load.num_host_slots:
        return
    found.gauge("num_requests_loading", load.num_loading, "waiting requests whose blocks are being loaded")
    in_use, of_slots = "fraction of the blocks of host memory", 1 / load.num_host_slots
    found.gauge("kv_offload_cpu_cache_usage_perc", load.num_used_host_slots * of_slots, f"{in_use} that have a content")
    found.gauge("kv_offload_cpu_cache_read_usage_perc", load.num_read_host_slots * of_slots, f"{in_use} that loads read now")
    found.gauge(
        "kv_offload_cpu_cache_write_usage_perc", load.num_written_host_slots * of_slots, f"{in_use} that stores write now"
    )
    found.gauge(
        "kv_offload_config_info",
        1,
        "sizes of host memory, as labels: blocks that fit, bytes of each",
        cpu_num_chunks=str(load.num_host_slots),
        blocks_per_chunk="1",
        kv_bytes_per_chunk=str(load.host_block_bytes),
    )
    stores = (load.stored_bytes, load.store_seconds, load.store_byte_counts, load.store_second_counts)
    loads = (load.loaded_bytes, load.load_seconds, load.load_byte_counts, load.load_second_counts)
    for name, what, (num_bytes, seconds, byte_counts, second_counts) in (
        ("store", "copies of blocks to host memory", stores),
        ("load", "copies of blocks from host memory", loads),
    ):
        found.counter(f"kv_offload_{name}_bytes", num_bytes, f"bytes of {what}")
        found.counter(f"kv_offload_{name}_time", seconds, f"seconds of {what}, which run at the same time as steps")
        found.histogram(
            f"kv_offload_{name}_size", Observations(COPY_BYTES, byte_counts, num_bytes), f"bytes of each of the {what}"
        )
        times = Observations(COPY_SECONDS, second_counts, seconds)
        found.histogram("kv_offload_copy_seconds", times, "time of each copy of blocks to or from host memory", direction=name)
    allocated = Observations(COPY_BLOCKS, load.host_block_counts, load.num_allocated_host_slots)
    found.histogram("kv_offload_cpu_allocation_size", allocated, "blocks that got a place in host memory together")
    skipped = "blocks that left the devices uncopied, because copies were behind, or used all blocks of host memory"
    num_behind = load.num_skipped_stores - load.num_skipped_for_slots
    found.counter("kv_offload_stores_skipped", num_behind, skipped, reason="copies_behind")
    found.counter("kv_offload_stores_skipped", load.num_skipped_for_slots, skipped, reason="host_memory_in_use")
    found.counter("kv_offload_bad_blocks", load.num_damaged_blocks, _DAMAGED, tier="host")


def _add_disk(found: Collected, load: SchedulerStats) -> None:
    """Blocks in files, where the engine has kv_offloading_disk."""
    if not load.disk_bytes:
        return
    used = "fraction of --kv-offloading-disk-size in use, by all engines that share the directory"
    found.gauge("kv_offload_disk_usage_perc", load.used_disk_bytes / load.disk_bytes, used)
    found.counter("kv_offload_disk_store_bytes", load.disk_written_bytes, "bytes of blocks that were written to files")
    found.counter(
        "kv_offload_disk_store_time", load.disk_write_seconds, "seconds of these writes, of which several run at once"
    )
    found.counter("kv_offload_disk_load_bytes", load.disk_read_bytes, "bytes of blocks that were read from files")
    found.counter("kv_offload_disk_load_time", load.disk_read_seconds, "seconds of these reads, of which several run at once")
    found.counter("kv_offload_bad_blocks", load.num_bad_files, _DAMAGED, tier="disk")


def _add_own_store(found: Collected, load: SchedulerStats) -> None:
    """Blocks in a user-defined store, where a kv_transfer_config names one."""
    if not load.own_store_failures:
        return
    store = "a user-defined store"
    found.counter(
        "kv_offload_external_store_bytes", load.own_store_written_bytes, f"bytes of blocks that were written to {store}"
    )
    found.counter(
        "kv_offload_external_store_time", load.own_store_write_seconds, "seconds of these writes, of which several run at once"
    )
    found.counter("kv_offload_external_load_bytes", load.own_store_read_bytes, f"bytes of blocks that were read from {store}")
    found.counter(
        "kv_offload_external_load_time", load.own_store_read_seconds, "seconds of these reads, of which several run at once"
    )
    for call, count in zip(STORE_CALLS, load.own_store_failures, strict=True):
        found.counter(
            "kv_offload_external_failures", count, f"calls of {store} that failed or did not return in time", call=call
        )


def _add_lost_blocks(found: Collected, load: SchedulerStats) -> None:
    """Blocks that are nowhere, where there is something behind host memory."""
    if load.disk_bytes or load.own_store_failures:
        lost = (
            "blocks that left host memory and are in no file or store behind it, because that was full, behind, or had failed"
        )
        found.counter("kv_offload_lost_blocks", load.num_lost_blocks, lost)


def _add_peers(found: Collected, load: SchedulerStats) -> None:
    """Blocks that are passed between engines, where the engine has a kv_role."""
    if load.num_leasable_blocks:
        found.gauge("kv_leases", load.num_kv_leases, "prompts whose blocks this engine keeps for decode engines")
        found.counter("kv_lease_expired", load.num_expired_kv_leases, "prompts whose blocks were kept and not fetched in time")
        refused = "prompts whose blocks were not kept for a decode engine, because half of host memory was kept already"
        found.counter("kv_lease_refused", load.num_refused_kv_leases, refused)
    if load.pull_failures:
        found.counter("kv_pull_bytes", load.pulled_bytes, "bytes of blocks that were fetched from prefill engines")
        failed = "failed attempts to fetch blocks from a prefill engine"
        for reason, count in zip(PULL_FAILURES, load.pull_failures, strict=True):
            found.counter("kv_pull_failures", count, failed, reason=reason)


def _add_kv_events(found: Collected, load: SchedulerStats) -> None:
    """Events about the prefix cache, where the engine has kv_events_config."""
    if not load.num_kv_event_batches:
        return
    found.counter("kv_event_batches", load.num_kv_event_batches, "messages about the prefix cache that were published")
    dropped = (
        "changes of the prefix cache that were dropped as the queue was full; subscribers were then told of all blocks again"
    )
    found.counter("kv_events_dropped", load.num_dropped_kv_events, dropped)


def _add_experts(found: Collected, load: SchedulerStats) -> None:
    """The load of experts, where it is counted."""
    if not load.even_expert_load:
        return
    even = "tokens that a device's experts would have got in a layer if all devices had got as many (of experts, if devices share each)"
    busiest = "the same of the device, or expert, that got most, by readings of at most 10 seconds"
    for layer, (mean, most) in enumerate(zip(load.even_expert_load, load.busiest_expert_load, strict=True)):
        if most:
            found.counter("expert_load_even_tokens", mean, even, layer=str(layer))
            found.counter("expert_load_busiest_tokens", most, busiest, layer=str(layer))
    found.gauge("expert_balance", load.expert_balance, "even over busiest, of all layers in the latest reading: 1 is even")

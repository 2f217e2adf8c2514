"""Statistics of the scheduler."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Any

PULL_FAILURES = ("not_allowed", "unreachable", "refused", "differs", "lost", "missing", "damaged")
"""Why blocks could not be fetched from a prefill engine: it lies outside of kv_peers, does not answer, refuses, has another model, ended
meanwhile, has them no more; or they were not what was stored."""

LOAD_SECONDS = 0.1
"""While requests run they are collected so often for metrics: that takes several microseconds."""

STORE_CALLS = ("find", "read", "write", "discard", "clear")
"""Methods of a user-defined store whose failures are counted."""


@dataclass(slots=True)
class SchedulerStats:
    """The load at this moment, and totals since the start. Rates are differences of two.

    Not frozen: of several engines each makes one every few milliseconds, and freezing triples its cost.
    """

    num_running: int
    num_waiting: int
    cache_usage: float
    """Fraction of the usable blocks that running requests hold."""
    num_preemptions: int
    prefix_cache_queries: int
    """Tokens of first admissions that were looked up in the prefix cache."""
    prefix_cache_hits: int
    """The part of these tokens that was found."""
    resumed_prefix_cache_queries: int
    """Prefix cache queries of admissions after preemption, counted apart because they find their own blocks."""
    resumed_prefix_cache_hits: int
    num_rejected_for_requests: int = 0
    """Requests rejected by --max-num-queued-reqs."""
    num_rejected_for_tokens: int = 0
    """Requests rejected by --max-num-queued-tokens."""
    num_rejected_for_images: int = 0
    """Requests rejected by --max-queued-image-gb."""
    num_not_finite: int = 0
    """Requests that ended because the model computed NaN or infinity for them."""
    sleep_level: int = 0
    """0 awake, 1 weights offloaded, 2 all discarded (set by the core)."""
    num_queued_tokens: int = 0
    """Prompt tokens that waiting and running requests have still to compute, cached ones of waiting requests included. Those of steps in
    flight count half: on average they are half done."""
    num_cache_blocks: int = 0
    """Usable blocks of the KV cache."""
    max_concurrency: float = 0.0
    """Requests of max_model_len tokens for which the KV cache has room at once."""
    step_token_counts: tuple[int, ...] = ()
    """Steps by their tokens, between the bounds of `observations.STEP_TOKENS`."""
    num_step_tokens: int = 0
    """Tokens of all steps."""
    num_drafts: int = 0
    """Rows of steps that had drafts to verify."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """The part of these drafts that was accepted."""
    accepted_per_position: tuple[int, ...] = ()
    """Accepted drafts by position among a row's drafts; empty if the engine has no speculative_config."""
    num_speculative_tokens: int = 0
    """Most drafts that a row gets at this moment; 0 where they would cost more than they bring."""
    num_retried_steps: int = 0
    """Failed steps whose requests were recomputed (this and the next are set by the core)."""
    num_lost_steps: int = 0
    """Failed steps that ended all their requests."""
    work_seconds: float = 0.0
    """Time with unfinished requests (this and the next two are set by the loop)."""
    device_wait_seconds: float = 0.0
    """Time in which the loop waited for the device."""
    device_idle_seconds: float = 0.0
    """Time with unfinished requests and no step in flight."""
    waiting_adapters: tuple[str, ...] = ()
    """Names of the LoRA adapters of waiting requests (this and the next two are set by the core)."""
    running_adapters: tuple[str, ...] = ()
    """Adapters of running requests."""
    max_adapters: int = 0
    """Most adapters in a step; 0 without enable_lora."""
    num_adapter_loads: int = 0
    """Adapters that were written into a slot (this and the next two are set by the core)."""
    num_adapter_evictions: int = 0
    """The part of them that took the slot of another adapter."""
    adapter_load_seconds: float = 0.0
    """Time from an adapter's first request until it had its slot, of all loads together."""
    even_expert_load: tuple[float, ...] = ()
    """By layer, tokens that each device would have got if all had got as many, added up over readings; where no device has whole experts,
    those of each expert. 0 for layers without a mixture; empty if they are not counted (this and the next two are set by the core)."""
    busiest_expert_load: tuple[float, ...] = ()
    """Tokens of the device, or expert, that got most in a reading."""
    expert_balance: float = 1.0
    """The quotient of the two, over all layers, in the latest reading."""
    item_cache_queries: int = 0
    """Items of admitted prompts, images for example, that were looked up in the encoder cache, each when its first token was computed."""
    item_cache_hits: int = 0
    """The part of these items that was found; each of the others was encoded."""
    num_item_evictions: int = 0
    """Items that left the encoder cache for others."""
    num_encoded_patches: int = 0
    """Patches of all encoded items, without padding."""
    num_computed_patches: int = 0
    """Patches that the encoder computed, of all data-parallel ranks together, padding included (this and the next are set by the core)."""
    num_encoder_runs: int = 0
    """Runs of the encoder; the parts of an image are one."""
    num_item_pages: int = 0
    """Pages of the encoder cache; 0 for a model of text alone."""
    num_used_item_pages: int = 0
    """Pages of items that requests compute."""
    blocks_per_state: int = 0
    """Blocks that hold the states of a row; 0 for engines that keep none behind prefixes."""
    num_state_blocks: int = 0
    """Blocks in which states by row can be found."""
    num_stored_states: int = 0
    """States by row that were put into blocks."""
    num_loaded_states: int = 0
    """States by row with which requests continued cached prefixes."""
    external_prefix_cache_queries: int = 0
    """Tokens of admissions that the pool did not have and that were looked up in tiers."""
    external_prefix_cache_hits: int = 0
    """The part of these tokens that tiers loaded."""
    num_host_slots: int = 0
    """Blocks that host memory has room for; 0 without kv_offloading_size."""
    num_used_host_slots: int = 0
    """Blocks that it has or that are being copied there."""
    num_stored_blocks: int = 0
    """Blocks that were copied to host memory."""
    num_skipped_stores: int = 0
    """Blocks that left the devices and were not copied because copies were behind or copies used all slots."""
    num_skipped_for_slots: int = 0
    """The part of them for the second reason."""
    num_loaded_blocks: int = 0
    """Blocks that were copied from host memory."""
    num_damaged_blocks: int = 0
    """Blocks whose content in host memory was not what was stored, and was computed again."""
    stored_bytes: int = 0
    """Bytes of all copies to host memory."""
    loaded_bytes: int = 0
    """Bytes of all copies from host memory, for whatever became of them."""
    store_seconds: float = 0.0
    """Time of copies to host memory."""
    load_seconds: float = 0.0
    """Time of copies from host memory."""
    disk_bytes: int = 0
    """Room for files of blocks; 0 without kv_offloading_disk. Engines that share a directory have this and the next in common."""
    used_disk_bytes: int = 0
    num_disk_reads: int = 0
    """Blocks that were read from files."""
    num_disk_writes: int = 0
    """Blocks that were written to files."""
    num_lost_blocks: int = 0
    """Blocks that left host memory unwritten, because what is behind it was full, behind, or failed; 0 where nothing is written."""
    num_bad_files: int = 0
    """Files that were not what was written, or could not be read in time."""
    disk_read_bytes: int = 0
    disk_written_bytes: int = 0
    disk_read_seconds: float = 0.0
    """Time of reads, of which several run at once; the next of writes."""
    disk_write_seconds: float = 0.0
    own_store_read_bytes: int = 0
    """Bytes of blocks that were read from a user-defined store; the next of those written to it."""
    own_store_written_bytes: int = 0
    own_store_read_seconds: float = 0.0
    """Time of reads, of which several run at once; the next of writes."""
    own_store_write_seconds: float = 0.0
    own_store_failures: tuple[int, ...] = ()
    """Calls that failed, for each of STORE_CALLS; empty without such a store."""
    store_byte_counts: tuple[int, ...] = ()
    """Copies to host memory by their bytes, between the bounds of `observations.COPY_BYTES`."""
    load_byte_counts: tuple[int, ...] = ()
    """Copies from host memory."""
    store_second_counts: tuple[int, ...] = ()
    """Copies to host memory by their time, between the bounds of `observations.COPY_SECONDS`."""
    load_second_counts: tuple[int, ...] = ()
    """Copies from host memory."""
    host_block_counts: tuple[int, ...] = ()
    """Copies to host memory, begun or over, by their blocks, between the bounds of `observations.COPY_BLOCKS`."""
    num_allocated_host_slots: int = 0
    """Blocks of all these."""
    num_written_host_slots: int = 0
    """Blocks of host memory that copies write at this moment."""
    num_read_host_slots: int = 0
    """Blocks of host memory that copies read, or will, at this moment."""
    host_block_bytes: int = 0
    """Bytes of a block there."""
    num_loading: int = 0
    """The part of `num_waiting` whose blocks are being loaded."""
    num_kv_event_batches: int = 0
    """Messages about the prefix cache that were published; 0 without kv_events_config (this and the next are set by the core)."""
    num_dropped_kv_events: int = 0
    """Changes of the prefix cache that were not published one by one, because messages were not sent as fast as steps made them."""
    num_leasable_blocks: int = 0
    """Blocks that a prefill engine keeps at most for decode engines; 0 for others."""
    num_kv_leases: int = 0
    """Prompts whose blocks it keeps."""
    num_expired_kv_leases: int = 0
    """Leases that no decode engine ended in time."""
    num_refused_kv_leases: int = 0
    """Prompts whose blocks were not kept, because too many were."""
    pulled_bytes: int = 0
    """Bytes of blocks that a decode engine fetched."""
    pull_failures: tuple[int, ...] = ()
    """Attempts to fetch blocks that failed, for each of PULL_FAILURES; empty for other engines."""
    awaited_programs: tuple[int, int] = (0, 0)
    """Programs that the current step waits for: ready, and in total. Set in heartbeats only."""
    num_deferred: int = 0
    """The part of `num_waiting` that waits for programs, not for a place."""


_MOST = (
    "sleep_level",
    "num_speculative_tokens",
    "max_adapters",
    "disk_bytes",
    "used_disk_bytes",
    "host_block_bytes",
    "blocks_per_state",
)
"""Fields whose total is the largest value, not the sum."""
_LEAST = ("expert_balance",)
"""Fields whose total is the smallest value."""


def total(parts: Sequence[SchedulerStats]) -> SchedulerStats:
    """The numbers of several engines together; cache_usage is the mean over their blocks."""
    if len(parts) == 1:
        return parts[0]
    found = SchedulerStats(**{field.name: _total(field.name, parts) for field in fields(SchedulerStats)})
    num_blocks = sum(part.num_cache_blocks for part in parts)
    if num_blocks:
        found.cache_usage = sum(part.cache_usage * part.num_cache_blocks for part in parts) / num_blocks
    return found


def _total(name: str, parts: Iterable[SchedulerStats]) -> Any:
    values = [getattr(part, name) for part in parts]
    if name in ("waiting_adapters", "running_adapters"):
        return tuple(dict.fromkeys(adapter for adapters in values for adapter in adapters))
    if name in _MOST:
        return max(values)
    if name in _LEAST:
        return min(values)
    return tuple(map(sum, zip_longest(*values, fillvalue=0))) if isinstance(values[0], tuple) else sum(values)

"""Options of an engine on several hosts: which agree, and which may differ between hosts. Does not import JAX."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from jaxllm.media.options import MediaOptions

OF_ONE_HOST = frozenset({
    *({field.name for field in fields(MediaOptions)} - {"mm_max_patches"}), "interleave_mm_strings",
    *("node_rank", "master_addr", "master_port", "distributed_executor_backend", "distributed_timeout_seconds", "kv_host"),
    *("model", "tokenizer", "download_dir", "logits_processors", "chat_template", "profiler_dir"),
    *("use_progress_bar", "disable_log_stats", "compilation_cache", "compile_threads"),
    *("scheduling_policy", "max_num_queued_reqs", "max_num_queued_tokens", "max_queued_image_gb"),
})  # fmt: skip
"""Options whose values may differ between the hosts of an engine: paths on each host, and what its programs do not depend on."""

MAX_PLAN_BYTES = 256 << 20
"""The longest plan of a step that hosts send each other."""


def hosts_faults(flat: Mapping[str, Any]) -> list[str]:
    """Describe the options of hosts that contradict each other or other options."""
    num_hosts, rank, size = flat["nnodes"], flat["node_rank"], flat["tensor_parallel_size"]
    num_replicas, num_stages = flat["data_parallel_size"], flat["pipeline_parallel_size"]
    context = flat["prefill_context_parallel_size"]
    numbers = (num_hosts, rank, size, num_replicas, num_stages, context)
    if not all(isinstance(value, int) and value >= 0 for value in numbers) or not (num_hosts and num_stages):
        return []  # reported already
    faults = []
    if rank >= num_hosts:
        faults.append(f"node_rank is {rank}, must be below nnodes, {num_hosts}: hosts count from 0")
    if num_hosts > 1 and num_replicas > 1:
        if num_replicas % num_hosts:
            parts = "ranks" if flat["enable_expert_parallel"] else "replicas"
            faults.append(
                f"data_parallel_size is {num_replicas}, which {num_hosts} hosts (nnodes) cannot share equally, and {parts} lie whole on a "
                f"host; choose a multiple of {num_hosts}"
            )
    elif num_hosts > 1:
        if has_stages_on_hosts(num_hosts, num_stages):
            faults += _stages_faults(flat)
        elif size * context % num_hosts:
            times = f" and prefill_context_parallel_size {context}, {size * context} devices" if context > 1 else ""
            faults.append(
                f"tensor_parallel_size is {size}{times}, which {num_hosts} hosts (nnodes) cannot share equally; choose a multiple of "
                f"{num_hosts}"
            )
        if flat["compiled_artifact"] is not None:
            faults.append("compiled_artifact is set with nnodes: programs for several hosts cannot be stored; leave it out")
    return faults


def has_stages_on_hosts(num_hosts: int, num_stages: int) -> bool:
    """Whether the stages of a pipeline lie on several hosts: then host 0 has the last one, and another host the first."""
    return num_hosts > 1 and num_stages > 1


def has_ranks_on_hosts(num_hosts: int, num_ranks: int) -> bool:
    """Whether an engine's data-parallel ranks are on several hosts, each with some of them."""
    return num_hosts > 1 and num_ranks > 1


def _stages_faults(flat: Mapping[str, Any]) -> list[str]:
    """Stages that cannot be divided among the hosts, and options that they exclude there."""
    num_hosts, num_stages, size = flat["nnodes"], flat["pipeline_parallel_size"], flat["tensor_parallel_size"]
    asked = f"pipeline_parallel_size is {num_stages} with nnodes {num_hosts}"
    faults = []
    if num_stages % num_hosts and num_hosts % num_stages:
        faults.append(
            f"{asked}, but each host has whole stages, or each stage whole hosts; choose one that is a multiple of the other"
        )
    elif num_hosts > num_stages and size % (num_hosts // num_stages):
        faults.append(
            f"{asked} and tensor_parallel_size {size}, which the {num_hosts // num_stages} hosts of a stage cannot share equally; choose "
            f"a multiple of {num_hosts // num_stages}"
        )
    faults += [
        f"{name} is set and {asked}, but tokens of experts are counted where all stages lie on one host; leave {name} out"
        for name in ("expert_load", "enable_eplb")
        if flat[name]
    ]
    return faults

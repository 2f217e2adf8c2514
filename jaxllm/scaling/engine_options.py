"""The engine options of an experiment's processes: what somebody set, and for the rest what the planned work needs."""

from typing import Any

from jaxllm.config import AUTO_MODEL_LEN, EngineConfig, resolve_platform_defaults
from jaxllm.scaling.decodes import SETTLING_STEPS
from jaxllm.scaling.plan import Plan
from jaxllm.scaling.rows import DECODE, MIXED, PREFILL

SMALLEST_GPU_BUCKET = 8
"""On a GPU decodes of fewer rows run in a program of 8, which is faster (`runner/buckets.py`)."""
SPARE_STEPS = 16
"""Steps beside the counted ones: those in flight when the clock starts and when a trace begins."""


def engine_options(
    plan: Plan, tensor_parallel_size: int, *, on_gpu: bool, device_bytes: int, max_position: int
) -> dict[str, Any]:
    """Flat options. They are the same at every size but for the size itself and the batch sizes that are compiled.

    Without mixed work only the programs of the planned batch sizes are made, each when it is first needed: most of the time that a
    size takes would be compilation otherwise.
    """
    options = {
        "model": plan.model,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        **plan.options,
        "tensor_parallel_size": tensor_parallel_size,
    }
    if "max_num_seqs" not in options:
        usual = resolve_platform_defaults(EngineConfig(), on_gpu=on_gpu, device_bytes=device_bytes).scheduler.max_num_seqs
        options["max_num_seqs"] = max(plan.largest_batch(), usual if MIXED in plan.works and usual is not None else 1)
    if MIXED not in plan.works:
        least = SMALLEST_GPU_BUCKET if on_gpu else 1
        buckets = {max(least, batch) for batch in plan.decode_batches(tensor_parallel_size)}
        if buckets and "decode_buckets" not in options:
            options["decode_buckets"] = tuple(sorted(buckets))
        options.setdefault("warmup", "lazy")
    if "max_model_len" not in options:
        config = EngineConfig.from_options(**options)
        concrete = resolve_platform_defaults(config, on_gpu=on_gpu, device_bytes=device_bytes).scheduler
        assert concrete.max_num_batched_tokens is not None
        options["max_model_len"] = min(max_position, longest_request(plan, concrete.max_num_batched_tokens))
    elif options["max_model_len"] == AUTO_MODEL_LEN:
        options["max_model_len"] = max_position
    return options


def longest_request(plan: Plan, max_num_batched_tokens: int) -> int:
    """Tokens of the longest request of all sizes: the first to decode of a batch gets tokens while the others' prompts are computed."""
    longest = plan.input_len + 1 if PREFILL in plan.works else 1
    if DECODE in plan.works:
        batch = plan.largest_batch()
        room = max(1, max_num_batched_tokens - batch)
        steps = -(-batch * plan.input_len // room) + SETTLING_STEPS + plan.output_len + plan.trace_steps + SPARE_STEPS
        longest = max(longest, plan.input_len + steps)
    if MIXED in plan.works:
        longest = max(longest, *(prompt + output for prompt, output in plan.requests))
    return longest

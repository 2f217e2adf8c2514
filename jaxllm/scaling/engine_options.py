"""Engine options of an experiment's processes: the explicitly set ones, and those derived from the planned work."""

from collections.abc import Callable
from typing import Any

from jaxllm.config import AUTO_MODEL_LEN, EngineConfig
from jaxllm.kernel_policy import platform_policy
from jaxllm.measuring.runs import SETTLING_STEPS
from jaxllm.model_config import ModelConfig
from jaxllm.runner.buckets import Buckets
from jaxllm.scaling.plan import DECODE, MIXED, PREFILL, Plan

SPARE_STEPS = 16
"""Steps in addition to the counted ones: those in flight when the clock starts and when a trace begins."""


def engine_options(
    plan: Plan,
    tensor_parallel_size: int,
    resolve: Callable[[dict[str, Any]], tuple[EngineConfig, ModelConfig]],
    *,
    on_gpu: bool,
) -> dict[str, Any]:
    """Flat options: equal at every size, except the size itself, the compiled batch sizes, and, if it is not set, a step's
    maximum of tokens.

    Without mixed work only the programs of the planned work are compiled: most of a size's time would be compilation
    otherwise. resolve: gives an engine's config with all defaults, and its model's.
    """
    options = {"model": plan.model, "enable_prefix_caching": False, "skip_tokenizer_init": True, **plan.options}
    options["tensor_parallel_size"] = tensor_parallel_size
    usual, model_config = resolve(options)
    usual_rows, usual_tokens = usual.scheduler.max_num_seqs, usual.scheduler.max_num_batched_tokens
    assert usual_rows is not None and usual_tokens is not None, "they are resolved"
    max_rows = options.setdefault("max_num_seqs", max(plan.largest_batch(), usual_rows if MIXED in plan.works else 1))
    step_tokens = max(usual_tokens, max_rows)
    if options.get("max_num_batched_tokens") is None:
        # All steps have one limit, so that their sizes are known before the engine starts.
        options.setdefault("max_num_prefill_tokens", step_tokens)
    if MIXED not in plan.works:
        policy = platform_policy(on_gpu=on_gpu)
        if batches := plan.decode_batches(tensor_parallel_size):
            options.setdefault("decode_buckets", sorted({max(policy.least_rows, batch) for batch in batches}))
        # Of the usual sizes those of one prompt, of whole steps, and of the last step of a prefill.
        buckets = Buckets.choose(resolve(options)[0], policy)
        largest = buckets.tokens[-1]
        sizes = (largest, min(plan.input_len, largest), plan.prefill_prompts * plan.input_len % largest)
        options.setdefault("token_buckets", sorted({buckets.fit_tokens(size) for size in sizes if size}))
    if "max_model_len" not in options:
        options["max_model_len"] = min(model_config.max_position, longest_request(plan, step_tokens))
    elif options["max_model_len"] == AUTO_MODEL_LEN:
        options["max_model_len"] = model_config.max_position
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def longest_request(plan: Plan, max_num_batched_tokens: int) -> int:
    """Tokens of the longest request of all sizes: the first request of a batch decodes during the others' prompts."""
    longest = plan.input_len + 1 if PREFILL in plan.works else 1
    if DECODE in plan.works:
        batch = plan.largest_batch()
        room = max(1, max_num_batched_tokens - batch)
        steps = -(-batch * plan.input_len // room) + SETTLING_STEPS + plan.output_len + plan.trace_steps + SPARE_STEPS
        longest = max(longest, plan.input_len + steps)
    return max([longest, *(prompt + output for prompt, output in plan.requests)])

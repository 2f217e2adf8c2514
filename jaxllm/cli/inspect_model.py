"""`jaxllm inspect MODEL`: a model's properties and requirements, without loading its weights."""

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from jaxllm.cli import model_text, options, planning
from jaxllm.cli.flags import engine_flags
from jaxllm.cli.numbers import positive
from jaxllm.cli.parser import Parser
from jaxllm.errors import JaxLLMError, ModelLoadError

if TYPE_CHECKING:
    from jaxllm.runner.memory import MemoryPlan

ABOUT = (
    "The numbers of a model: architecture, parameters, bytes of weights, bytes of KV cache per token, and whether it fits here and can "
    "start."
)
EXAMPLES = """examples:
  jaxllm inspect demo
  jaxllm inspect Qwen/Qwen3-0.6B --dtype bfloat16 --max-model-len 8k
  jaxllm inspect meta-llama/Llama-3.1-70B --tensor-parallel-size 4 --device-memory 140G     on GPUs that are elsewhere"""


def add_arguments(parser: Parser) -> None:
    options.add_model_argument(parser)
    parser.add_argument("--json", action="store_true", help="as a JSON object")
    parser.add_argument(
        "--device-memory",
        type=positive,
        metavar="BYTES",
        help="plan for GPUs with so much memory (80G, 140G) instead of for this machine",
    )
    options.add_log_arguments(parser)
    parser.add_argument("--config", metavar="FILE", help="YAML file with options; default: $JAXLLM_CONFIG")
    parser.add_flags(engine_flags())


def run(arguments: argparse.Namespace) -> int:
    """Print the numbers. Returns the exit code: 1 if it does not fit or cannot start."""
    options.use_model_argument(arguments)
    plan = planning.plan(options.engine_options(arguments), device_bytes=arguments.device_memory)
    report, fault = describe(plan), _fault(plan)
    if arguments.json:
        memory = _without_cache(plan.memory)
        memory["fits"] = fault is None
        told = None if fault is None else str(fault)
        print(json.dumps({**report, "memory_plan": memory, "host_bytes_while_loading": plan.host_bytes, "fault": told}))
        return 0 if fault is None else 1
    for name, value in report.items():
        if name == "layers":
            texts = list(model_text.layer_kinds(plan.model_config.layers))
        else:
            texts = list(map(model_text.cache_group, value)) if name == "cache_groups" else [model_text.as_text(name, value)]
        print("\n".join(model_text.paragraph(name, text) for text in texts))
    print(plan.describe())
    verdict = "it cannot start" if isinstance(fault, ModelLoadError) else "it does not fit"
    print("it fits" if fault is None else f"{verdict}: {fault}")
    return 0 if fault is None else 1


def describe(plan: planning.Plan) -> dict[str, Any]:
    """The model's own numbers, then its memory use over all devices."""
    from jaxllm.layers.build import num_parameters, weight_bytes

    cache, longest = plan.cache, plan.memory.max_model_len
    block_bytes = cache.block_bytes
    groups = [
        {
            "keeps": str(group.policy),
            "layers": list(group.layers),
            "bytes_per_token": block_bytes // cache.block_size,
            "bytes_per_longest_request": block_bytes
            * group.policy.num_blocks_for(longest, cache.block_size, cache.max_step_tokens),
        }
        for group in cache.groups
    ]
    by_row = [layer for layer, place in enumerate(cache.places) if place.group is None]
    states = {"keeps": "a state by row", "layers": by_row, "bytes_per_token": 0, "bytes_per_longest_request": cache.row_bytes}
    num_groups = len(groups)
    groups += [states] if by_row else []
    return {
        "model": plan.config.model.model,
        **plan.model_config.described(),
        "num_parameters": num_parameters(plan.model_config),
        "weight_bytes": weight_bytes(plan.model_config),
        "kv_cache_bytes_per_token": num_groups * block_bytes // cache.block_size,
        "cache_groups": groups,
        "longest_request_tokens": longest,
        "longest_request_bytes": sum(group["bytes_per_longest_request"] for group in groups),
    }


def _without_cache(memory: "MemoryPlan") -> dict[str, Any]:
    """The numbers of a memory plan alone."""
    values = {field.name: getattr(memory, field.name) for field in dataclasses.fields(memory) if field.name != "cache"}
    return {**values, "block_bytes": memory.block_bytes, "block_size": memory.block_size, "state_bytes": memory.state_bytes}


def _fault(plan: planning.Plan) -> JaxLLMError | None:
    try:
        plan.check()
    except JaxLLMError as error:
        return error
    return None

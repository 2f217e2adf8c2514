"""`jaxllm inspect MODEL`: a model's properties and requirements, without loading its weights."""

import argparse
import dataclasses
import itertools
import json
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.cli import options
from jaxllm.cli.flags import engine_flags
from jaxllm.cli.numbers import positive
from jaxllm.cli.parser import Parser
from jaxllm.cli.terminal import size
from jaxllm.config import EngineConfig
from jaxllm.encoder_sizes import most_patches
from jaxllm.errors import ModelLoadError
from jaxllm.model_parts import Layer

if TYPE_CHECKING:
    from jaxllm.engine_plan import EnginePlan
    from jaxllm.runner.memory import MemoryPlan

ABOUT = (
    "The numbers of a model: architecture, parameters, bytes of weights, bytes of KV cache per token, and whether it fits here and can "
    "start."
)
EXAMPLES = """examples:
  jaxllm inspect demo
  jaxllm inspect Qwen/Qwen3-0.6B --dtype bfloat16 --max-model-len 8k
  jaxllm inspect meta-llama/Llama-3.1-70B --tensor-parallel-size 4 --device-memory 140G     on GPUs that are elsewhere"""

_WIDTH, _INDENT = 100, 30
"""Columns of the text, and where values begin."""
IMAGE_SIZES = ((640, 480), (1920, 1080), (4000, 3000))
"""Width and height in pixels of the images whose token counts are printed."""
_NAMES = {"name", "qkv", "out", "gate_up", "down", "router", "correction_bias", "shared_gate"}
"""Fields of parts that say what the checkpoint calls something."""


def add_arguments(parser: Parser) -> None:
    options.add_model_argument(parser)
    parser.add_argument("--json", action="store_true", help="as a JSON object")
    memory = "plan for GPUs with so much memory (80G, 140G) instead of for this machine"
    parser.add_argument("--device-memory", type=positive, metavar="BYTES", help=memory)
    options.add_log_arguments(parser)
    options.add_config_argument(parser)
    parser.add_flags(engine_flags())


def run(arguments: argparse.Namespace) -> int:
    """Print the numbers. Returns the exit code: 1 if it does not fit or cannot start."""
    from jaxllm.engine_plan import plan_engine

    options.use_model_argument(arguments)
    plan = plan_engine(EngineConfig.from_options(**options.engine_options(arguments)), device_bytes=arguments.device_memory)
    report, fault = describe(plan), plan.fault
    if arguments.json:
        memory = {**_memory(plan.memory), "fits": fault is None}
        told = None if fault is None else str(fault)
        print(json.dumps({**report, "memory_plan": memory, "fault": told}))
        return 0 if fault is None else 1
    texts = {name: [_as_text(name, value)] for name, value in report.items()}
    texts["layers"] = list(_layer_kinds(plan.model_config.layers))
    texts["images"] = [_images_text(report["images"]) if report["audio"] is None else "none: it takes audio and text"]
    texts["cache_groups"] = list(map(_cache_group, report["cache_groups"]))
    for name, paragraphs in texts.items():
        for text in paragraphs:
            print(_paragraph(name, text))
    print(plan.memory.describe())
    verdict = "it cannot start" if isinstance(fault, ModelLoadError) else "it does not fit"
    print("it fits" if fault is None else f"{verdict}: {fault}")
    return 0 if fault is None else 1


def describe(plan: "EnginePlan") -> dict[str, Any]:
    """The model's own numbers, then its memory use over all devices."""
    from jaxllm.layers.build import num_parameters, weight_bytes

    cache, longest = plan.cache, plan.memory.max_model_len
    per_token = cache.block_bytes // cache.block_size
    groups = [
        {
            "keeps": str(group.policy),
            "layers": list(group.layers),
            "bytes_per_token": per_token,
            "bytes_per_longest_request": cache.block_bytes
            * group.policy.num_blocks_for(longest, cache.block_size, cache.max_step_tokens),
        }
        for group in cache.groups
    ]
    if by_row := [layer for layer, place in enumerate(cache.places) if place.group is None]:
        sizes = {"bytes_per_token": 0, "bytes_per_longest_request": cache.row_bytes}
        groups.append({"keeps": "a state by row", "layers": by_row, **sizes})
    described = plan.model_config.described()
    del described["vision"]
    return {
        "model": plan.config.model.model,
        **described,
        "images": _images(plan),
        "num_parameters": num_parameters(plan.model_config),
        "weight_bytes": weight_bytes(plan.model_config),
        "kv_cache_bytes_per_token": len(cache.groups) * cache.block_bytes // cache.block_size,
        "cache_groups": groups,
        "longest_request_tokens": longest,
        "longest_request_bytes": sum(group["bytes_per_longest_request"] for group in groups),
    }


def _images(plan: "EnginePlan") -> dict[str, Any] | None:
    """How the model sees images, and how many tokens some sizes have; None: it takes text alone."""
    vision, media = plan.model_config.vision, plan.media
    if vision is None:
        return None
    from jaxllm.media.processor import MediaProcessor  # imports Pillow

    return {
        "family": vision.family,
        "encoder_layers": vision.num_layers,
        "encoder_width": vision.hidden_size,
        "patch_size": vision.patch_size,
        "patches_of_a_token": vision.merge_size**2,
        "max_patches": most_patches(vision, plan.config.multimodal.mm_max_patches),
        "tokens": {}
        if not isinstance(media, MediaProcessor)
        else {f"{w}x{h}": media.count_tokens(w, h) for w, h in IMAGE_SIZES},
    }


def _images_text(images: dict[str, Any] | None) -> str:
    if images is None:
        return "none: it takes text alone"
    tokens = "".join(f", {size} pixels are {count} tokens" for size, count in images["tokens"].items())
    return (
        f"{images['family']}, an encoder of {images['encoder_layers']} layers of width {images['encoder_width']} for patches of "
        f"{images['patch_size']} x {images['patch_size']} pixels, at most {images['max_patches']} of an image and "
        f"{images['patches_of_a_token']} of a token{tokens}"
    )


def _memory(plan: "MemoryPlan") -> dict[str, Any]:
    """The numbers of a memory plan alone."""
    names = [field.name for field in dataclasses.fields(plan) if field.name != "cache"]
    return {name: getattr(plan, name) for name in (*names, "block_bytes", "block_size", "state_bytes")}


def _paragraph(name: str, text: str) -> str:
    """A name, and its text in the column next to it."""
    heading = name.replace("_", " ").ljust(_INDENT)
    return textwrap.fill(
        text, _WIDTH, initial_indent=heading, subsequent_indent=" " * _INDENT, break_long_words=False, break_on_hyphens=False
    )


def _layer_kinds(layers: Sequence[Layer]) -> Iterable[str]:
    """For each kind of layer which layers are of it, and how its parts differ from the plainest."""
    for kind in dict.fromkeys(layers):
        places = numbers(i for i, layer in enumerate(layers) if layer == kind)
        yield f"{places}: {_differences(kind)}"


def _cache_group(group: dict[str, Any]) -> str:
    """Layers that share blocks, or have a state by row, and what these cost."""
    per_token = f"{size(group['bytes_per_token'])} a token, at most " if group["bytes_per_token"] else ""
    longest = size(group["bytes_per_longest_request"])
    return f"{group['keeps']}, layers {numbers(group['layers'])}: {per_token}{longest} a request"


def numbers(given: Iterable[int]) -> str:
    """Ascending numbers, short: 0-4, 6, 8-10; at equal distances 5, 11, …, 47."""
    found = list(given)
    steps = {after - before for before, after in itertools.pairwise(found)}
    if len(found) > 3 and len(steps) == 1 and steps != {1}:
        return f"{found[0]}, {found[1]}, …, {found[-1]}"
    runs: list[list[int]] = []
    for number in found:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _differences(part: Any) -> str:
    """The fields of a part that do not have their default."""
    told = []
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.name in _NAMES or value == field.default:
            continue
        if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            value = value[0]  # the norms of queries and keys are alike
        if not dataclasses.is_dataclass(value):
            told.append(field.name if value is True else f"{field.name} {_as_text(field.name, value)}")
        else:
            inner = _differences(value)
            told.append(f"{field.name} ({inner})" if inner else field.name)
    return ", ".join(told)


def _as_text(name: str, value: Any) -> str:
    """The value of this name."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items() if inner is not None)
    if isinstance(value, (list, tuple)):
        return ", ".join(_as_text("", inner) if isinstance(inner, dict) else str(inner) for inner in value) or "none"
    if name.endswith(("bytes", "per_token")):
        return size(value)
    return f"{value:,}" if name == "num_parameters" else str(value)

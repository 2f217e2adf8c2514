"""`jaxllm inspect MODEL`: a model's properties and requirements, without loading its weights."""

import argparse
import dataclasses
import json
import textwrap
from typing import TYPE_CHECKING, Any

from jaxllm.cli import options
from jaxllm.cli.flags import engine_flags
from jaxllm.cli.numbers import positive
from jaxllm.cli.parser import Parser
from jaxllm.cli.terminal import size
from jaxllm.config import EngineConfig
from jaxllm.errors import ModelLoadError
from jaxllm.model_parts.audio import HOP, SAMPLE_RATE, Audio
from jaxllm.model_parts.description import kinds_of_layers, short_ranges

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

_WIDTH, _INDENT = 100, 30
"""Columns of the text, and where values begin."""


def add_arguments(parser: Parser) -> None:
    parser.add_model()
    parser.add_argument("--json", action="store_true", help="as a JSON object")
    memory = "plan for GPUs with so much memory (80G, 140G) instead of for this machine"
    parser.add_argument("--device-memory", type=positive, metavar="BYTES", help=memory)
    options.add_log_arguments(parser)
    options.add_config_argument(parser)
    parser.add_flags(engine_flags())


def run(arguments: argparse.Namespace) -> int:
    """Print the numbers. Returns the exit code: 1 if it does not fit or cannot start."""
    from jaxllm.engine_plan import plan_engine

    plan = plan_engine(EngineConfig.from_options(**options.engine_options(arguments)), device_bytes=arguments.device_memory)
    report, fault = plan.described(), plan.fault
    if arguments.json:
        memory, host = {**_memory(plan.memory), "fits": fault is None}, plan.host and plan.host.described()
        print(json.dumps({**report, "memory_plan": memory, "host_memory": host, "fault": fault and str(fault)}))
        return 0 if fault is None else 1
    texts = {name: [_as_text(name, value)] for name, value in report.items()}
    texts["layers"] = list(kinds_of_layers(plan.model_config.layers))
    audio = plan.model_config.audio
    texts["images"] = [_images_text(report["images"]) if audio is None else "none: it takes audio and text"]
    if report["images"] is None and plan.model_config.names.is_part:
        texts["images"][0] += ", as nothing but its text model is loaded"
    if audio is not None:
        texts["audio"] = [_audio_text(audio)]
    texts["cache_groups"] = list(map(_cache_group, report["cache_groups"]))
    for name, paragraphs in texts.items():
        for text in paragraphs:
            print(_paragraph(name, text))
    print(plan.describe_memory())
    verdict = "it cannot start" if isinstance(fault, ModelLoadError) else "it does not fit"
    print("it fits" if fault is None else f"{verdict}: {fault}")
    return 0 if fault is None else 1


def _images_text(images: dict[str, Any] | None) -> str:
    if images is None:
        return "none: it takes text alone"
    tokens = "".join(f", {size} pixels are {count} tokens" for size, count in images["tokens"].items())
    return (
        f"{images['family']}, an encoder of {images['encoder_layers']} layers of width {images['encoder_width']} for patches of "
        f"{images['patch_size']} x {images['patch_size']} pixels, at most {images['max_patches']} of an image and "
        f"{images['patches_of_a_token']} of a token{tokens}"
    )


def _audio_text(audio: Audio) -> str:
    tokens = audio.tokens
    what = "which layers attend to" if tokens is None else f"{SAMPLE_RATE / (2 * HOP) / tokens.num_averaged:g} tokens a second"
    return (
        f"an encoder of {audio.num_layers} layers of width {audio.hidden_size} for clips of at most {audio.num_samples / SAMPLE_RATE:g} "
        f"seconds, {what}"
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


def _cache_group(group: dict[str, Any]) -> str:
    """Layers that share blocks, or have a state by row, and what these cost."""
    token = f"{size(group['bytes_per_token'])} a token, at most " if group["bytes_per_token"] else ""
    more = f", and {count} blocks a cached prefix" if (count := group.get("blocks_per_cached_prefix")) else ""
    return f"{group['keeps']}, layers {short_ranges(group['layers'])}: {token}{size(group['bytes_per_longest_request'])} a request{more}"


def _as_text(name: str, value: Any) -> str:
    """The value of this name."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items() if inner is not None)
    if isinstance(value, (list, tuple)):
        return ", ".join(_as_text("", inner) if isinstance(inner, dict) else str(inner) for inner in value) or "none"
    if name.endswith(("bytes", "per_token")):
        return size(value)
    return f"{value:,}" if name == "num_parameters" else str(value)

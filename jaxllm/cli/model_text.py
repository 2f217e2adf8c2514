"""A model's description as text for people, within 100 columns."""

import dataclasses
import itertools
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from jaxllm.cli.terminal import size
from jaxllm.model_parts import Layer

_WIDTH, _INDENT = 100, 30
_NAMES = {"name", "qkv", "out", "gate_up", "down", "router", "correction_bias", "shared_gate"}
"""Fields of parts that say what the checkpoint calls something."""


def paragraph(name: str, text: str) -> str:
    """A name, and its text in the column next to it."""
    heading = name.replace("_", " ").ljust(_INDENT)
    return textwrap.fill(
        text, _WIDTH, initial_indent=heading, subsequent_indent=" " * _INDENT, break_long_words=False, break_on_hyphens=False
    )


def layer_kinds(layers: Sequence[Layer]) -> Iterable[str]:
    """For each kind of layer which layers are of it, and how its parts differ from the plainest."""
    for kind in dict.fromkeys(layers):
        places = numbers(i for i, layer in enumerate(layers) if layer == kind)
        yield f"{places}: {_differences(kind)}"


def cache_group(group: dict[str, Any]) -> str:
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
            told.append(field.name if value is True else f"{field.name} {as_text(field.name, value)}")
        else:
            inner = _differences(value)
            told.append(f"{field.name} ({inner})" if inner else field.name)
    return ", ".join(told)


def as_text(name: str, value: Any) -> str:
    """The value of this name."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items() if inner is not None)
    if isinstance(value, (list, tuple)):
        return ", ".join(as_text("", inner) if isinstance(inner, dict) else str(inner) for inner in value) or "none"
    if name.endswith(("bytes", "per_token")):
        return size(value)
    return f"{value:,}" if name == "num_parameters" else str(value)

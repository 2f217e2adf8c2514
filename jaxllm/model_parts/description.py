"""Layers of a decoder in words, for people who look at a model."""

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jaxllm.model_parts.decoder import Layer

_NAMES = {"name", "qkv", "out", "gate_up", "down", "router", "correction_bias", "expert_scale", "ending", "shared_gate"}
"""Fields of parts that say what the checkpoint calls something."""


def kinds_of_layers(layers: Sequence[Layer]) -> Iterable[str]:
    """For each kind of layer which layers are of it, and how its parts differ from the plainest."""
    for kind in dict.fromkeys(layers):
        places = short_ranges(i for i, layer in enumerate(layers) if layer == kind)
        missing = {"attention", "mlp"} - kind.parts.keys()
        yield f"{places}: {_differences(kind, missing)}"


def short_ranges(given: Iterable[int]) -> str:
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


def _differences(part: Any, missing: Collection[str] = ()) -> str:
    """The fields of a part that do not have their default. missing: how names of fields begin that are left out."""
    told = []
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.name in _NAMES or value == field.default or field.name.partition("_")[0] in missing:
            continue
        if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            value = value[0]  # the norms of queries and keys are alike
        if not dataclasses.is_dataclass(value):
            told.append(field.name if value is True else f"{field.name} {_value(value)}")
        else:
            inner = _differences(value)
            told.append(f"{field.name} ({inner})" if inner else field.name)
    return ", ".join(told)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items() if inner is not None)
    return ", ".join(map(str, value)) or "none" if isinstance(value, (list, tuple)) else str(value)

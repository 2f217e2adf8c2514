"""Sizes of the modules that adapters may change, by the names of the checkpoint. Does not import JAX."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jaxllm.model_parts import MoE


@dataclass(frozen=True)
class ExpertPart:
    """Where adapters have a module of an expert that PEFT sees as part of a parameter of all experts."""

    module: str
    """The module that has the parameter: "model.layers.0.mlp.experts"."""
    parameter: str
    """Among `EXPERT_PARAMETERS`."""
    expert: int
    num_experts: int
    num_outputs: int
    """Outputs of an expert's part of the parameter."""
    rows: tuple[int, int, int]
    """(start, stop, step): which of these outputs the module has."""


EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
"""In the order in which the models of transformers declare them."""


@dataclass(frozen=True)
class TargetShape:
    """A module of the checkpoint that an adapter may change. An embedding's inputs are its tokens."""

    inputs: int
    outputs: int
    kind: Literal["linear", "embedding"] = "linear"
    part: ExpertPart | None = None
    """Where adapters have it, if it is an expert's module."""


def expert_targets(part: MoE, prefix: str, hidden_size: int) -> Mapping[str, TargetShape]:
    """The targets of a mixture's routed experts. A checkpoint's tensor of all experts counts as one module for each of gate_proj,
    up_proj and down_proj and each expert."""
    D, F, E = hidden_size, part.width, part.routing.num_experts
    # The place of an expert's module in the parameters that transformers makes of all experts.
    apart = [(0, 2 * F, 2), (1, 2 * F, 2)] if part.alternating else [(0, F, 1), (F, 2 * F, 1)]
    places = [("gate_up_proj", D, F, 2 * F, rows) for rows in apart] + [("down_proj", F, D, D, (0, D, 1))]
    names = ["experts.{}.gate_proj", "experts.{}.up_proj", "experts.{}.down_proj"]
    if "{}" in part.down:
        names = [*part.gate_up, part.down]
    own = part.module(prefix.removesuffix("."))
    return {
        f"{own}.{name.format(i)}": TargetShape(
            inputs, outputs, part=ExpertPart(f"{own}.experts", parameter, i, E, num_outputs, rows)
        )
        for i in range(E)
        for name, (parameter, inputs, outputs, num_outputs, rows) in zip(names, places, strict=True)
    }

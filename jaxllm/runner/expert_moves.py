"""Moves a layer's experts between devices, by the program of `ExpertSlots.move`."""

from collections.abc import Callable

import jax
import numpy as np

from jaxllm.parallel.across_hosts import put
from jaxllm.runner.expert_placement import ROUNDS
from jaxllm.runner.features.expert_slots import ExpertSlots, MoveExperts
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.split_program import CompiledProgram
from jaxllm.runner.step_programs import StepPrograms


def moved_experts(
    shapes: StepPrograms,
    program_of: Callable[[ProgramKey], CompiledProgram],
    params: tuple[jax.Array, ...],
    layer: int,
    moves_2RN: np.ndarray,
    table_EC: np.ndarray | None,
) -> dict[int, jax.Array]:
    """What replaces which of all weights, by their index, when a layer's experts move: see `Executor.move_experts`. Returns at once.

    table_EC: the layer's new one; None: it stays.
    """
    slots = shapes.functions.get(ExpertSlots)
    kind, where = MoveExperts(slots), slots.leaves[layer]
    program, no_moves_2RN = program_of(kind.key(shapes, layer)), kind.no_moves(shapes, layer)
    old = new = tuple(params[index] for index in where)
    for first in range(0, moves_2RN.shape[1], ROUNDS):
        rounds_2RN, part = no_moves_2RN.copy(), moves_2RN[:, first : first + ROUNDS]
        rounds_2RN[:, : part.shape[1]] = part
        new = program(old, new, put(rounds_2RN, shapes.everywhere))
    changed = dict(zip(where, new, strict=True))
    if table_EC is not None:
        changed[slots.table_of(layer)] = put(table_EC, shapes.everywhere)
    return changed

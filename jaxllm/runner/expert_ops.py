"""Operations on the experts of a model: reads how many tokens each got, and moves them between devices."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import jax
import numpy as np

from jaxllm.device_ops import MoveExperts, TakeCounts
from jaxllm.parallel.across_hosts import put
from jaxllm.runner.expert_placement import ROUNDS
from jaxllm.runner.features.expert_counts import ExpertCounts
from jaxllm.runner.features.expert_slots import ExpertSlots
from jaxllm.runner.split_program import CompiledProgram
from jaxllm.runner.step_programs import ProgramKey, StepPrograms
from jaxllm.scheduler_output import ModelRunnerOutput

if TYPE_CHECKING:
    from jaxllm.runner.runner import ModelRunner


class CountReader:
    """An OpFeature. Each stage and each rank counts what its own tokens chose."""

    ops = (TakeCounts,)
    program = "take_expert_tokens"

    def __init__(self, runner: "ModelRunner"):
        self._runner = runner

    def run(self, op: TakeCounts) -> "CountsInFlight":
        return CountsInFlight(self._runner.shapes.functions.get(ExpertCounts).layers, self._take())

    def run_on_nothing(self, key: ProgramKey) -> None:
        self._take()

    def _take(self) -> jax.Array:
        runner = self._runner
        runner.row_arrays, counts_LE = runner.program(ProgramKey(self.program))(runner.row_arrays)
        return counts_LE  # type: ignore[no-any-return]


class CountsInFlight:
    """A PendingPart: counts on their way to the host."""

    def __init__(self, layers: Sequence[int], counts_LE: jax.Array):
        self.arrays, self._layers = counts_LE, layers
        counts_LE.copy_to_host_async()

    def collect(self, output: ModelRunnerOutput) -> None:
        """See PendingPart. Raises the error of a step before."""
        output.add_counts(dict(zip(self._layers, np.asarray(self.arrays), strict=True)))


class Device(Protocol):
    """What moves use of a runner."""

    params: tuple[jax.Array, ...]

    @property
    def shapes(self) -> StepPrograms: ...

    def replace_params(self, changed: dict[int, jax.Array]) -> None:
        """Have programs take these in place of some, by their index."""


class ExpertMoves:
    """An OpFeature, by the program of `ExpertSlots.move`. Layers of other stages of a pipeline are left to these."""

    ops = (MoveExperts,)
    program = "move_experts"

    def __init__(self, runner: Device, program_of: Callable[[ProgramKey], CompiledProgram]):
        self._runner, self._program_of = runner, program_of

    def run(self, op: MoveExperts) -> None:
        placing = self._runner.shapes.functions.get(ExpertSlots)
        if op.layer in placing.leaves:
            changed = self._moved(op.layer, np.array(op.moves, np.int32))
            changed[placing.table_of(op.layer)] = put(np.array(op.table, np.int32), self._runner.shapes.everywhere)
            self._runner.replace_params(changed)

    def run_on_nothing(self, key: ProgramKey) -> None:
        """Each expert stays."""
        self._runner.replace_params(self._moved(key.size, self._runner.shapes.no_moves(key.size)))

    def _moved(self, layer: int, moves_2RN: np.ndarray) -> dict[int, jax.Array]:
        """What replaces which of all weights, by their index. Returns at once."""
        shapes, params = self._runner.shapes, self._runner.params
        where = shapes.functions.get(ExpertSlots).leaves[layer]
        program, no_moves_2RN = self._program_of(shapes.moving_key(layer)), shapes.no_moves(layer)
        old = new = tuple(params[index] for index in where)
        for first in range(0, moves_2RN.shape[1], ROUNDS):
            rounds_2RN, part = no_moves_2RN.copy(), moves_2RN[:, first : first + ROUNDS]
            rounds_2RN[:, : part.shape[1]] = part
            new = program(old, new, put(rounds_2RN, shapes.everywhere))
        return dict(zip(where, new, strict=True))

"""`store_state` and `load_state`: between what layers keep of a row and blocks of the KV cache."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxllm.parallel.mesh import TENSOR
from jaxllm.runner.block_format import NO_BLOCK
from jaxllm.runner.features.state_copies.state_format import StateFormat
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import ProgramKind
from jaxllm.runner.row_arrays import Caches
from jaxllm.runner.split_program import CompiledProgram, Lowered

if TYPE_CHECKING:
    from jaxllm.runner.step_programs import StepPrograms


class StateProgram(ProgramKind):
    """Takes the arrays of blocks and states, a row, and as many blocks as its states take. Returns the arrays."""

    only = "common"

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        format = StateFormat.of(programs.cache, programs.mesh.shape[TENSOR])
        arguments = (programs.caches, programs.ints(), programs.ints(format.num_blocks))
        return programs.lower_on_each(partial(self.change, format), arguments, programs.cache_shardings, donate=(0,))

    def change(self, format: StateFormat, caches: Caches, row: jax.Array, block_k: jax.Array) -> Caches:
        """Change the parts of one device."""
        raise NotImplementedError

    def run_on_nothing(self, runner: Any, key: ProgramKey, program: CompiledProgram) -> None:
        run(runner, key.kind, runner.buckets.max_rows, ())


class Store(StateProgram):
    """Writes a row's states into blocks."""

    name = "store_state"

    def change(self, format: StateFormat, caches: Caches, row: jax.Array, block_k: jax.Array) -> Caches:
        return tuple(format.store(caches, row, block_k))


class Load(StateProgram):
    """Reads them back into a row."""

    name = "load_state"

    def change(self, format: StateFormat, caches: Caches, row: jax.Array, block_k: jax.Array) -> Caches:
        return tuple(format.load(caches, row, block_k))


def run(runner: Any, name: str, row: int, block_ids: Sequence[int]) -> None:
    """Start a program on a row of a runner and at most as many blocks as it takes."""
    block_k = np.full(runner.shapes.cache.state_blocks, NO_BLOCK, np.int32)
    block_k[: len(block_ids)] = block_ids
    row_and_blocks = runner.put((np.int32(row), block_k))
    runner.caches = tuple(runner.program(ProgramKey(name))(runner.caches, *row_and_blocks))

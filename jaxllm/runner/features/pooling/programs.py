"""`add_up` and `pool`: the programs that make one vector of a prompt."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import jax.numpy as jnp

from jaxllm.runner.features.pooling.step import POOL_COLUMNS, add_up, pool
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import ProgramKind, Wanted
from jaxllm.runner.split_program import Lowered

if TYPE_CHECKING:
    from jaxllm.runner.step_programs import StepPrograms


class _PoolingProgram(ProgramKind):
    """Common in models that do nothing else, rare in models that generate."""

    def sizes(self, programs: "StepPrograms") -> tuple[int, ...]:
        raise NotImplementedError

    def common(self, programs: "StepPrograms") -> Iterable[ProgramKey]:
        return () if programs.model.generates else self._keys(programs)

    def rare(self, programs: "StepPrograms") -> Iterable[ProgramKey]:
        return self._keys(programs) if programs.model.generates else ()

    def _keys(self, programs: "StepPrograms") -> list[ProgramKey]:
        return [ProgramKey(self.name, size) for size in self.sizes(programs)]

    def is_needed(self, key: ProgramKey, wanted: Wanted) -> bool:
        return wanted.pooling is not None


class AddUp(_PoolingProgram):
    """Adds up the hidden states of prompts."""

    name = "add_up"

    def sizes(self, programs: "StepPrograms") -> tuple[int, ...]:
        return programs.buckets.tokens

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        num_rows, width = programs.buckets.max_rows, programs.model.hidden_size
        sums_ND = programs.shape((num_rows, width), jnp.float32)
        hidden_TD = programs.shape((key.size, width), programs.model.dtype)
        return programs.lower_on_ranks(add_up, (sums_ND, hidden_TD, programs.ints(key.size + num_rows)), donate=(0,))


class Pool(_PoolingProgram):
    """Makes vectors of sums, or of the hidden states of last tokens."""

    name = "pool"

    def __init__(self, *, is_mean: bool):
        self.is_mean = is_mean

    def sizes(self, programs: "StepPrograms") -> tuple[int, ...]:
        return programs.buckets.sample_rows

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        sums = programs.shape((programs.buckets.max_rows, programs.model.hidden_size), jnp.float32)
        source = sums if self.is_mean else programs.shape(programs.sampled_shape, programs.model.dtype)
        return programs.lower_on_ranks(pool, (source, programs.ints(key.size, POOL_COLUMNS)))

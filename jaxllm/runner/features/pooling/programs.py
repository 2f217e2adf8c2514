"""`add_up`, `pool` and `classify`: the programs that make one vector of a prompt, or scores of its classes."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxllm.runner.features.pooling.step import POOL_COLUMNS, add_up, pool
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import ProgramKind, Wanted
from jaxllm.runner.row_arrays import Params
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

    def __init__(self, *, adds_up: bool):
        self.adds_up = adds_up

    def sizes(self, programs: "StepPrograms") -> tuple[int, ...]:
        return programs.buckets.sample_rows

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        return programs.lower_on_ranks(pool, self._arguments(programs, key))

    def _arguments(self, programs: "StepPrograms", key: ProgramKey) -> tuple[Any, ...]:
        sums = programs.shape((programs.buckets.max_rows, programs.model.hidden_size), jnp.float32)
        source = sums if self.adds_up else programs.shape(programs.sampled_shape, programs.model.dtype)
        return source, programs.ints(key.size, POOL_COLUMNS)


class Classify(Pool):
    """Scores the classes of prompts by such vectors."""

    name = "classify"

    def __init__(self, merge: Callable[[Params], Any], *, adds_up: bool):
        super().__init__(adds_up=adds_up)
        self.merge = merge

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        arguments = (programs.params, *self._arguments(programs, key))
        return programs.lower_on_each(self._classify, arguments, programs.replicated, donate=())

    def _classify(self, params: Params, source_XD: jax.Array, request_RC: jax.Array) -> jax.Array:
        """Float32 [R, classes]. The arrays are those of `pool`."""
        *others, use_activation_R = request_RC.T
        vector_RD = pool(source_XD, jnp.stack([*others, jnp.zeros_like(use_activation_R)], axis=1))
        return self.merge(params).classifier(vector_RD, use_activation_R)  # type: ignore[no-any-return]

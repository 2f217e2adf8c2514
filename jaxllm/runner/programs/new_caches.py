"""`new_caches`: the KV cache and the states of layers, zeroed."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import ProgramKind
from jaxllm.runner.row_arrays import Caches
from jaxllm.runner.split_program import Lowered

if TYPE_CHECKING:
    from jaxllm.runner.step_programs import StepPrograms


class NewCaches(ProgramKind):
    """Allocates what layers keep."""

    name = "new_caches"
    only = "at_start"

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        def make_caches() -> Caches:
            return tuple(jnp.zeros(cache.shape, cache.dtype) for cache in programs.caches)

        return jax.jit(make_caches, out_shardings=programs.cache_shardings).lower()

"""Adapters as a feature of the step: the weights of a request's adapter change what is computed of its tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.layers.step import Adapt
from jaxllm.parallel.shards import Shards
from jaxllm.runner.adaptation import Adaptation
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.layout import Column
from jaxllm.runner.row_arrays import Params
from jaxllm.runner.step_feature import StepFeature, StepRun
from jaxllm.scheduler_output import NO_ADAPTER


@dataclass(frozen=True)
class Adapters(StepFeature):
    """An adaptation, and its arrays among those of all weights."""

    adaptation: Adaptation
    merge: Callable[[Params], Any]
    part: slice
    kernels: Kernels

    is_optional = True

    @property
    def changes_logits(self) -> bool:
        """Whether adapters change logits not only by the hidden states."""
        return self.adaptation.changes_logits

    def before(self, run: StepRun) -> None:
        columns_RC, places = run.columns_RC, run.places
        slot_T = jnp.where(places.is_real_T, columns_RC[places.owner_T, Column.ADAPTER], NO_ADAPTER)
        slot_t = run.share(slot_T)
        step_adapt = run.step.adapt = self._adapt(run.params, slot_t, run.shards)
        if self.changes_logits:
            # Logits are of all tokens, the layers perhaps of a share of them.
            run.adapts = lambda: (step_adapt if slot_t is slot_T else self._adapt(run.params, slot_T, run.shards),)

    def of_logits(self, params: Params, slot_T: jax.Array, shards: Shards) -> tuple[Adapt, ...]:
        return (self._adapt(params, slot_T, shards),)

    def _adapt(self, params: Params, slot_T: jax.Array, shards: Shards) -> Adapt:
        return self.adaptation.adapt(self.merge(params), slot_T, shards, self.kernels)

    def write(self, arrays: Params, packed_1P: jax.Array, slot: jax.Array) -> Params:
        """The arrays of all slots with an adapter in one of them."""
        return self.adaptation.write(arrays, packed_1P, slot)

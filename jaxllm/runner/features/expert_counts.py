"""Counts on the device how many tokens each expert of each mixture computes."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MoE
from jaxllm.runner.expert_counts import mixture_layers
from jaxllm.runner.row_arrays import RowArrays
from jaxllm.runner.step_feature import StepFeature, StepRun


@dataclass(frozen=True)
class ExpertCounts(StepFeature):
    """The mixtures that are counted, in the order of their layers, as a part of the step's programs.

    A step counts all of them at its end, because a kernel for each of them would cost more than what it does.
    """

    names: tuple[str, ...]
    """What the layers call their mixtures."""
    num_experts: int
    """Of the largest."""
    layers: tuple[int, ...] = ()
    """Of the mixtures."""

    @classmethod
    def of(cls, config: ModelConfig, layers: Collection[int]) -> "ExpertCounts":
        """Of these layers of a model."""
        found = [(layer, config.layers[layer].mlp) for layer in mixture_layers(config) if layer in layers]
        names = tuple(f"{config.layer_name(layer)}.{part.name}" for layer, part in found)
        most = max((part.routing.num_experts for _, part in found if isinstance(part, MoE)), default=0)
        return cls(names, most, tuple(layer for layer, _ in found))

    @property
    def shape(self) -> tuple[int, int]:
        """Of the counts."""
        return len(self.names), self.num_experts

    def add(self, counts_LE: jax.Array, chosen: Sequence[tuple[str, jax.Array]]) -> jax.Array:
        """The counts with those of a step. chosen: mixtures by name with the experts of some tokens, int32 [T, k], -1 for padding."""
        if not chosen:
            return counts_LE
        numbers = {name: number for number, name in enumerate(self.names)}
        assert numbers.keys() >= {name for name, _ in chosen}, "a mixture that is not counted"
        none = counts_LE.size
        index = [
            jnp.where(expert_Tk < 0, none, numbers[name] * self.num_experts + expert_Tk).reshape(-1)
            for name, expert_Tk in chosen
        ]
        return counts_LE.reshape(-1).at[jnp.concatenate(index)].add(1, mode="drop").reshape(counts_LE.shape)

    def row_arrays(self, num_rows: int) -> dict[str, Any]:
        return {"expert_tokens_LE": jax.ShapeDtypeStruct(self.shape, jnp.int32)}

    def before(self, run: StepRun) -> None:
        run.step.chosen = []

    def after(self, run: StepRun) -> None:
        chosen = run.step.chosen
        assert chosen is not None
        counts_LE = run.count(lambda counts_LE: self.add(counts_LE, chosen), run.rows.expert_tokens_LE)
        run.rows = run.rows._replace(expert_tokens_LE=counts_LE)

    def take(self, rows: RowArrays) -> tuple[RowArrays, jax.Array]:
        """The rows' arrays with no tokens of experts, and those counted so far."""
        return rows._replace(expert_tokens_LE=jnp.zeros_like(rows.expert_tokens_LE)), rows.expert_tokens_LE

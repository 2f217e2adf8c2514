"""Experts that move between devices, as a feature of the step: which slot each expert is in, and how experts move."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.loaders.layout import axes_of, parameters
from jaxllm.model_config import ModelConfig
from jaxllm.runner.expert_placement import Tables
from jaxllm.runner.step_feature import StepFeature, StepRun


@dataclass(frozen=True)
class ExpertSlots(StepFeature):
    """Where the experts of an engine, or of one stage of a pipeline, are among all weights."""

    names: tuple[str, ...]
    """What the layers call their mixtures, in the order of `leaves`."""
    leaves: dict[int, tuple[int, ...]]
    """By layer with a mixture, its arrays over slots, by their index among all weights."""
    tables: slice
    """The tables among all weights, in the same order."""
    merge: Callable[[tuple[jax.Array, ...]], Tables]
    """All weights -> the tables."""

    @classmethod
    def of(cls, config: ModelConfig, model: nnx.Module, tables: slice, merge: Callable[..., Tables]) -> "ExpertSlots":
        """Of a model whose weights come first among all."""
        leaves: dict[int, tuple[int, ...]] = {}
        for index, (path, variable) in enumerate(parameters(model)):
            if "split_experts" in axes_of(variable):
                layer = int(path[1])
                leaves[layer] = (*leaves.get(layer, ()), index)
        mixtures = {layer: config.layers[layer].mlp for layer in leaves}
        return cls(tuple(f"{config.layer_name(i)}.{part.name}" for i, part in mixtures.items()), leaves, tables, merge)

    def before(self, run: StepRun) -> None:
        run.step.slots = self.slots(run.params)

    def table_of(self, layer: int) -> int:
        """The index of a layer's table among all weights."""
        return self.tables.start + list(self.leaves).index(layer)

    def slots(self, params: tuple[jax.Array, ...]) -> Callable[[str, jax.Array, int | jax.Array], jax.Array]:
        """See `Step.slots`."""
        tables = dict(zip(self.names, self.merge(params).tables, strict=True))

        def slots(name: str, expert_Tk: jax.Array, start: int | jax.Array) -> jax.Array:
            return slots_of(tables[name][...], expert_Tk, start)

        return slots

    def move(
        self, axes: str | tuple[str, ...], old: tuple[jax.Array, ...], new: tuple[jax.Array, ...], moves_2RN: jax.Array
    ) -> tuple[jax.Array, ...]:
        """`new`, a layer's arrays on this device, with the experts of these rounds. In round r device n gets what is in the slot
        moves[0, r, n] of `old`, counted over all devices, and writes it to its own slot moves[1, r, n]; a slot that it does not have
        stands for nothing.

        So slots may be exchanged, in whatever order. Each round has two experts for each device in memory. The number of rounds is
        static: the host would be asked whether there is another one, and wait for the device to know.

        axes: of the mesh, over which slots are split.
        """
        num_slots, rank = len(old[0]), jax.lax.axis_index(axes)

        def move(wanted_N: jax.Array, target: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
            # Each device offers each what that wants, and takes the offer of the one that has it.
            offers = jax.lax.all_to_all(old[wanted_N % num_slots], axes, 0, 0, tiled=True)
            return new.at[target].set(offers[wanted_N[rank] // num_slots], mode="drop")

        def one_round(number: jax.Array, moved: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            wanted_N, target_N = moves_2RN[0, number], moves_2RN[1, number]
            return tuple(map(partial(move, wanted_N, target_N[rank]), old, moved))

        return jax.lax.fori_loop(0, moves_2RN.shape[1], one_round, new)


def slots_of(table_EC: jax.Array, expert_Tk: jax.Array, start: int | jax.Array) -> jax.Array:
    """The slots of experts: of several copies, tokens take one after the other, by their numbers from `start` on."""
    token_T1 = start + jnp.arange(len(expert_Tk), dtype=jnp.int32)[:, None]
    expert = jnp.maximum(expert_Tk, 0)
    slot_Tk = table_EC[expert, 1 + token_T1 % table_EC[expert, 0]]
    return jnp.where(expert_Tk < 0, -1, slot_Tk)

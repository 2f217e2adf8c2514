"""Slots of experts on the devices: which expert is in which, as a part of the step's programs, and how experts move between them.

A mixture's weights are arrays over slots. A table says where the copies of each expert are; moving experts changes both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxllm.config import ParallelOptions
from jaxllm.layers.linear import abstract_param
from jaxllm.loaders.layout import axes_of, parameters, state_of
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MoE
from jaxllm.parallel.across_hosts import put
from jaxllm.parallel.axes import sharding
from jaxllm.parallel.topology import Topology

ROUNDS = 4
"""Rounds of moves in one run of the program: see `Placing.move`."""


def table_of(slots: Sequence[int], num_experts: int, num_copies: int) -> np.ndarray:
    """Int32 [E, 1 + num_copies]: how many copies each expert has, and the slots of these. slots: the expert in each slot."""
    table = np.zeros((num_experts, 1 + num_copies), np.int32)
    for slot, expert in enumerate(slots):
        table[expert, 0] += 1
        table[expert, table[expert, 0]] = slot
    assert table[:, 0].min(initial=1) > 0, "an expert has no slot"
    return table


def most_copies(parts: Sequence[MoE], num_devices: int) -> int:
    """Most copies of an expert: one on each device, as far as there are so many."""
    return min(num_devices, 1 + max((part.num_redundant for part in parts), default=0))


class Tables(nnx.Module):
    """The tables of a model's mixtures, which are arrays like weights: they go and come with them."""

    def __init__(self, parts: Sequence[MoE], num_copies: int):
        self.parts, self.num_copies = tuple(parts), num_copies
        shapes = [(part.routing.num_experts, 1 + num_copies) for part in parts]
        self.tables: nnx.List[nnx.Param] = nnx.List(
            [abstract_param(shape, ("experts", "copy"), "int32", source="", init="zeros") for shape in shapes]
        )

    @classmethod
    def of(cls, options: ParallelOptions, config: ModelConfig, layers: Sequence[int]) -> "Tables | None":
        """Of these layers of a model; None: experts do not move."""
        if not options.enable_eplb:
            return None
        mixtures = [part for i in layers if isinstance(part := config.layers[i].mlp, MoE)]
        return cls(mixtures, most_copies(mixtures, Topology.of(options).expert))

    def at_the_start(self, mesh: Mesh) -> nnx.State:
        """The tables of weights as they are loaded."""
        arrays = [table_of(part.slots, part.routing.num_experts, self.num_copies) for part in self.parts]
        found = zip(parameters(self), arrays, strict=True)
        return state_of(self, {path: put(array, sharding(mesh, axes_of(variable))) for (path, variable), array in found})


@dataclass(frozen=True)
class Placing:
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
    def of(cls, config: ModelConfig, model: nnx.Module, tables: slice, merge: Callable[..., Tables]) -> "Placing":
        """Of a model whose weights come first among all."""
        leaves: dict[int, tuple[int, ...]] = {}
        for index, (path, variable) in enumerate(parameters(model)):
            if "split_experts" in axes_of(variable):
                layer = int(path[1])
                leaves[layer] = (*leaves.get(layer, ()), index)
        mixtures = {layer: config.layers[layer].mlp for layer in leaves}
        return cls(tuple(f"{config.layer_name(i)}.{part.name}" for i, part in mixtures.items()), leaves, tables, merge)

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


def moving_bytes(model: nnx.Module, num_devices: int) -> int:
    """Bytes on each device while a layer's experts move: the layer's twice more, as the last run of the program leaves them and as this one
    does, and an expert from and for each device."""
    by_layer: dict[int, int] = {}
    for path, variable in parameters(model):
        if "split_experts" in axes_of(variable):
            num_slots, num_bytes = (
                variable.shape[0] // num_devices,
                variable.size * jnp.dtype(variable.dtype).itemsize // num_devices,
            )
            layer = int(path[1])
            by_layer[layer] = by_layer.get(layer, 0) + 2 * num_bytes + 2 * num_devices * num_bytes // num_slots
    return max(by_layer.values(), default=0)

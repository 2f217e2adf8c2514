"""Slots of experts on the devices: which expert is in which, as a part of the step's programs, and how experts move between them.

A mixture's weights are arrays over slots. A table says where the copies of each expert are; moving experts changes both.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxllm.config import ParallelOptions
from jaxllm.layers.linear import abstract_param
from jaxllm.layers.parameters import axes_of, parameters, state_of
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MoE
from jaxllm.parallel.across_hosts import put
from jaxllm.parallel.axes import sharding
from jaxllm.parallel.topology import Topology
from jaxllm.progress import Progress

ROUNDS = 4
"""Rounds of moves in one run of the program: see `ExpertSlots.move`."""


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
        """The tables of these layers of a model; None: experts do not move."""
        if not options.enable_eplb:
            return None
        mixtures = [part for i in layers if isinstance(part := config.layers[i].mlp, MoE)]
        return cls(mixtures, most_copies(mixtures, Topology.of(options).expert))

    @property
    def model(self) -> "Tables":
        """See `WithWeights`."""
        return self

    def load(self, mesh: Mesh, progress: Progress) -> nnx.State:
        """The tables of weights as they are loaded."""
        arrays = [table_of(part.slots, part.routing.num_experts, self.num_copies) for part in self.parts]
        found = zip(parameters(self), arrays, strict=True)
        return state_of(self, {path: put(array, sharding(mesh, axes_of(variable))) for (path, variable), array in found})


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

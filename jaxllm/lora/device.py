"""Adapters on the device: slots in stacked arrays, and what they add to the products of a step. Source: arXiv:2106.09685."""

import math
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.layers.linear import Linear
from jaxllm.loaders.layout import axes_of, parameters
from jaxllm.lora.shapes import TargetShape
from jaxllm.lora.targets import Read, Slots, adaptable, name_of, pack, packed_size, shapes_of
from jaxllm.parallel.axes import MESH_AXES
from jaxllm.parallel.mesh import TENSOR
from jaxllm.parallel.shards import Shards
from jaxllm.runner.kernels import Kernels
from pallas_kernels import lora

# Traced and lowered once for all layers of a program.
add = jax.jit(lora.add, static_argnames=("parts", "implementation", "interpret"))


class DeviceSlots:
    """An Adaptation: what a number of adapters of at most a rank need on the devices of a mesh."""

    def __init__(
        self,
        model: nnx.Module,
        mesh: Mesh,
        *,
        num_slots: int,
        rank: int,
        dtype: str,
        names: Sequence[str] | None = None,
    ):
        """names: the last names of the modules that adapters may change; None: all linear layers. Raises ConfigError if there are none."""
        layers = adaptable(model, names)
        self.num_slots, self.rank, self.dtype, self.mesh = num_slots, rank, dtype, mesh
        self.model = Slots(layers, num_slots, rank, dtype)
        self.targets: dict[str, TargetShape] = {name: shape for layer in layers for name, shape in shapes_of(layer)}
        """The checkpoint's modules that adapters may change."""
        self.packed_size = packed_size(self.model, mesh.size)

    def adapt(self, model: Slots, slot_T: Array, shards: Shards, kernels: Kernels) -> "Products":
        """See Adaptation."""
        return Products(model, slot_T, self.num_slots, kernels)

    @cached_property
    def products(self) -> Collection[tuple[int, lora.Parts]]:
        """See Adaptation."""
        found: dict[tuple[int, lora.Parts], None] = {}
        for target in self.model.targets:
            (_, *inputs), (_, *outputs) = (self._local_shape(variable) for variable in (target.down, target.up))
            found[math.prod(inputs), target.parts(outputs)] = None
        return tuple(found)

    @cached_property
    def _local_shapes(self) -> list[tuple[int, ...]]:
        """Of each array's part on one device, without the slots."""
        return [self._local_shape(variable) for _, variable in parameters(self.model)]

    def _local_shape(self, variable: nnx.Variable) -> tuple[int, ...]:
        sizes = zip(variable.shape[1:], axes_of(variable)[1:], strict=True)
        return tuple(size // (self.mesh.size if MESH_AXES[axis] else 1) for size, axis in sizes)

    def write(self, arrays: tuple[Array, ...], packed_1P: Array, slot: Array) -> tuple[Array, ...]:
        """See Adaptation."""
        ends = np.cumsum([math.prod(shape) for shape in self._local_shapes])
        parts = jnp.split(packed_1P[0], ends[:-1])
        return tuple(
            lax.dynamic_update_index_in_dim(array, part.reshape(shape).astype(array.dtype), slot, 0)
            for array, part, shape in zip(arrays, parts, self._local_shapes, strict=True)
        )

    def pack(self, read: Read) -> np.ndarray:
        """An adapter on the host, as `stage` takes it."""
        return pack(self.model, read, jnp.dtype(self.dtype), self.mesh.size)

    def stage(self, packed: np.ndarray) -> Array:
        """Send a packed adapter to the devices."""
        return jax.device_put(packed, NamedSharding(self.mesh, PartitionSpec(TENSOR)))


class Products:
    """An Adapt: the products of a step, with what the adapter of each token adds."""

    def __init__(self, model: Slots, slot_T: Array, num_slots: int, kernels: Kernels):
        self._targets = {target.name: target for target in model.targets}
        self._slot_T, self._num_slots, self._kernels = slot_T, num_slots, kernels
        self._groups: dict[tuple[int, int], Any] = {}
        """Of each run of tokens."""

    def __call__(self, linear: Linear, x: Array, y: Array, start: int) -> Array:
        """See Adapt."""
        target = self._targets.get(name_of(linear))
        if target is None:
            return y
        x_TD = x.reshape(len(x), -1)
        down_SQD, up_SRN = target.down[...], target.up[...]
        added = add(
            y.reshape(len(y), -1),
            x_TD,
            down_SQD.reshape(*down_SQD.shape[:2], -1),
            up_SRN.reshape(*up_SRN.shape[:2], -1),
            self._group(start, len(x)),
            parts=target.parts(y.shape[1:]),
            implementation=self._kernels.lora,
            interpret=self._kernels.interpret,
        )
        return added.reshape(y.shape)

    def _group(self, start: int, count: int) -> Any:
        if (start, count) not in self._groups:
            self._groups[start, count] = lora.group(self._slot_T[start : start + count], self._num_slots)
        return self._groups[start, count]

"""Adapters on the device: slots in stacked arrays, and what they add to the products of a step. Source: arXiv:2106.09685."""

import math
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.sharding import Mesh

from jaxllm.layers.decoder import CausalLM
from jaxllm.layers.linear import Linear
from jaxllm.layers.parameters import axes_of, parameters, zeros
from jaxllm.lora import embedding, experts
from jaxllm.lora.embedding import EmbeddingTarget
from jaxllm.lora.experts import ExpertsTarget
from jaxllm.lora.shapes import TargetShape
from jaxllm.lora.targets import Read, ScoresTarget, Slots, Target, adaptable, name_of, pack, packed_size
from jaxllm.parallel.axes import MESH_AXES
from jaxllm.parallel.mesh import tensor_size
from jaxllm.parallel.shards import Shards
from jaxllm.progress import Progress
from jaxllm.runner.kernels import Kernels
from pallas_kernels import lora

T = TypeVar("T")

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
        whole: "DeviceSlots | None" = None,
    ):
        """names: the last names of the modules that adapters may change; None: all linear layers between embedding and head. whole: those
        of the whole model, if this is a stage of it."""
        self._asked, self._whole = names, whole
        every = adaptable(model)
        parts = [part for part in every if part.is_wanted(names)]
        self.num_slots, self.rank, self.dtype, self.mesh = num_slots, rank, dtype, mesh
        self.model = Slots(parts, num_slots, rank, dtype)
        self.names = tuple(part.name for part in parts)
        """Names of the parts that adapters may change."""
        self.targets: dict[str, TargetShape] = {name: shape for part in parts for name, shape in part.modules.items()}
        """The checkpoint's modules that adapters may change."""
        self.left_out: dict[str, TargetShape] = {
            name: shape for part in every if not part.is_wanted(names) for name, shape in part.modules.items()
        }
        """Modules that they could change with other names."""
        self.changes_logits = isinstance(model, CausalLM) and model.config.names.head in self.names
        self.packed_size = packed_size(self.model, tensor_size(mesh))
        self.num_bytes = self.packed_size * tensor_size(mesh) * jnp.dtype(dtype).itemsize
        """Memory of one packed adapter, in bytes."""

    def of_stage(self, model: nnx.Module) -> "DeviceSlots | None":
        """See Adaptation."""
        if not (isinstance(model, CausalLM) and model.is_stage):
            return self
        options: dict[str, Any] = {"num_slots": self.num_slots, "rank": self.rank, "dtype": self.dtype, "names": self._asked}
        stage = DeviceSlots(model, self.mesh, **options, whole=self)
        return stage if stage.names else None

    def own(self, packed_1P: np.ndarray) -> np.ndarray:
        """See Adaptation."""
        if self._whole is None:
            return packed_1P
        columns = self._whole._columns
        return np.concatenate([packed_1P[:, columns[name]] for name in self.names], axis=1)

    @cached_property
    def _columns(self) -> dict[str, slice]:
        """Where a packed adapter has each part, by name."""
        sizes = [packed_size(target, tensor_size(self.mesh)) for target in self.model.targets]
        ends = np.cumsum(sizes).tolist()
        return {name: slice(end - size, end) for name, size, end in zip(self.names, sizes, ends, strict=True)}

    def load(self, mesh: Mesh, progress: Progress) -> nnx.State:
        """See Adaptation."""
        return zeros(self.model, mesh)

    def adapt(self, model: Slots, slot_T: Array, shards: Shards, kernels: Kernels) -> "Products":
        """See Adaptation."""
        return Products(model, slot_T, self.num_slots, kernels)

    @cached_property
    def products(self) -> Collection[tuple[int, lora.Parts]]:
        """See Adaptation."""
        found: dict[tuple[int, lora.Parts], None] = {}
        for target in _of_type(Target, self.model):
            if isinstance(target, ScoresTarget):  # computed in plain JAX
                continue
            (_, *inputs), (_, *outputs) = (self._local_shape(variable) for variable in (target.down, target.up))
            found[math.prod(inputs), target.parts(outputs)] = None
        return tuple(found)

    @cached_property
    def _local_shapes(self) -> list[tuple[int, ...]]:
        """Shape of each array's part on one device, without the slots."""
        return [self._local_shape(variable) for _, variable in parameters(self.model)]

    def _local_shape(self, variable: nnx.Variable) -> tuple[int, ...]:
        sizes = zip(variable.shape[1:], axes_of(variable)[1:], strict=True)
        return tuple(size // (tensor_size(self.mesh) if MESH_AXES[axis] else 1) for size, axis in sizes)

    def write(self, arrays: tuple[Array, ...], packed_1P: Array, slot: Array) -> tuple[Array, ...]:
        """See Adaptation."""
        ends = np.cumsum([math.prod(shape) for shape in self._local_shapes])
        parts = jnp.split(packed_1P[0], ends[:-1])
        return tuple(
            lax.dynamic_update_index_in_dim(array, part.reshape(shape).astype(array.dtype), slot, 0)
            for array, part, shape in zip(arrays, parts, self._local_shapes, strict=True)
        )

    def pack(self, read: Read) -> np.ndarray:
        """An adapter on the host, with the part of each device in a row."""
        return pack(self.model, read, jnp.dtype(self.dtype), tensor_size(self.mesh))


class Products:
    """An Adapt: the products of a step, with what the adapter of each token adds."""

    def __init__(self, model: Slots, slot_T: Array, num_slots: int, kernels: Kernels):
        self._targets = {target.name: target for target in _of_type(Target, model)}
        self._experts = {target.name: target for target in _of_type(ExpertsTarget, model)}
        self._embedding = next(iter(_of_type(EmbeddingTarget, model)), None)
        self._slot_T, self._num_slots, self._kernels = slot_T, num_slots, kernels
        self._groups: dict[tuple[int, int], Any] = {}
        """For each run of tokens, by its start and length."""

    def __call__(self, linear: Linear, x: Array, y: Array, start: int) -> Array:
        """See Adapt."""
        return self._added(name_of(linear), x, y, start)

    def scores(self, name: str, x_TD: Array, y_TN: Array, start: int = 0) -> Array:
        """See Adapt."""
        return self._added(name, x_TD, y_TN, start)

    def experts(self, name: str, start: int) -> Callable[..., Array] | None:
        """See Adapt."""
        if name not in self._experts:
            return None

        def compute(x_TD: Array, *args: Any, **options: Any) -> Array:
            slot_T = self._slot_T[start : start + len(x_TD)]
            return experts.compute(x_TD, *args, slot_T=slot_T, factors=self._experts[name].factors, **options)

        return compute

    def embedded(self, token_ids_T: Array, x_TD: Array, start: int, shards: Shards) -> Array:
        """See Adapt."""
        if self._embedding is None:
            return x_TD
        return embedding.add(self._embedding, token_ids_T, x_TD, self._slot_T[start : start + len(x_TD)], shards)

    def _added(self, name: str, x: Array, y: Array, start: int) -> Array:
        target = self._targets.get(name)
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
            implementation="xla" if isinstance(target, ScoresTarget) else self._kernels.lora,
            interpret=self._kernels.interpret,
        )
        return added.reshape(y.shape)

    def _group(self, start: int, count: int) -> Any:
        if (start, count) not in self._groups:
            self._groups[start, count] = lora.group(self._slot_T[start : start + count], self._num_slots)
        return self._groups[start, count]


def _of_type(kind: type[T], model: Slots) -> list[T]:
    return [target for target in model.targets if isinstance(target, kind)]

"""Reads tensors of a checkpoint onto the devices of a mesh. Each device gets the slices that it keeps and no others."""

import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding

from jaxllm.layers.source import Index, Read, Source, Tensor
from jaxllm.loaders.checkpoint import Checkpoint, TensorEntry
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.across_hosts import put
from jaxllm.parallel.arrays import convert
from jaxllm.parallel.axes import sharding
from jaxllm.weight_format import Expected, ParamSpec


class Files:
    """A checkpoint and the formats of a model."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint):
        self.config, self._checkpoint = config, checkpoint
        self.entries: Mapping[str, TensorEntry] = checkpoint.entries

    @functools.cached_property
    def linears(self) -> Collection[str]:
        """The modules of all linear layers of the model's layers."""
        return frozenset(name for modules in self.config.linears() for name in modules)

    def tensor(self, name: str) -> np.ndarray:
        """A whole tensor as the file has it."""
        return self._checkpoint.tensor(name)

    def stored(self, tensor: Tensor, index: Index) -> np.ndarray:
        """A part of a tensor as the file has it, with copies and padding."""
        return tensor.read(self.tensor(tensor.name), index)

    def beside(self, tensor: Tensor) -> Mapping[str, Expected]:
        """The tensors that a tensor is read from as plain numbers; none: it is stored so."""
        return next((found for format in self.config.formats if (found := format.beside(tensor, self))), {})

    def plain(self, tensor: Tensor, index: Index) -> np.ndarray:
        """A part of a tensor as plain numbers, with copies and padding."""
        format = next((format for format in self.config.formats if format.beside(tensor, self)), None)
        return self.stored(tensor, index) if format is None else format.widened(tensor, index, self)


class Reader(Files):
    """Makes parameters of tensors."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, mesh: Mesh, *, transform_on_device: bool):
        super().__init__(config, checkpoint)
        self._mesh, self._transform_on_device = mesh, transform_on_device

    def array(self, spec: ParamSpec, read: Read | None = None) -> Array:
        """The whole parameter: its tensors joined, transposed, cast and split over the devices. read: default: as plain numbers."""
        read, source, dtype = read or self.plain, spec.source, jnp.dtype(spec.dtype)
        if self._transform_on_device and isinstance(source, Source):
            static = {"axis": source.axis, "permutation": source.permutation, "dtype": dtype}
            return self.convert(_fused, (spec,), self.tensors(spec, read), **static)[0]
        placed = source.placed(spec.axes, spec.shape)
        return self.by_device(spec, lambda index, device: jax.device_put(placed.read(read, index, dtype), device))

    def by_device(self, spec: ParamSpec, make: Callable[[Index, jax.Device], Array]) -> Array:
        """The parameter of what `make` makes of the index of each device's part and the device: of one device at a time."""
        place = sharding(self._mesh, spec.axes)
        slices = []
        for device, index in place.addressable_devices_indices_map(spec.shape).items():
            assert index is not None
            slices.append(jax.block_until_ready(make(index, device)))
        return jax.make_array_from_single_device_arrays(spec.shape, place, slices)

    def tensors(self, spec: ParamSpec, read: Read | None = None) -> tuple[Array, ...]:
        """Its tensors on the devices, in the types of the file, split as the parameter is."""
        assert isinstance(spec.source, Source)
        source = spec.source.placed(spec.axes, spec.shape)
        place = sharding(self._mesh, [spec.axes[i] for i in np.argsort(source.permutation)])
        return tuple(_place_tensor(read or self.plain, tensor, place) for tensor in source.tensors)

    def convert(self, function: Callable[..., Any], specs: Sequence[ParamSpec], *arrays: Any, **static: Hashable) -> Any:
        """The parameters that a function of a module makes of arrays on the devices: one program for each distinct shape."""
        return convert(function, tuple(sharding(self._mesh, spec.axes) for spec in specs), *arrays, **static)


def _place_tensor(read: Read, tensor: Tensor, place: NamedSharding) -> Array:
    """A tensor on the devices, each of which is sent its slice alone. Nothing of it is on the host afterwards."""
    if place.is_fully_replicated:
        return jax.block_until_ready(put(read(tensor, (slice(None),) * len(tensor.view)), place))
    slices = []
    for device, index in place.addressable_devices_indices_map(tensor.placed_shape).items():
        assert index is not None
        part = read(tensor, index)
        # What is contiguous in the file is sent from there, to all devices at once. A copy is freed before the next is made.
        is_copy = part.flags.writeable or not part.flags.c_contiguous
        slices.append(jax.device_put(np.ascontiguousarray(part), device))
        if is_copy:
            jax.block_until_ready(slices[-1])
        del part
    return jax.block_until_ready(jax.make_array_from_single_device_arrays(tensor.placed_shape, place, slices))


def _fused(parts: tuple[Array, ...], axis: int, permutation: tuple[int, ...], dtype: np.dtype) -> tuple[Array]:
    """The parameter of the tensors of a source."""
    # Apart, because one kernel for both reads what it transposes piece by piece.
    fused = lax.optimization_barrier(jnp.concatenate(parts, axis)) if len(parts) > 1 else parts[0]
    return (fused.transpose(permutation).astype(dtype),)

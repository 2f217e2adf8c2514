"""Reads 4-bit weights, which become the model's type on the device."""

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh

from jaxllm.layers.source import Index, Mxfp4, Tensor
from jaxllm.loaders.layout import Axes
from jaxllm.parallel.axes import sharding
from jaxllm.quantization.mxfp4 import widen


def read_mxfp4(
    read: Callable[[Tensor, Index], np.ndarray],
    source: Mxfp4,
    axes: Axes,
    shape: tuple[int, ...],
    dtype: np.dtype,
    mesh: Mesh,
) -> Array:
    """Each device gets the blocks that its part of the parameter is in."""
    place = sharding(mesh, axes)
    slices = []
    for device, index in place.addressable_devices_indices_map(shape).items():
        assert index is not None
        blocks, scales, start = source.read(read, index)
        stored = [jax.device_put(np.ascontiguousarray(part), device) for part in (blocks, scales)]
        num_values = len(range(*index[-1].indices(shape[-1])))
        slices.append(jax.block_until_ready(_widener(source.permutation, start, num_values, dtype)(*stored)))
        del stored
    return jax.make_array_from_single_device_arrays(shape, place, slices)


@functools.lru_cache(maxsize=64)
def _widener(permutation: tuple[int, ...], start: int, num_values: int, dtype: np.dtype) -> Callable[[Array, Array], Array]:
    """Blocks and scales to a part of a parameter. One program per distinct shape."""

    def to_parameter(blocks: Array, scales: Array) -> Array:
        values = widen(blocks, scales, str(dtype))
        return lax.slice_in_dim(values, start, start + num_values, axis=-1).transpose(permutation)

    return jax.jit(to_parameter)

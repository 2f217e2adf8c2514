"""Reads 4-bit weights, which the devices widen or put into the order of kernels."""

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding

from jaxllm.errors import ModelLoadError
from jaxllm.layers.source import MXFP4_BLOCK, AnySource, Index, Mxfp4, Tensor
from jaxllm.loaders.layout import Axes
from jaxllm.parallel.axes import sharding
from jaxllm.quantization.mxfp4 import LARGEST_EXPONENT, widen
from pallas_kernels.grouped_matmul.mxfp4 import pack


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


def packed_words(parts: tuple[Array, ...], permutation: tuple[int, ...], place: NamedSharding) -> Array:
    """A parameter of words, from the bytes that a checkpoint holds."""
    (stored,) = parts
    return jax.block_until_ready(_packer(permutation, place)(stored))


@functools.lru_cache(maxsize=64)
def _packer(permutation: tuple[int, ...], place: NamedSharding) -> Callable[[Array], Array]:
    def to_words(stored: Array) -> Array:
        blocks = stored.reshape(*stored.shape[:-1], -1, MXFP4_BLOCK // 2)
        return pack(blocks).transpose(permutation)

    return jax.jit(to_words, out_shardings=place)


def raise_on_large_exponents(exponents: Array, source: AnySource) -> None:
    """Scales that the kernels cannot compute with."""
    largest = int(exponents.max())
    if largest > LARGEST_EXPONENT:
        raise ModelLoadError(
            f"{source.tensors[0].name} has a scale of 2^{largest - 127}, experts are computed from 4 bits with scales up to "
            f"2^{LARGEST_EXPONENT - 127}; use --dequantize"
        )

"""Values of MXFP4, and the order in which kernels read them.

Source: OCP Microscaling Formats (MX) Specification 1.0, 2023.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxllm.parallel.arrays import convert
from jaxllm.weight_format import Arrays
from pallas_kernels.grouped_matmul.mxfp4 import BLOCK, MAGNITUDES, SCALE_BIAS, pack, unpack


def widen(blocks: Array, scales: Array, dtype: str) -> Array:
    """The values [..., 32 B] of blocks, uint8 [..., B, 16], and the exponents of their scales, uint8 [..., B].

    The lower half of a byte comes first.
    """
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, -1)
    values = jnp.array([*MAGNITUDES, *(-x for x in MAGNITUDES)], jnp.float32)[codes]
    wide = jnp.ldexp(values, scales.astype(jnp.int32)[..., None] - SCALE_BIAS)
    return wide.astype(dtype).reshape(*scales.shape[:-1], -1)


def widen_part(
    stored: Sequence[np.ndarray], device: jax.Device, permutation: tuple[int, ...], start: int, num_values: int, dtype: str
) -> Array:
    """A part of a parameter on a device: `num_values` of the last dimension from `start` on, with its dimensions permuted.

    stored: the bytes of whole blocks [..., K / 2], and their scales [..., K / 32].
    """
    static = {"permutation": permutation, "start": start, "num_values": num_values, "dtype": dtype}
    return convert(_widened_part, None, *(jax.device_put(np.ascontiguousarray(part), device) for part in stored), **static)


def _widened_part(stored: Array, scales: Array, permutation: tuple[int, ...], start: int, num_values: int, dtype: str) -> Array:
    values = widen(stored.reshape(*scales.shape, BLOCK // 2), scales, dtype)
    return lax.slice_in_dim(values, start, start + num_values, axis=-1).transpose(permutation)


def pack_tensor(stored: Array, permutation: tuple[int, ...]) -> tuple[Array]:
    """A parameter of words, from the bytes [..., K / 2] that a checkpoint holds."""
    return (pack(stored.reshape(*stored.shape[:-1], -1, BLOCK // 2)).transpose(permutation),)


def codes_and_scales(arrays: Arrays) -> Arrays:
    """codes uint8 [N, K / 2] and scale uint8 [N, K / 32], of words [N, K / 4] and exponents [K / 32, N]. A single block becomes two
    groups: the scale of all inputs would become a factor."""
    codes, scale = unpack(arrays["words"]), arrays["exponents"].T
    return {"codes": codes.reshape(len(codes), -1), "scale": scale if scale.shape[1] > 1 else jnp.repeat(scale, 2, axis=1)}

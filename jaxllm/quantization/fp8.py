"""Weights and activations as 8-bit floats (float8_e4m3fn, arXiv:2209.05433), and the product of both."""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.parallel.shards import ONE_DEVICE, Shards
from pallas_kernels.quantize.values import DTYPE, LARGEST, TINY, Quantized, Sums


def product(weight_values: Array, weight_scale: Array, x: Array, shards: Shards = ONE_DEVICE) -> Array:
    """[..., contracted as one] to [..., *outputs], in x's type; x is quantised with a scale per vector.

    weight_values [*outputs, *contracted], weight_scale [*outputs]. shards: what x and the contracted dimension are split over. A
    vector's scale is that of the whole of it, so that any number of devices computes with the same values.
    """
    values, scale = quantize(x, largest=shards.max)
    outputs = weight_scale.shape
    weight = weight_values.reshape(*outputs, -1)
    # float16 would overflow: the sums are not scaled yet.
    dtype = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32
    y = lax.platform_dependent(values, weight, cpu=_dot_of_wide, default=partial(_dot, dtype=dtype))
    scale = scale.reshape(*x.shape[:-1], *(1,) * len(outputs))
    return (y * scale * weight_scale).astype(x.dtype)


def sums(weight_values: Array, weight_scale: Array, x: Quantized) -> Sums:
    """The product of vectors that are quantised already, without the scales. Sums are bfloat16."""
    weight = weight_values.reshape(*weight_scale.shape, -1)
    y = lax.platform_dependent(x.values_TN, weight, cpu=_dot_of_wide, default=partial(_dot, dtype=jnp.bfloat16))
    return Sums(y.astype(jnp.bfloat16), x.scale_T, weight_scale)


def weight_only_product(weight_values: Array, weight_scale: Array, x: Array) -> Array:
    """As `product`, with x as it is: for few rows. XLA widens the weight in the registers of a Triton GEMM."""
    outputs = weight_scale.shape
    weight = weight_values.reshape(math.prod(outputs), -1).astype(x.dtype)
    y = lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return (y.reshape(*x.shape[:-1], *outputs) * weight_scale).astype(x.dtype)


def quantize(x: Array, num_contracted: int = 1, *, largest: Callable[[Array], Array] = ONE_DEVICE.max) -> tuple[Array, Array]:
    """(values, scale) with x ≈ values * scale: one float32 scale for the last `num_contracted` dimensions together.

    largest: from the largest absolute values here to those of the whole vectors, of which x may be a part.
    """
    axes = tuple(range(-num_contracted, 0))
    wide = x.astype(jnp.float32)
    scale = jnp.maximum(largest(jnp.max(jnp.abs(wide), axis=axes, keepdims=True)), TINY) / LARGEST
    return narrow(wide / scale), scale.reshape(x.shape[:-num_contracted])


def quantize_tensors(tensors: tuple[Array, ...], axis: int, num_contracted: int) -> tuple[Array, Array]:
    """`quantize` the tensors of a weight, joined along an axis. Copied heads get the scales of the first."""
    return quantize(jnp.concatenate(tensors, axis), num_contracted)


def narrow(x: Array) -> Array:
    """The nearest fp8 values; what lies beyond the largest becomes the largest."""
    return jnp.clip(x, -LARGEST, LARGEST).astype(DTYPE)


def _dot(values: Array, weight: Array, dtype: jax.typing.DTypeLike) -> Array:
    """The product, summed in `dtype`. XLA makes it cuBLASLt's fp8 GEMM, or a Triton one; where there is neither it widens."""
    contracted = ((values.ndim - 1,), (weight.ndim - 1,))
    return lax.dot_general(values, weight, (contracted, ((), ())), preferred_element_type=dtype).astype(jnp.float32)


def _dot_of_wide(values: Array, weight: Array) -> Array:
    """The product for a CPU, whose fp8 products are slow: the same numbers in float32."""
    return _dot(values.astype(jnp.float32), weight.astype(jnp.float32), jnp.float32)

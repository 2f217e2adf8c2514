"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.layers.linear import abstract_param


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last dimension, in float32, returned in the type of x. Source: arXiv:1910.07467."""

    def __init__(self, width: int, axis: str, dtype: str, *, eps: float):
        self.weight = abstract_param((width,), (axis,), dtype)
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (wide * self.weight[...].astype(jnp.float32)).astype(x.dtype)

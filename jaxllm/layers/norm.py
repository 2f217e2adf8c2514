"""Normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.layers.linear import abstract_param
from jaxllm.model_parts import Norm


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last dimension, in float32, returned in the type of x. Source: arXiv:1910.07467."""

    def __init__(self, norm: Norm, width: int, axis: str, dtype: str, *, prefix: str = ""):
        self.weight = abstract_param((width,), (axis,), dtype, source=f"{prefix}{norm.name}.weight", init="ones")
        self.eps = norm.eps

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (wide * self.weight[...].astype(jnp.float32)).astype(x.dtype)

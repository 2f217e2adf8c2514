"""Normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.layers.linear import Init, abstract_param
from jaxllm.model_parts import Norm


def normed(norm: Norm, x: Array, factor: Array) -> Array:
    """Float32: x [..., width], normed over the last dimension and multiplied with the factor."""
    wide = x.astype(jnp.float32)
    if norm.centred:
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + norm.eps)
    return wide * factor.astype(jnp.float32)


class Normalization(nnx.Module):
    """A norm over the last dimension, computed in float32 and returned in the type of x. Sources: arXiv:1910.07467, arXiv:1607.06450."""

    def __init__(self, norm: Norm, width: int, axis: str, dtype: str, *, prefix: str = ""):
        name, self.norm = f"{prefix}{norm.name}", norm
        init: Init = "zeros" if norm.weight_offset else "ones"
        self.weight = abstract_param((width,), (axis,), dtype, source=f"{name}.weight", init=init) if norm.weighted else None
        self.bias = abstract_param((width,), (axis,), dtype, source=f"{name}.bias", init="zeros") if norm.bias else None
        self.before_quantized = False
        """Whether all that takes its result are linear layers that quantise what they multiply."""

    @property
    def eps(self) -> float:
        return self.norm.eps

    @property
    def is_plain(self) -> bool:
        """Whether it is x / rms(x) * weight."""
        return self.norm.weighted and not (self.norm.centred or self.norm.weight_offset or self.norm.bias)

    @property
    def is_of_squares(self) -> bool:
        """Whether it is x / rms(x) * (weight + an offset)."""
        return self.norm.weighted and not (self.norm.centred or self.norm.bias)

    @property
    def factor(self) -> Array:
        """Factor of the normed values."""
        if self.weight is None:
            return jnp.ones(())
        weight = self.weight[...]
        return weight.astype(jnp.float32) + self.norm.weight_offset if self.norm.weight_offset else weight

    def __call__(self, x: Array) -> Array:
        wide = normed(self.norm, x, self.factor)
        return (wide if self.bias is None else wide + self.bias[...].astype(jnp.float32)).astype(x.dtype)


class NoNorm(nnx.Module):
    """Stands where a layer has no norm."""

    before_quantized = False

    @property
    def is_plain(self) -> bool:
        return False

    def __call__(self, x: Array) -> Array:
        return x


AnyNorm = Normalization | NoNorm


def make_norm(norm: Norm | None, width: int, dtype: str, prefix: str = "") -> AnyNorm:
    """A norm over the width of the model."""
    return NoNorm() if norm is None else Normalization(norm, width, "embed", dtype, prefix=prefix)

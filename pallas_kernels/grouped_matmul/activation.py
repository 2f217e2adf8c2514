"""The activations of gated experts, on float32 values; plain jnp that kernels can trace too."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0


def _silu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return gate * _sigmoid(gate) * up


def _gelu_tanh(gate: jax.Array, up: jax.Array) -> jax.Array:
    # 0.5 * (1 + tanh(u)) is sigmoid(2 u).
    return gate * _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up


def _swiglu_clamped(gate: jax.Array, up: jax.Array) -> jax.Array:
    """That of gpt-oss."""
    gate = jnp.minimum(gate, SWIGLU_LIMIT)
    up = jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * _sigmoid(SWIGLU_ALPHA * gate) * (up + 1.0)


def _sigmoid(x: jax.Array) -> jax.Array:
    """Of an exponential that may overflow to infinity, which gives 0: every kernel language has it."""
    return 1.0 / (1.0 + jnp.exp(-x))


ACTIVATIONS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "swiglu_clamped": _swiglu_clamped,
}
"""Each is called with (gate, up)."""

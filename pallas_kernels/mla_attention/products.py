"""Products with the weights that make keys and values of latents.

A head's key of a token is W_k latent, its value W_v latent. Scores q . (W_k latent) are (q W_k) . latent, and the weighted sum of
values is W_v times that of latents: with queries multiplied by W_k all heads have one key and value per token, the latent. Source:
arXiv:2405.04434, section 2.1.
"""

import jax
import jax.numpy as jnp


def absorb(q_TNP: jax.Array, key_NPL: jax.Array) -> jax.Array:
    """q W_k: queries of latents [T, N, L]."""
    return _product("tnp,npl->tnl", q_TNP, key_NPL)


def values_of(sum_TNL: jax.Array, value_NVL: jax.Array) -> jax.Array:
    """Sums of latents as sums of the heads' values [T, N, V]."""
    return _product("tnl,nvl->tnv", sum_TNL, value_NVL)


def expand(latent_TL: jax.Array, weight_NHL: jax.Array) -> jax.Array:
    """Keys or values of all heads [T, N, H]."""
    return _product("tl,nhl->tnh", latent_TL, weight_NHL)


def _product(subscripts: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    # A GPU's default for float32 is TF32, of 10 bits of mantissa; a CPU sums products of bfloat16 by head in less than float32.
    wide = jnp.float32 if jax.default_backend() == "cpu" else x.dtype
    precision = jax.lax.Precision.HIGHEST if wide == jnp.float32 else None
    return jnp.einsum(subscripts, x.astype(wide), weight.astype(x.dtype).astype(wide), precision=precision).astype(x.dtype)

"""Latent attention in plain float32 jnp: the truth for the other implementations. Gathers the whole page table."""

from typing import Any

import jax

from pallas_kernels.mla_attention.tokens import Tokens
from pallas_kernels.mla_attention.xla import attention_over_latents, decode_as_paged, rope_and_write
from pallas_kernels.paged_attention import reference

__all__ = ["latent_attention", "latent_decode", "rope_and_write", "supports"]


def supports(**_: object) -> bool:
    return True


def latent_attention(tokens: Tokens, pages_P1SC: jax.Array, *rows: jax.Array, **options: Any) -> jax.Array:
    return attention_over_latents(reference, tokens, pages_P1SC, *rows, **options)


def latent_decode(q_RNL: jax.Array, q_RNE: jax.Array, pages_P1SC: jax.Array, *rows: jax.Array, **options: Any) -> jax.Array:
    return decode_as_paged(reference, q_RNL, q_RNE, pages_P1SC, *rows, **options)

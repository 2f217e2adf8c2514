"""Latent attention in plain float32 jnp: the truth for the other implementations. Gathers the whole page table."""

import jax

from pallas_kernels.paged_attention import reference


def supports(**_: object) -> bool:
    return True


def latent_attention(
    q_TNC: jax.Array,
    pages_P1SC: jax.Array,
    page_table_RB: jax.Array,
    query_start_R1: jax.Array,
    kv_length_R: jax.Array,
    *,
    value_dim: int,
    scale: float,
    interpret: bool = False,
) -> jax.Array:
    rows = (page_table_RB, query_start_R1, kv_length_R)
    return reference.paged_attention(q_TNC[:, None], pages_P1SC, pages_P1SC, *rows, scale=scale)[:, 0, :, :value_dim]


def latent_decode(
    q_RNC: jax.Array,
    pages_P1SC: jax.Array,
    page_table_RB: jax.Array,
    kv_length_R: jax.Array,
    *,
    value_dim: int,
    scale: float,
    interpret: bool = False,
) -> jax.Array:
    rows = (page_table_RB, kv_length_R)
    return reference.paged_decode(q_RNC[:, None], pages_P1SC, pages_P1SC, *rows, scale=scale)[:, 0, :, :value_dim]

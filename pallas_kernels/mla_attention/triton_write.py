"""All between projection and attention as one Pallas-Triton launch; the cache is written in place through an aliased operand.

    queries of head n   [- P -|-- E --]       the second part is rotated, and both are stored apart
    vector of a token   [- L -|-- E --]       the first part is normed, the second rotated, both into the cache and into arrays

A program takes one token: its vector, or some of its heads. What is rotated is read as two halves, because value i turns with
value i + E/2.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._compat import load, store, triton_call
from pallas_kernels.cache_write import to_cache_type
from pallas_kernels.mla_attention import xla
from pallas_kernels.mla_attention.tokens import Tokens
from pallas_kernels.mla_attention.triton_decode import Part
from pallas_kernels.sizes import next_power_of_two


@dataclass(frozen=True)
class Tiles:
    """Heads of a program, a power of two."""

    heads: int
    num_warps: int


def pick_tiles(num_tokens: int, num_heads: int) -> Tiles:
    """Few tokens: small programs, for the shortest way through. Many: fewer programs."""
    return Tiles(min(2 if num_tokens <= 512 else 8, next_power_of_two(num_heads)), 2)


def rope_and_write(
    q_TNH: jax.Array,
    vector_TC: jax.Array,
    cos_TE: jax.Array,
    sin_TE: jax.Array,
    norm_L: jax.Array,
    pages_P1SC: jax.Array,
    slot_T: jax.Array,
    *,
    eps: float,
    interpret: bool = False,
    tiles: Tiles | None = None,
) -> tuple[Tokens, jax.Array]:
    size = pages_P1SC.size
    if size > 2**31 and size * pages_P1SC.dtype.itemsize <= 2**32:
        # Pallas-Triton counts the values of such an array in 32 bits, with a sign.
        return xla.rope_and_write(q_TNH, vector_TC, cos_TE, sin_TE, norm_L, pages_P1SC, slot_T, eps=eps)
    num_tokens, num_heads, head_dim = q_TNH.shape
    latent_dim, rotated_dim, dtype = len(norm_L), 2 * cos_TE.shape[1], q_TNH.dtype
    tiles = tiles or pick_tiles(num_tokens, num_heads)
    pages_P1SC, *tokens = triton_call(
        functools.partial(_kernel, heads=tiles.heads, eps=eps),
        name="rope_and_write_latents",
        grid=(num_tokens, 1 + -(-num_heads // tiles.heads)),
        out_shape=(
            jax.ShapeDtypeStruct(pages_P1SC.shape, pages_P1SC.dtype),
            jax.ShapeDtypeStruct((num_tokens, num_heads, head_dim - rotated_dim), dtype),
            jax.ShapeDtypeStruct((num_tokens, num_heads, rotated_dim), dtype),
            jax.ShapeDtypeStruct((num_tokens, latent_dim), dtype),
            jax.ShapeDtypeStruct((num_tokens, rotated_dim), dtype),
        ),
        num_warps=tiles.num_warps,
        num_stages=1,
        interpret=interpret,
        input_output_aliases={0: 0},
    )(pages_P1SC, q_TNH, vector_TC, cos_TE, sin_TE, norm_L, slot_T)
    return Tokens(*tokens), pages_P1SC


def _kernel(
    _pages_ref,
    q_ref,  # [T, N, P + E]
    vector_ref,  # [T, L + E]
    cos_ref,  # [T, E / 2]
    sin_ref,  # [T, E / 2]
    norm_ref,  # [L]
    slot_ref,  # [T]
    pages_ref,  # [P, 1, S, L + E]
    q_plain_ref,  # [T, N, P]
    q_rotated_ref,  # [T, N, E]
    latent_ref,  # [T, L]
    rotated_ref,  # [T, E]
    *,
    heads: int,
    eps: float,
) -> None:
    num_heads, plain_dim = q_plain_ref.shape[1:]
    latent_dim, half, page_size = latent_ref.shape[1], cos_ref.shape[1], pages_ref.shape[2]
    token, group = pl.program_id(0), pl.program_id(1) - 1
    dim_h = jnp.arange(next_power_of_two(half))
    in_half_h = dim_h < half
    cos_h, sin_h = (load(ref.at[token, dim_h], mask=in_half_h, other=0.0) for ref in (cos_ref, sin_ref))

    def rotate(first, second):
        first, second = first.astype(jnp.float32), second.astype(jnp.float32)
        return first * cos_h - second * sin_h, second * cos_h + first * sin_h

    @pl.when(group < 0)
    def _of_vector():
        slot = slot_ref[token]
        page, offset = lax.div(jnp.maximum(slot, 0), page_size), lax.rem(jnp.maximum(slot, 0), page_size)

        def write(start, dim, is_real, x, target_ref):
            cached = to_cache_type(x.astype(target_ref.dtype), pages_ref.dtype, None)
            store(pages_ref.at[page, 0, offset, start + dim], cached, mask=is_real & (slot >= 0))
            store(target_ref.at[token, dim], cached.astype(target_ref.dtype), mask=is_real)

        dim_L = jnp.arange(next_power_of_two(latent_dim))
        in_latent_L = dim_L < latent_dim
        wide_L = load(vector_ref.at[token, dim_L], mask=in_latent_L, other=0.0).astype(jnp.float32)
        factor = lax.rsqrt(jnp.sum(wide_L * wide_L, axis=0) / latent_dim + eps)
        norm_L = load(norm_ref.at[dim_L], mask=in_latent_L, other=0.0).astype(jnp.float32)
        write(0, dim_L, in_latent_L, wide_L * factor * norm_L, latent_ref)
        halves = [
            load(vector_ref.at[token, start + dim_h], mask=in_half_h, other=0.0) for start in (latent_dim, latent_dim + half)
        ]
        for start, x_h in zip((0, half), rotate(*halves), strict=True):
            write(latent_dim, start + dim_h, in_half_h, x_h, rotated_ref)

    @pl.when(group >= 0)
    def _of_heads():
        head_N1 = (group * heads + jnp.arange(heads))[:, None]
        in_heads_N = head_N1[:, 0] < num_heads
        plain = Part.of(0, plain_dim)
        plain.store(q_plain_ref, (token, head_N1), in_heads_N, plain.load(q_ref, (token, head_N1), in_heads_N))
        mask_Nh = (head_N1 < num_heads) & in_half_h[None, :]
        dim_1h = dim_h[None, :]
        halves = [
            load(q_ref.at[token, head_N1, start + dim_1h], mask=mask_Nh, other=0.0) for start in (plain_dim, plain_dim + half)
        ]
        for start, x_Nh in zip((0, half), rotate(*halves), strict=True):
            store(q_rotated_ref.at[token, head_N1, start + dim_1h], x_Nh.astype(q_rotated_ref.dtype), mask=mask_Nh)

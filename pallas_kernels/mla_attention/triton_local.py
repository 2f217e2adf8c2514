"""Causal attention of prompts over their own tokens of a step, whose keys and values are there for each head, for Pallas-Triton.

    key of head n     [- P: made of the latent, by head -|-- E: rotated, of all heads --]
    value of head n   [- V: made of the latent, by head -]

With these a query, key and head cost 2 (P + E + V) operations, a third of those over latents. Keys before the step's tokens are left
to `triton_context`, which needs the logarithm of the softmax sum for that. A program holds a tile of block_m tokens of one head and
walks the keys from the first token of its row up to its own last: first those that every query sees whole, without any mask, then
those across the diagonal (FlashAttention-2, Dao 2023).
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._compat import dot_f32, store, triton_call
from pallas_kernels.mla_attention.items import FIRST, NUM_TOKENS, TOKEN, make_items
from pallas_kernels.mla_attention.triton_decode import Part
from pallas_kernels.paged_attention.triton_decode import LOG2E, MASKED


@dataclass(frozen=True)
class LocalTiles:
    """Sizes of the kernel: queries and keys of a tile."""

    block_m: int = 64
    block_k: int = 32
    num_warps: int = 4
    num_stages: int = 2


def pick_tiles(itemsize: int) -> LocalTiles:
    """Sizes for a type."""
    # Full float32 products run without tensor cores and hold their operands in registers.
    return LocalTiles() if itemsize <= 2 else LocalTiles(block_m=16, block_k=16, num_stages=1)


def attend_to_own(
    q_TNP: jax.Array,
    q_TNE: jax.Array,
    k_TNP: jax.Array,
    k_TE: jax.Array,
    v_TNV: jax.Array,
    query_start_R1: jax.Array,
    kv_length_R: jax.Array,
    *,
    scale: float,
    interpret: bool = False,
    tiles: LocalTiles | None = None,
    min_tokens: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Results [T, N, V], and the logarithms of the softmax sums, base 2, float32 [T, N].

    Rows of fewer than min_tokens tokens are left out: what the results hold in their place is undefined.
    """
    num_tokens, num_heads, value_dim = v_TNV.shape
    tiles = tiles or pick_tiles(q_TNP.dtype.itemsize)
    items_N5, count_1 = make_items(query_start_R1, kv_length_R, num_tokens, tiles.block_m, min_tokens=min_tokens, context=False)
    return triton_call(
        functools.partial(_kernel, block_m=tiles.block_m, block_k=tiles.block_k, score_scale=scale * LOG2E),
        name="latent_attention_local",
        grid=(num_heads, items_N5.shape[0]),
        out_shape=(
            jax.ShapeDtypeStruct((num_tokens, num_heads, value_dim), q_TNP.dtype),
            jax.ShapeDtypeStruct((num_tokens, num_heads), jnp.float32),
        ),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=interpret,
    )(q_TNP, q_TNE, k_TNP, k_TE, v_TNV, items_N5, count_1)


def _kernel(
    q_ref,  # [T, N, P]
    q_rotated_ref,  # [T, N, E]
    k_ref,  # [T, N, P]
    k_rotated_ref,  # [T, E]
    v_ref,  # [T, N, V]
    items_ref,  # [items, 5]
    count_ref,  # [1]
    out_ref,  # [T, N, V]
    lse_ref,  # [T, N]
    *,
    block_m: int,
    block_k: int,
    score_scale: float,
) -> None:
    head, item = pl.program_id(0), pl.program_id(1)
    plain, rotated, value = (Part.of(0, ref.shape[-1]) for ref in (q_ref, q_rotated_ref, v_ref))

    @pl.when(item < count_ref[0])
    def _compute():
        first, token, count = items_ref[item, FIRST], items_ref[item, TOKEN], items_ref[item, NUM_TOKENS]
        line_M = jnp.arange(block_m)
        is_used_M = line_M < count
        token_M = token + line_M
        q_MP = plain.load(q_ref, (token_M[:, None], head), is_used_M)
        q_ME = rotated.load(q_rotated_ref, (token_M[:, None], head), is_used_M)
        end = token + count

        def body(index, carry, *, masked: bool):
            acc_MV, max_M, sum_M = carry
            token_k = first + index * block_k + jnp.arange(block_k)
            # Lanes past the tile's last key load nothing: they may lie behind the arrays.
            is_read_k = token_k < end if masked else None
            k_kP = plain.load(k_ref, (token_k[:, None], head), is_read_k)
            k_kE = rotated.load(k_rotated_ref, (token_k[:, None],), is_read_k)
            v_kV = value.load(v_ref, (token_k[:, None], head), is_read_k)
            scores_Mk = (dot_f32(q_MP, k_kP.T) + dot_f32(q_ME, k_kE.T)) * score_scale
            if masked:
                scores_Mk = jnp.where(token_k[None, :] <= token_M[:, None], scores_Mk, MASKED)
            new_max_M = jnp.maximum(max_M, scores_Mk.max(axis=1))
            weights_Mk = jnp.exp2(scores_Mk - new_max_M[:, None])
            shrink_M = jnp.exp2(max_M - new_max_M)
            acc_MV = acc_MV * shrink_M[:, None] + dot_f32(weights_Mk.astype(v_kV.dtype), v_kV)
            return acc_MV, new_max_M, sum_M * shrink_M + weights_Mk.sum(axis=1)

        carry = (
            jnp.zeros((block_m, value.padded), jnp.float32),
            jnp.full((block_m,), MASKED, jnp.float32),
            jnp.zeros((block_m,), jnp.float32),
        )
        whole, last = lax.div(jnp.maximum(token + 1 - first, 0), block_k), lax.div(end - first + (block_k - 1), block_k)
        carry = lax.fori_loop(0, whole, functools.partial(body, masked=False), carry)
        acc_MV, max_M, sum_M = lax.fori_loop(whole, last, functools.partial(body, masked=True), carry)
        safe_sum_M = jnp.where(sum_M == 0, 1.0, sum_M)
        out_MV = (acc_MV / safe_sum_M[:, None]).astype(out_ref.dtype)
        value.store(out_ref, (token_M[:, None], head), is_used_M, out_MV)
        store(lse_ref.at[token_M, head], max_M + jnp.log2(safe_sum_M), mask=is_used_M)

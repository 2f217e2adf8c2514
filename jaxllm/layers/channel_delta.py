"""The gated delta rule with a decay for each channel of the keys. Source: arXiv:2510.26692, section 3.

A token with key k and value v changes the state of a head, a matrix [H, V], so:

    state *= exp(log_decay)[:, None]
    state += outer(k, beta * (v - k @ state))
    out    = q @ state

Rows of one token are computed together, one update each. The tokens of a longer row are cut into chunks of 64, which a loop computes one
after the other, with as many rounds as the step has chunks. Of the tokens i and j <= i of a chunk, with L the sums of log_decay from the
chunk's beginning, h the channels, and E_ijh = exp(L_ih - L_jh),

    A_ij = beta_i sum_h k_ih k_jh E_ijh for j < i
    u    = (I + A)^-1 beta (v - (exp(L) k) @ state)     what each token adds to the state
    out  = (exp(L) q) @ state + (sum_h q_ih k_jh E_ijh) @ u
    state' = exp(L_C) state + (exp(L_C - L) k)^T @ u

exp(-L_j) may be more than float32 holds, so no product is split at the chunk's beginning. Within 16 tokens E is computed for each pair; for
tokens of two such parts it is the product of the decays since the later part's first token and those up to it, both at most 1 and both
exponentials of sums, never of differences. All is computed in float32.

Shapes:
    q_TKH, k_TKH    queries and keys of all rows, one after the other: normalised, and queries scaled
    v_TKV           values; log_decay_TKH float32, not positive; beta_TK float32
    state_NKHV      float32: the states of all rows; the last takes the writes of padding
    rows            see `StateRows`; tokens after those of the last row are padding, whose outputs mean nothing
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import Precision

from jaxllm.layers.row_states import StateRows

CHUNK, PART = 64, 16
"""Tokens (C), and those of a part of a chunk (S)."""
NUM_PARTS = CHUNK // PART
"""Parts of a chunk (M)."""
LEAST_LOG_DECAY = -50.0
"""Smallest logarithm of a decay that is computed: float32 cannot tell it from forgetting all, and sums of smaller ones are coarse."""


@jax.jit
def channel_delta(
    q_TKH: Array, k_TKH: Array, v_TKV: Array, log_decay_TKH: Array, beta_TK: Array, state_NKHV: Array, rows: StateRows
) -> tuple[Array, Array]:
    """The outputs [T, K, V] of a ragged batch of tokens in the type of v, and the states after it."""
    tokens = (q_TKH, k_TKH, v_TKV, jnp.maximum(log_decay_TKH, LEAST_LOG_DECAY), beta_TK)
    if rows.query_start_R1 is None:
        return _single(tokens, state_NKHV, rows.row_R, rows.is_new_R)
    return _ragged(tokens, state_NKHV, rows.row_R, rows.is_new_R, rows.query_start_R1)


def _product(subscripts: str, *operands: Array) -> Array:
    return jnp.einsum(subscripts, *operands, precision=Precision.HIGHEST)


def _single(tokens: tuple[Array, ...], state_NKHV: Array, row_R: Array, is_new_R: Array) -> tuple[Array, Array]:
    """Rows of one token."""
    q_RKH, k_RKH, v_RKV, log_decay_RKH, beta_RK = (x.astype(jnp.float32) for x in tokens)
    state_RKHV = jnp.where(is_new_R[:, None, None, None], 0, state_NKHV[row_R]) * jnp.exp(log_decay_RKH)[..., None]
    added_RKV = beta_RK[..., None] * (v_RKV - _product("rkh,rkhv->rkv", k_RKH, state_RKHV))
    state_RKHV += k_RKH[..., None] * added_RKV[..., None, :]
    out_RKV = _product("rkh,rkhv->rkv", q_RKH, state_RKHV).astype(tokens[2].dtype)
    return out_RKV, state_NKHV.at[row_R].set(state_RKHV)


def _ragged(
    tokens: tuple[Array, ...], state_NKHV: Array, row_R: Array, is_new_R: Array, query_start_R1: Array
) -> tuple[Array, Array]:
    """Rows of any length: those of one token together, then the chunks of the others."""
    num_tokens, trash, dtype = len(tokens[2]), len(state_NKHV) - 1, tokens[2].dtype
    start_R, count_R = query_start_R1[:-1], jnp.diff(query_start_R1)
    is_single_R = count_R == 1
    first_R = jnp.minimum(start_R, num_tokens - 1)
    single = tuple(x[first_R] for x in tokens)
    single_RKV, state_NKHV = _single(single, state_NKHV, jnp.where(is_single_R, row_R, trash), is_new_R)
    out_TKV = jnp.zeros((num_tokens + CHUNK, *tokens[2].shape[1:]), dtype)
    out_TKV = out_TKV.at[jnp.where(is_single_R, start_R, num_tokens + CHUNK)].set(single_RKV, mode="drop")

    # A chunk is read and written whole, wherever it begins.
    padded = [jnp.pad(x, ((0, CHUNK), *((0, 0),) * (x.ndim - 1))) for x in tokens]
    num_chunks_R = jnp.where(is_single_R, 0, -(-count_R // CHUNK))
    end_R = jnp.cumsum(num_chunks_R)

    def step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        out_TKV, state_NKHV = carry
        r = jnp.searchsorted(end_R, i, side="right", method="compare_all")
        index = i - (end_R[r] - num_chunks_R[r])
        first = start_R[r] + index * CHUNK
        is_real_C = jnp.arange(CHUNK) < query_start_R1[r + 1] - first

        def chunk_of(x: Array) -> Array:
            part = jax.lax.dynamic_slice_in_dim(x, first, CHUNK).astype(jnp.float32)
            return jnp.where(is_real_C.reshape(-1, *(1,) * (x.ndim - 1)), part, 0)

        state_KHV = jnp.where((index == 0) & is_new_R[r], 0, state_NKHV[row_R[r]])
        out_CKV, state_KHV = _chunk(state_KHV, *[chunk_of(x) for x in padded])
        kept_CKV = jax.lax.dynamic_slice_in_dim(out_TKV, first, CHUNK)
        out_CKV = jnp.where(is_real_C[:, None, None], out_CKV.astype(dtype), kept_CKV)
        out_TKV = jax.lax.dynamic_update_slice_in_dim(out_TKV, out_CKV, first, 0)
        return out_TKV, state_NKHV.at[row_R[r]].set(state_KHV)

    out_TKV, state_NKHV = jax.lax.fori_loop(0, end_R[-1], step, (out_TKV, state_NKHV))
    return out_TKV[:num_tokens], state_NKHV


def _chunk(
    state_KHV: Array, q_CKH: Array, k_CKH: Array, v_CKV: Array, log_decay_CKH: Array, beta_CK: Array
) -> tuple[Array, Array]:
    """Outputs of a chunk and the state after it. Tokens of zeros change nothing."""
    from_start_CKH = jnp.exp(jnp.cumsum(log_decay_CKH, axis=0))
    to_end_CKH = jnp.exp(_behind(log_decay_CKH))
    attention_KCC, A_KCC = _pairs((q_CKH, k_CKH), k_CKH, log_decay_CKH)
    beta_KC1 = beta_CK.T[..., None]
    known_KCV = _product("ckh,khv->kcv", from_start_CKH * k_CKH, state_KHV)
    added_KCV = jax.lax.linalg.triangular_solve(
        jnp.tril(beta_KC1 * A_KCC, -1),
        beta_KC1 * (v_CKV.transpose(1, 0, 2) - known_KCV),
        left_side=True,
        lower=True,
        unit_diagonal=True,
    )
    out_CKV = _product("ckh,khv->ckv", from_start_CKH * q_CKH, state_KHV)
    out_CKV += _product("kcd,kdv->ckv", attention_KCC, added_KCV)
    state_KHV = from_start_CKH[-1][..., None] * state_KHV + _product("ckh,kcv->khv", to_end_CKH * k_CKH, added_KCV)
    return out_CKV, state_KHV


def _behind(x: Array) -> Array:
    """Sums of what lies behind each place of the first dimension."""
    return jax.lax.cumsum(jnp.concatenate([x[1:], jnp.zeros_like(x[:1])]), 0, reverse=True)


def _pairs(left: Sequence[Array], right_CKH: Array, log_decay_CKH: Array) -> list[Array]:
    """For each of left, [K, C, C]: its products with the tokens of right up to its own, channels decayed by what lies between."""
    _, num_heads, width = right_CKH.shape
    in_parts = (NUM_PARTS, PART, num_heads, width)
    right_MSKH, log_decay_MSKH = right_CKH.reshape(in_parts), log_decay_CKH.reshape(in_parts)
    within_MSKH = jnp.cumsum(log_decay_MSKH, axis=1)
    is_seen_SS = jnp.tri(PART, dtype=bool)[..., None, None]
    E_MSSKH = jnp.exp(jnp.where(is_seen_SS, within_MSKH[:, :, None] - within_MSKH[:, None], -jnp.inf))

    # To the beginning of each part from a token of an earlier one: what lies behind the token in its own, then the parts between.
    i, j, p = np.ogrid[:NUM_PARTS, :NUM_PARTS, :NUM_PARTS]
    between_MMKH = _product("ijp,pkh->ijkh", jnp.asarray((j < p) & (p < i), jnp.float32), within_MSKH[:, -1])
    between_MMKH = jnp.where((j < i)[..., None], between_MMKH, -jnp.inf)
    decayed_MMSKH = jnp.exp(between_MMKH[:, :, None] + jax.vmap(_behind)(log_decay_MSKH)) * right_MSKH
    is_own_MM = np.eye(NUM_PARTS, dtype=np.float32)[:, None, :, None]

    def products(x_MSKH: Array) -> Array:
        own_MSSK = jnp.sum(x_MSKH[:, :, None] * right_MSKH[:, None] * E_MSSKH, axis=-1)
        earlier_KMSMS = _product("iskh,ijrkh->kisjr", jnp.exp(within_MSKH) * x_MSKH, decayed_MMSKH)
        all_KMSMS = earlier_KMSMS + own_MSSK.transpose(3, 0, 1, 2)[:, :, :, None] * is_own_MM
        return all_KMSMS.reshape(num_heads, CHUNK, CHUNK)

    return [products(x_CKH.reshape(in_parts)) for x_CKH in left]

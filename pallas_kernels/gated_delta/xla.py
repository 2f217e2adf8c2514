"""The gated delta rule over chunks of tokens. Source: arXiv:2412.06464, section 3.3.

Rows of one token are computed together, one update each. The tokens of a longer row are cut into chunks of 64, which a loop computes
one after the other, with as many rounds as the step has chunks. Of the tokens i and j <= i of a chunk, with L the sums of log_decay
from the chunk's beginning,

    D_ij = exp(L_i - L_j)
    A_ij = beta_i (k_i . k_j) D_ij for j < i
    u    = (I + A)^-1 beta (v - exp(L) k @ state)       what each token adds to the state
    out  = exp(L) q @ state + (q k^T * D) @ u
    state' = exp(L_C) state + (exp(L_C - L) k)^T @ u

All is computed in float32.
"""

import jax
import jax.numpy as jnp
from jax.lax import Precision

from pallas_kernels.gated_delta.reference import gated_delta_decode

__all__ = ["CHUNK", "gated_delta", "gated_delta_decode", "supports"]

CHUNK = 64
"""Tokens (C)."""


def supports(*, platform: str, key_dim: int, interpret: bool = False) -> bool:
    return True


def gated_delta(
    q_TKH: jax.Array,
    k_TKH: jax.Array,
    v_TKGV: jax.Array,
    log_decay_TKG: jax.Array,
    beta_TKG: jax.Array,
    state_NKGHV: jax.Array,
    row_R: jax.Array,
    is_new_R: jax.Array,
    query_start_R1: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See the package."""
    num_tokens, trash = len(v_TKGV), len(state_NKGHV) - 1
    tokens = [q_TKH, k_TKH, v_TKGV, log_decay_TKG, beta_TKG]
    start_R, count_R = query_start_R1[:-1], jnp.diff(query_start_R1)

    is_single_R = count_R == 1
    first_R = jnp.minimum(start_R, num_tokens - 1)
    single_row_R = jnp.where(is_single_R, row_R, trash)
    q, k, v, log_decay, beta = (x[first_R] for x in tokens)
    single_RKGV, state_NKGHV = gated_delta_decode(q, k, v, log_decay, beta, state_NKGHV, single_row_R, is_new_R)
    out_TKGV = jnp.zeros((num_tokens + CHUNK, *v_TKGV.shape[1:]), v_TKGV.dtype)
    out_TKGV = out_TKGV.at[jnp.where(is_single_R, start_R, num_tokens + CHUNK)].set(single_RKGV, mode="drop")

    # A chunk is read and written whole, wherever it begins.
    padded = [jnp.pad(x, ((0, CHUNK), *((0, 0),) * (x.ndim - 1))) for x in tokens]
    num_chunks_R = jnp.where(is_single_R, 0, -(-count_R // CHUNK))
    end_R = jnp.cumsum(num_chunks_R)

    def step(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out_TKGV, state_NKGHV = carry
        r = jnp.searchsorted(end_R, i, side="right", method="compare_all")
        index = i - (end_R[r] - num_chunks_R[r])
        first = start_R[r] + index * CHUNK
        is_real_C = jnp.arange(CHUNK) < query_start_R1[r + 1] - first

        def chunk_of(x: jax.Array) -> jax.Array:
            part = jax.lax.dynamic_slice_in_dim(x, first, CHUNK).astype(jnp.float32)
            return jnp.where(is_real_C.reshape(-1, *(1,) * (x.ndim - 1)), part, 0)

        state_KGHV = jnp.where((index == 0) & is_new_R[r], 0, state_NKGHV[row_R[r]])
        out_CKGV, state_KGHV = _chunk(state_KGHV, *[chunk_of(x) for x in padded])
        kept_CKGV = jax.lax.dynamic_slice_in_dim(out_TKGV, first, CHUNK)
        out_CKGV = jnp.where(is_real_C[:, None, None, None], out_CKGV.astype(out_TKGV.dtype), kept_CKGV)
        out_TKGV = jax.lax.dynamic_update_slice_in_dim(out_TKGV, out_CKGV, first, 0)
        return out_TKGV, state_NKGHV.at[row_R[r]].set(state_KGHV)

    out_TKGV, state_NKGHV = jax.lax.fori_loop(0, end_R[-1], step, (out_TKGV, state_NKGHV))
    return out_TKGV[:num_tokens], state_NKGHV


def _chunk(
    state_KGHV: jax.Array,
    q_CKH: jax.Array,
    k_CKH: jax.Array,
    v_CKGV: jax.Array,
    log_decay_CKG: jax.Array,
    beta_CKG: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Outputs of a chunk and the state after it. Tokens of zeros change nothing."""

    def product(subscripts: str, *operands: jax.Array) -> jax.Array:
        return jnp.einsum(subscripts, *operands, precision=Precision.HIGHEST)

    L_KGC = jnp.cumsum(log_decay_CKG, axis=0).transpose(1, 2, 0)
    beta_KGC1 = beta_CKG.transpose(1, 2, 0)[..., None]
    is_visible_CC = jnp.tri(CHUNK, dtype=bool)
    D_KGCC = jnp.exp(jnp.where(is_visible_CC, L_KGC[..., :, None] - L_KGC[..., None, :], -jnp.inf))
    A_KGCC = jnp.tril(beta_KGC1 * product("ckh,dkh->kcd", k_CKH, k_CKH)[:, None] * D_KGCC, -1)
    known_KGCV = jnp.exp(L_KGC)[..., None] * product("ckh,kghv->kgcv", k_CKH, state_KGHV)
    added_KGCV = jax.lax.linalg.triangular_solve(
        A_KGCC, beta_KGC1 * (v_CKGV.transpose(1, 2, 0, 3) - known_KGCV), left_side=True, lower=True, unit_diagonal=True
    )
    out_KGCV = jnp.exp(L_KGC)[..., None] * product("ckh,kghv->kgcv", q_CKH, state_KGHV)
    out_KGCV += product("kgcd,kgdv->kgcv", product("ckh,dkh->kcd", q_CKH, k_CKH)[:, None] * D_KGCC, added_KGCV)
    rest_KGC1 = jnp.exp(L_KGC[..., -1:] - L_KGC)[..., None]
    state_KGHV = jnp.exp(L_KGC[..., -1])[..., None, None] * state_KGHV + product(
        "ckh,kgcv->kghv", k_CKH, rest_KGC1 * added_KGCV
    )
    return out_KGCV.transpose(2, 0, 1, 3), state_KGHV

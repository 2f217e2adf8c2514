"""The recurrence over chunks of tokens. Source: arXiv:2405.21060, section 6.

Rows of one token are computed together, one update each. The tokens of a longer row are cut into chunks of 128, which a loop computes
one after the other, with as many rounds as the step has chunks. Of the tokens i and j <= i of a chunk, with L the sums of log_decay
from the chunk's beginning,

    D_ij   = exp(L_i - L_j)
    out    = exp(L) c @ state^T + ((c b^T) * D) @ (dt * x) + skip * x
    state' = exp(L_C) state + (exp(L_C - L) dt * x)^T @ b

All is computed in float32. A model's own chunk_size is one of its training: results do not depend on it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.lax import Precision

from pallas_kernels.state_space.reference import state_space_decode

__all__ = ["CHUNK", "state_space", "state_space_decode", "supports"]

CHUNK = 128
"""Tokens (C)."""
Decode = Callable[..., tuple[jax.Array, jax.Array]]


def supports(*, platform: str, head_dim: int, state_size: int, interpret: bool = False) -> bool:
    return True


def state_space(
    x_TKGP: jax.Array,
    b_TKS: jax.Array,
    c_TKS: jax.Array,
    dt_TKG: jax.Array,
    log_decay_TKG: jax.Array,
    skip_KG: jax.Array,
    state_NKGPS: jax.Array,
    row_R: jax.Array,
    is_new_R: jax.Array,
    query_start_R1: jax.Array,
    *,
    decode: Decode = state_space_decode,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See the package. decode: computes the rows of one token."""
    num_tokens, trash = len(x_TKGP), len(state_NKGPS) - 1
    tokens = [x_TKGP, b_TKS, c_TKS, dt_TKG, log_decay_TKG]
    start_R, count_R = query_start_R1[:-1], jnp.diff(query_start_R1)

    is_single_R = count_R == 1
    first_R = jnp.minimum(start_R, num_tokens - 1)
    single_row_R = jnp.where(is_single_R, row_R, trash)
    x, b, c, dt, log_decay = (x[first_R] for x in tokens)
    single_RKGP, state_NKGPS = decode(x, b, c, dt, log_decay, skip_KG, state_NKGPS, single_row_R, is_new_R)
    out_TKGP = jnp.zeros((num_tokens + CHUNK, *x_TKGP.shape[1:]), x_TKGP.dtype)
    out_TKGP = out_TKGP.at[jnp.where(is_single_R, start_R, num_tokens + CHUNK)].set(single_RKGP, mode="drop")

    # A chunk is read and written whole, wherever it begins.
    padded = [jnp.pad(x, ((0, CHUNK), *((0, 0),) * (x.ndim - 1))) for x in tokens]
    num_chunks_R = jnp.where(is_single_R, 0, -(-count_R // CHUNK))
    end_R = jnp.cumsum(num_chunks_R)

    def step(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out_TKGP, state_NKGPS = carry
        r = jnp.searchsorted(end_R, i, side="right", method="compare_all")
        index = i - (end_R[r] - num_chunks_R[r])
        first = start_R[r] + index * CHUNK
        is_real_C = jnp.arange(CHUNK) < query_start_R1[r + 1] - first

        def chunk_of(x: jax.Array) -> jax.Array:
            part = jax.lax.dynamic_slice_in_dim(x, first, CHUNK).astype(jnp.float32)
            return jnp.where(is_real_C.reshape(-1, *(1,) * (x.ndim - 1)), part, 0)

        state_KGPS = jnp.where((index == 0) & is_new_R[r], 0, state_NKGPS[row_R[r]])
        out_CKGP, state_KGPS = _chunk(state_KGPS, skip_KG, *[chunk_of(x) for x in padded])
        kept_CKGP = jax.lax.dynamic_slice_in_dim(out_TKGP, first, CHUNK)
        out_CKGP = jnp.where(is_real_C[:, None, None, None], out_CKGP.astype(out_TKGP.dtype), kept_CKGP)
        out_TKGP = jax.lax.dynamic_update_slice_in_dim(out_TKGP, out_CKGP, first, 0)
        return out_TKGP, state_NKGPS.at[row_R[r]].set(state_KGPS)

    out_TKGP, state_NKGPS = jax.lax.fori_loop(0, end_R[-1], step, (out_TKGP, state_NKGPS))
    return out_TKGP[:num_tokens], state_NKGPS


def _chunk(
    state_KGPS: jax.Array,
    skip_KG: jax.Array,
    x_CKGP: jax.Array,
    b_CKS: jax.Array,
    c_CKS: jax.Array,
    dt_CKG: jax.Array,
    log_decay_CKG: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Outputs of a chunk and the state after it. Tokens of zeros change nothing."""

    def product(subscripts: str, *operands: jax.Array) -> jax.Array:
        return jnp.einsum(subscripts, *operands, precision=Precision.HIGHEST)

    L_KGC = jnp.cumsum(log_decay_CKG, axis=0).transpose(1, 2, 0)
    is_visible_CC = jnp.tri(CHUNK, dtype=bool)
    D_KGCC = jnp.exp(jnp.where(is_visible_CC, L_KGC[..., :, None] - L_KGC[..., None, :], -jnp.inf))
    added_KGCP = (dt_CKG[..., None] * x_CKGP).transpose(1, 2, 0, 3)
    out_KGCP = jnp.exp(L_KGC)[..., None] * product("cks,kgps->kgcp", c_CKS, state_KGPS)
    out_KGCP += product("kgcd,kgdp->kgcp", product("cks,dks->kcd", c_CKS, b_CKS)[:, None] * D_KGCC, added_KGCP)
    rest_KGC1 = jnp.exp(L_KGC[..., -1:] - L_KGC)[..., None]
    state_KGPS = jnp.exp(L_KGC[..., -1])[..., None, None] * state_KGPS + product(
        "kgcp,cks->kgps", rest_KGC1 * added_KGCP, b_CKS
    )
    return out_KGCP.transpose(2, 0, 1, 3) + skip_KG[..., None] * x_CKGP, state_KGPS

"""The gated delta rule token by token, as its definition says."""

import jax
import jax.numpy as jnp
from jax.lax import Precision


def supports(*, platform: str, key_dim: int, interpret: bool = False) -> bool:
    return True


def updated(
    state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Output [..., K, G, V] of a token, and the state [..., K, G, H, V] after it; leading dimensions are a batch."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k = k[..., None, :]
    state = state * jnp.exp(log_decay)[..., None, None]
    known = jnp.einsum("...h,...hv->...v", k, state, precision=Precision.HIGHEST)
    state = state + k[..., None] * (beta[..., None] * (v - known))[..., None, :]
    return jnp.einsum("...h,...hv->...v", q[..., None, :], state, precision=Precision.HIGHEST), state


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
    tokens = (q_TKH, k_TKH, v_TKGV, log_decay_TKG, beta_TKG)

    def step(t: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out_TKGV, state_NKGHV = carry
        r = jnp.searchsorted(query_start_R1, t, side="right", method="compare_all") - 1
        begins = (t == query_start_R1[r]) & is_new_R[r]
        state = jnp.where(begins, 0, state_NKGHV[row_R[r]])
        out, state = updated(state, *(x[t] for x in tokens))
        return out_TKGV.at[t].set(out.astype(out_TKGV.dtype)), state_NKGHV.at[row_R[r]].set(state)

    return jax.lax.fori_loop(0, query_start_R1[-1], step, (jnp.zeros_like(v_TKGV), state_NKGHV))


def gated_delta_decode(
    q_RKH: jax.Array,
    k_RKH: jax.Array,
    v_RKGV: jax.Array,
    log_decay_RKG: jax.Array,
    beta_RKG: jax.Array,
    state_NKGHV: jax.Array,
    row_R: jax.Array,
    is_new_R: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See the package."""
    state_RKGHV = jnp.where(is_new_R[:, None, None, None, None], 0, state_NKGHV[row_R])
    out_RKGV, state_RKGHV = updated(state_RKGHV, q_RKH, k_RKH, v_RKGV, log_decay_RKG, beta_RKG)
    return out_RKGV.astype(v_RKGV.dtype), state_NKGHV.at[row_R].set(state_RKGHV)

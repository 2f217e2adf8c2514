"""The recurrence token by token, as its definition says."""

import jax
import jax.numpy as jnp


def supports(*, platform: str, head_dim: int, state_size: int, interpret: bool = False) -> bool:
    return True


def updated(
    state: jax.Array, skip: jax.Array, x: jax.Array, b: jax.Array, c: jax.Array, dt: jax.Array, log_decay: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Output [..., K, G, P] of a token, and the state [..., K, G, P, S] after it; leading dimensions are a batch."""
    x, b, c = (each.astype(jnp.float32) for each in (x, b, c))
    state = state * jnp.exp(log_decay)[..., None, None] + (dt[..., None] * x)[..., None] * b[..., None, None, :]
    # Not a product of matrices: so one loop updates the state and sums it up.
    return jnp.sum(state * c[..., None, None, :], axis=-1) + skip[..., None] * x, state


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
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See the package."""
    tokens = (x_TKGP, b_TKS, c_TKS, dt_TKG, log_decay_TKG)

    def step(t: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out_TKGP, state_NKGPS = carry
        r = jnp.searchsorted(query_start_R1, t, side="right", method="compare_all") - 1
        begins = (t == query_start_R1[r]) & is_new_R[r]
        state = jnp.where(begins, 0, state_NKGPS[row_R[r]])
        out, state = updated(state, skip_KG, *(x[t] for x in tokens))
        return out_TKGP.at[t].set(out.astype(out_TKGP.dtype)), state_NKGPS.at[row_R[r]].set(state)

    return jax.lax.fori_loop(0, query_start_R1[-1], step, (jnp.zeros_like(x_TKGP), state_NKGPS))


def state_space_decode(
    x_RKGP: jax.Array,
    b_RKS: jax.Array,
    c_RKS: jax.Array,
    dt_RKG: jax.Array,
    log_decay_RKG: jax.Array,
    skip_KG: jax.Array,
    state_NKGPS: jax.Array,
    row_R: jax.Array,
    is_new_R: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See the package."""
    state_RKGPS = jnp.where(is_new_R[:, None, None, None, None], 0, state_NKGPS[row_R])
    out_RKGP, state_RKGPS = updated(state_RKGPS, skip_KG, x_RKGP, b_RKS, c_RKS, dt_RKG, log_decay_RKG)
    return out_RKGP.astype(x_RKGP.dtype), state_NKGPS.at[row_R].set(state_RKGPS)

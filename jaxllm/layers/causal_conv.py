"""A convolution over the last tokens of each row, channel by channel."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.layers.row_states import StateRows


@jax.jit
def causal_conv(x_TKC: Array, weight_KCJ: Array, state_NKjC: Array, rows: StateRows) -> tuple[Array, Array]:
    """Float32 [T, K, C]: for each token the sum of the last J inputs of its row by their weights, the token's own last; and the states
    after the step.

    state_NKjC: the last j = J - 1 inputs of each row before the step.
    """
    num_before = state_NKjC.shape[2]
    weight_JKC = weight_KCJ.transpose(2, 0, 1).astype(jnp.float32)
    before_RKjC = jnp.where(rows.is_new_R[:, None, None, None], 0, state_NKjC[rows.row_R])
    if rows.query_start_R1 is None:
        window_RKJC = jnp.concatenate([before_RKjC, x_TKC[:, :, None].astype(before_RKjC.dtype)], axis=2)
        out_RKC = jnp.sum(window_RKJC.astype(jnp.float32) * weight_JKC.transpose(1, 0, 2), axis=2)
        return out_RKC, state_NKjC.at[rows.row_R].set(window_RKJC[:, :, 1:])

    num_tokens, num_rows = len(x_TKC), len(rows.row_R)
    start_R, count_R = rows.query_start_R1[:-1], jnp.diff(rows.query_start_R1)
    token_T = jnp.arange(num_tokens)
    owner_T = jnp.searchsorted(rows.query_start_R1, token_T, side="right", method="compare_all") - 1
    owner_T = jnp.minimum(owner_T, num_rows - 1)
    index_T = token_T - start_R[owner_T]
    out_TKC = x_TKC.astype(jnp.float32) * weight_JKC[-1]
    for distance in range(1, num_before + 1):
        in_step_TKC = x_TKC[jnp.maximum(token_T - distance, 0)]
        earlier_TKC = before_RKjC[owner_T, :, jnp.clip(num_before + index_T - distance, 0, num_before - 1)]
        input_TKC = jnp.where((index_T >= distance)[:, None, None], in_step_TKC, earlier_TKC)
        out_TKC += input_TKC.astype(jnp.float32) * weight_JKC[num_before - distance]

    # The last inputs of what was before and the row's tokens behind it.
    place_Rj = count_R[:, None] + jnp.arange(num_before)
    of_step_RjKC = x_TKC[jnp.clip(start_R[:, None] + place_Rj - num_before, 0, num_tokens - 1)]
    kept_RKjC = jnp.take_along_axis(before_RKjC, jnp.minimum(place_Rj, num_before - 1)[:, None, :, None], axis=2)
    is_kept_RKjC = (place_Rj < num_before)[:, None, :, None]
    last_RKjC = jnp.where(is_kept_RKjC, kept_RKjC, of_step_RjKC.transpose(0, 2, 1, 3).astype(kept_RKjC.dtype))
    return out_TKC, state_NKjC.at[rows.row_R].set(last_RKjC)


def convolved_before(x_TKC: Array, count_R: Array, state_NKjC: Array, rows: StateRows) -> Array:
    """The states behind the first `count` of equally many tokens of each row."""
    num_before, num_rows = state_NKjC.shape[2], len(rows.row_R)
    before_RKjC = jnp.where(rows.is_new_R[:, None, None, None], 0, state_NKjC[rows.row_R])
    x_RKBC = x_TKC.reshape(num_rows, -1, *x_TKC.shape[1:]).swapaxes(1, 2)
    all_RKJC = jnp.concatenate([before_RKjC, x_RKBC.astype(before_RKjC.dtype)], axis=2)
    place_Rj = count_R[:, None] + jnp.arange(num_before)
    return state_NKjC.at[rows.row_R].set(jnp.take_along_axis(all_RKJC, place_Rj[:, None, :, None], axis=2))

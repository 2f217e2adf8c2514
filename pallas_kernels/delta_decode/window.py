"""The state of a convolution over the last inputs of each row."""

import jax
import jax.numpy as jnp


def inputs_before(conv_state_NKjC: jax.Array, row_R: jax.Array, is_new_R: jax.Array) -> jax.Array:
    """[R, K, j, C]: the last inputs of each row of a step, zeros of new rows."""
    return jnp.where(is_new_R[:, None, None, None], 0, conv_state_NKjC[row_R])


def window_of(x_RKC: jax.Array, conv_state_NKjC: jax.Array, row_R: jax.Array, is_new_R: jax.Array) -> jax.Array:
    """[R, K, j + 1, C]: what a convolution sees of each row, the step's input the last."""
    before_RKjC = inputs_before(conv_state_NKjC, row_R, is_new_R)
    return jnp.concatenate([before_RKjC, x_RKC[:, :, None].astype(before_RKjC.dtype)], axis=2)


def moved_on(window_RKJC: jax.Array, conv_state_NKjC: jax.Array, row_R: jax.Array) -> jax.Array:
    """The states after the step."""
    return conv_state_NKjC.at[row_R].set(unless_padding(window_RKJC[:, :, 1:], row_R, conv_state_NKjC))


def unless_padding(after_R: jax.Array, row_R: jax.Array, state_N: jax.Array) -> jax.Array:
    """What each row leaves in the states, zeros of padding: its rows write to the same place, in any order."""
    is_padding_R = row_R == len(state_N) - 1
    return jnp.where(is_padding_R.reshape(-1, *(1,) * (after_R.ndim - 1)), 0, after_R)

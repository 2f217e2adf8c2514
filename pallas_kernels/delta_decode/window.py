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
    return conv_state_NKjC.at[row_R].set(window_RKJC[:, :, 1:])

"""The gated delta rule with a decay for each channel, against its definition in float64."""

import jax.numpy as jnp
import numpy as np

from jaxllm.layers.channel_delta import channel_delta
from jaxllm.layers.row_states import StateRows

NUM_HEADS, WIDTH, ROWS = 4, 8, 3
LENGTHS = (1, 150, 0, 70)
"""A row that decodes, a prompt of several chunks, padding, a prompt of two."""


def tokens(count, rng):
    """Random tokens of four heads: the first forgets nothing, the second all at once, the third has rates from far below to far above 1,
    and in the last a few tokens forget everything."""
    q, k, v = rng.normal(size=(3, count, NUM_HEADS, WIDTH))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    log_decay = np.zeros((count, NUM_HEADS, WIDTH))
    log_decay[:, 1] = -np.exp(rng.uniform(3, 7, (count, WIDTH)))
    log_decay[:, 2] = -np.exp(rng.uniform(-9, 6, (count, WIDTH)))
    log_decay[:, 3] = np.where(rng.random((count, WIDTH)) < 0.1, -500.0, -1e-4)
    return tuple(x.astype(np.float32) for x in (q, k, v, log_decay, rng.random((count, NUM_HEADS))))


def defined(q, k, v, log_decay, beta, state):
    outputs = []
    for t in range(len(q)):
        state = state * np.exp(log_decay[t])[..., None]
        known = np.einsum("kh,khv->kv", k[t], state)
        state = state + k[t][..., None] * (beta[t][:, None] * (v[t] - known))[:, None]
        outputs.append(np.einsum("kh,khv->kv", q[t], state))
    return np.stack(outputs), state


def test_rows_of_any_length_and_decay_equal_the_definition():
    rng = np.random.default_rng(0)
    given = tokens(sum(LENGTHS) + 5, rng)
    starts = np.cumsum([0, *LENGTHS])
    states = rng.normal(size=(ROWS + 1, NUM_HEADS, WIDTH, WIDTH)).astype(np.float32)
    states[2] = np.nan  # of the row that begins anew
    row, is_new = np.array([1, 0, ROWS, 2]), np.array([False, False, True, True])
    rows = StateRows(jnp.asarray(row), jnp.asarray(is_new), jnp.asarray(starts, jnp.int32))
    found, after = channel_delta(*given, jnp.asarray(states), rows)
    for r in (0, 1, 3):
        own = slice(starts[r], starts[r + 1])
        state = np.zeros_like(states[0]) if is_new[r] else states[row[r]]
        expected, left = defined(*(x[own].astype(np.float64) for x in given), state.astype(np.float64))
        np.testing.assert_allclose(found[own], expected, atol=3e-5)
        np.testing.assert_allclose(after[row[r]], left, atol=3e-5)


def test_steps_of_one_token_equal_the_definition():
    rng = np.random.default_rng(1)
    given, state = tokens(2, rng), rng.normal(size=(3, NUM_HEADS, WIDTH, WIDTH)).astype(np.float32)
    rows = StateRows(jnp.array([1, 0]), jnp.array([False, True]), None)
    found, after = channel_delta(*given, jnp.asarray(state), rows)
    for r, before in enumerate((state[1], np.zeros_like(state[1]))):
        own = slice(r, r + 1)
        expected, left = defined(*(x[own].astype(np.float64) for x in given), before.astype(np.float64))
        np.testing.assert_allclose(found[own], expected, atol=1e-5)
        np.testing.assert_allclose(after[[1, 0][r]], left, atol=1e-5)

"""The gated delta rule against its definition in float64, over steps that mix rows of all kinds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.checking.gated_delta import plain
from pallas_kernels.gated_delta import IMPLEMENTATIONS, gated_delta

K, G, H, V, MAX_ROWS = 2, 3, 16, 8, 5
run = jax.jit(gated_delta, static_argnames=("implementation", "interpret"))


def tokens_of(rng, count):
    """q, k, v, log_decay and beta of some tokens; keys are alike, as those of repeated words are."""
    q = rng.normal(size=(count, K, H))
    k = rng.normal(size=(1, K, H)) + 0.3 * rng.normal(size=(count, K, H))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    log_decay = -np.exp(rng.normal(size=(count, K, G)) * 2 - 2)
    return [q, k, rng.normal(size=(count, K, G, V)), log_decay, rng.uniform(size=(count, K, G))]


def run_step(implementation, sequences, done, plan, state, row_of, num_tokens, num_rows):
    """Compute `plan`, (sequence, count) of each row of a step, padded. Returns outputs by sequence, and the states."""
    parts = [[x[done[s] : done[s] + count] for x in sequences[s]] for s, count in plan]
    tokens = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
    # Padding is anything: here NaN.
    tokens = [np.pad(x, ((0, num_tokens - len(x)), *((0, 0),) * (x.ndim - 1)), constant_values=np.nan) for x in tokens]
    row_R = np.full(num_rows, MAX_ROWS)
    row_R[: len(plan)] = [row_of[s] for s, _ in plan]
    is_new_R = np.ones(num_rows, bool)
    is_new_R[: len(plan)] = [done[s] == 0 for s, _ in plan]
    counts = [count for _, count in plan] + [0] * (num_rows - len(plan))
    query_start = np.concatenate([[0], np.cumsum(counts)])
    tokens = [jnp.asarray(x, jnp.float32) for x in tokens]
    is_decode = num_tokens == num_rows and set(counts[: len(plan)]) == {1}
    rows = (jnp.asarray(row_R), jnp.asarray(is_new_R), None if is_decode else jnp.asarray(query_start, jnp.int32))
    out, state = run(*tokens, state, *rows, implementation=implementation, interpret=True)
    outs = {}
    for i, (s, count) in enumerate(plan):
        outs[s] = np.asarray(out)[query_start[i] : query_start[i] + count]
        done[s] += count
    return outs, state


STEPS = [
    [(0, 70), (1, 1), (2, 33)],  # sequence 1 begins with a single token
    [(1, 1), (0, 1), (3, 130), (2, 2)],
    [(0, 1), (1, 1), (2, 1), (3, 1)],
    [(3, 64), (0, 1), (4, 65), (1, 3)],
    [(4, 1), (3, 1), (1, 1)],
    [(2, 100), (3, 7), (4, 63)],
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_steps_of_chunks_and_decodes_equal_the_sequences_token_by_token(implementation):
    """Chunks of prompts and single tokens in one step, states carried between steps, rows that had other owners, padding of NaN."""
    rng = np.random.default_rng(0)
    lengths = [sum(count for step in STEPS for s, count in step if s == i) for i in range(5)]
    sequences = [tokens_of(rng, length) for length in lengths]
    expected = [plain(np.zeros((K, G, H, V)), *sequence) for sequence in sequences]
    state = jnp.full((MAX_ROWS + 1, K, G, H, V), jnp.nan)  # what earlier owners of the rows left
    row_of, done = [3, 0, 4, 1, 2], [0] * 5
    found = [[] for _ in sequences]
    for plan in STEPS:
        is_decode = all(count == 1 for _, count in plan)
        step = functools.partial(run_step, implementation, sequences, done, plan, state, row_of)
        outs, state = step(5, 5) if is_decode else step(208, 5)
        for s, out in outs.items():
            found[s].append(out)
    for s, (outs, last) in enumerate(expected):
        np.testing.assert_allclose(np.concatenate(found[s]), outs, atol=2e-5)
        np.testing.assert_allclose(np.asarray(state)[row_of[s]], last, atol=2e-5)


def test_shapes_that_do_not_fit_are_refused():
    tokens = [jnp.zeros(shape) for shape in ((4, K, H), (4, K, H), (4, K, G, V), (4, K, G), (4, K, G + 1))]
    state, row_R = jnp.zeros((3, K, G, H, V)), jnp.zeros(4, jnp.int32)
    with pytest.raises(ValueError, match="beta is .* expected"):
        gated_delta(*tokens, state, row_R, row_R == 0, None)
    tokens[-1] = tokens[-2]
    with pytest.raises(ValueError, match="no implementation 'cuda'"):
        gated_delta(*tokens, state, row_R, row_R == 0, None, implementation="cuda")

"""Rows of one chunk each, against attention that compares positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.runner.chunks import Rows, in_chunks
from pallas_kernels.paged_attention import paged_attention, paged_decode

PAGE, CHUNK, HEADS, WIDTH = 2, 6, 2, 4


def dense(q_TKGH, k_SKH, v_SKH, first):
    """Attention outputs of tokens at positions from `first` on."""
    out = np.zeros(q_TKGH.shape)
    for i, q_KGH in enumerate(np.asarray(q_TKGH)):
        keys = slice((first + i) // CHUNK * CHUNK, first + i + 1)
        scores = np.einsum("kgh,skh->kgs", q_KGH, k_SKH[keys])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[i] = np.einsum("kgs,skh->kgh", weights / weights.sum(-1, keepdims=True), v_SKH[keys])
    return out


@pytest.mark.parametrize(
    ("rows", "num_queries"),
    [
        pytest.param([(0, 5), (0, 0), (4, 9), (12, 1), (3, 3), (6, 13)], None, marks=pytest.mark.slow),
        ([(0, 1), (5, 1), (6, 1), (17, 1)], 1),
        ([(0, 3), (4, 3), (5, 3), (9, 3)], 3),
    ],
)
def test_each_token_sees_its_chunk(rows, num_queries):
    """rows: how many tokens of each were computed before, and how many are in the step."""
    rng, num_tokens = np.random.default_rng(0), sum(count for _, count in rows) + (2 if num_queries is None else 0)
    longest = max(first + count for first, count in rows)
    num_pages = -(-longest // PAGE)
    table_RB = rng.permutation(len(rows) * num_pages).reshape(len(rows), num_pages).astype(np.int32)
    k_pages, v_pages = jnp.asarray(rng.normal(size=(2, len(rows) * num_pages, HEADS, PAGE, WIDTH)), jnp.float32)
    q_TKGH = jnp.asarray(rng.normal(size=(num_tokens, HEADS, 1, WIDTH)), jnp.float32)
    starts = np.cumsum([0, *(count for _, count in rows)]).astype(np.int32)
    lengths = np.array([first + count if count else 0 for first, count in rows], np.int32)

    @jax.jit
    def attend(*rows):
        given = Rows(*rows, num_queries)
        table, start, length, width = in_chunks(given, num_tokens, chunk=CHUNK, page_size=PAGE)
        assert table.shape[1] <= CHUNK // PAGE
        if width is None:
            return paged_attention(q_TKGH, k_pages, v_pages, table, start, length, scale=1.0, implementation="xla")
        return paged_decode(q_TKGH, k_pages, v_pages, table, length, num_queries=width, scale=1.0, implementation="xla")

    out = attend(table_RB, starts, lengths)
    for pages, (first, count), begin in zip(table_RB, rows, starts, strict=False):
        keys, values = (np.asarray(x)[pages].swapaxes(1, 2).reshape(-1, HEADS, WIDTH) for x in (k_pages, v_pages))
        expected = dense(q_TKGH[begin : begin + count], keys, values, first)
        np.testing.assert_allclose(out[begin : begin + count], expected, atol=1e-5)

"""Attention to the later tokens of spans, alone and combined with causal attention, against attention in NumPy and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.parts import NO_KEYS, combine
from pallas_kernels.span_attention import Later, span_attention, xla
from tests.helpers.slow import slow_except

NUM_KV_HEADS, NUM_GROUPS, HEAD_DIM = 2, 3, 16
run = jax.jit(span_attention, static_argnames=("scale", "soft_cap"))


def arrays(num_tokens, dtype="float32"):
    """Queries, keys and values."""
    rng = np.random.default_rng(num_tokens)
    heads = (num_tokens, NUM_KV_HEADS)
    shapes = ((*heads, NUM_GROUPS, HEAD_DIM), (*heads, HEAD_DIM), (*heads, HEAD_DIM))
    return tuple(rng.normal(0, 1, shape).astype(jnp.dtype(dtype)) for shape in shapes)


def later(num_tokens, *spans, most=40):
    """Spans as (first, end)."""
    num_T = np.zeros(num_tokens, np.int32)
    for first, end in spans:
        num_T[first:end] = np.arange(end - first)[::-1]
    assert num_T.max() <= most
    return Later(jnp.asarray(num_T), most)


def attend(q, k, v, visible_TS, scale, soft_cap=None):
    """Outputs, and the logarithm of each softmax's sum; tokens that see nothing get zeros."""
    scores = scale * np.einsum("tkgh,skh->tkgs", q.astype(np.float64), k.astype(np.float64))
    scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
    weights = np.where(visible_TS[:, None, None], np.exp(scores), 0)
    total = weights.sum(-1)
    with np.errstate(divide="ignore"):
        lse = np.maximum(np.log(total), NO_KEYS)
    return np.einsum("tkgs,skh->tkgh", weights / np.maximum(total, 1e-300)[..., None], v.astype(np.float64)), lse


def distances(num_tokens):
    """[T, S]: how far a key is behind the token."""
    return np.arange(num_tokens) - np.arange(num_tokens)[:, None]


CASES = {
    "no span": (9, []),
    "one token": (9, [(4, 5)]),
    "neighbours": (30, [(0, 7), (7, 12), (20, 30)]),
    "over tiles": (300, [(0, 41), (110, 151), (151, 170), (230, 271), (290, 300)]),
}


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("name", slow_except(["neighbours", "over tiles"], CASES))
@pytest.mark.slow
def test_tokens_see_the_later_ones_of_their_span(name, soft_cap):
    num_tokens, spans = CASES[name]
    q, k, v = arrays(num_tokens)
    given = later(num_tokens, *spans)
    out, lse = run(q, k, v, given, scale=0.3, soft_cap=soft_cap)
    behind = distances(num_tokens)
    visible = (behind > 0) & (behind <= np.asarray(given.num_T)[:, None])
    expected, expected_lse = attend(q, k, v, visible, 0.3, soft_cap)
    assert visible.any() == bool([first for first, end in spans if end - first > 1])
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=2e-6)


def test_with_causal_attention_it_is_attention_in_both_directions():
    num_tokens, window = 60, 12
    q, k, v = arrays(num_tokens)
    given = later(num_tokens, (3, 25), (30, 37), (37, 60))
    behind = distances(num_tokens)
    causal = attend(q, k, v, (behind <= 0) & (behind > -window), 0.3)
    parts = zip(causal, run(q, k, v, given, scale=0.3), strict=True)
    found = combine(*(jnp.stack([jnp.asarray(each, jnp.float32) for each in both]) for both in parts))
    expected, _ = attend(q, k, v, (behind > -window) & (behind <= np.asarray(given.num_T)[:, None]), 0.3)
    np.testing.assert_allclose(found, expected, atol=3e-6)


@pytest.mark.slow
def test_few_tiles_at_a_time_give_the_same(monkeypatch):
    num_tokens = 700
    q, k, v = arrays(num_tokens)
    given = later(num_tokens, (100, 140), (500, 541))
    whole = span_attention(q, k, v, given, scale=0.3)
    monkeypatch.setattr(xla, "SCORE_BYTES", 4 * NUM_KV_HEADS * NUM_GROUPS * 128 * 176 * 2)  # two tiles
    for found, expected in zip(span_attention(q, k, v, given, scale=0.3), whole, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_bfloat16():
    q, k, v = arrays(50, "bfloat16")
    given = later(50, (5, 30))
    out, lse = run(q, k, v, given, scale=0.3)
    behind = distances(50)
    expected, _ = attend(q, k, v, (behind > 0) & (behind <= np.asarray(given.num_T)[:, None]), 0.3)
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(out.astype(np.float32), expected, atol=2e-2)


def test_what_is_not_finite_stays_in_its_request():
    q, k, v = arrays(40)
    k[10], v[12], q[14] = np.nan, np.inf, np.nan
    out, lse = run(q, k, v, later(40, (8, 16), (20, 40)), scale=0.3)
    others = [*range(8), *range(16, 40)]
    assert np.isfinite(out[np.array(others)]).all() and np.isfinite(lse[np.array(others)]).all()
    assert np.isnan(out[8]).all() and np.isnan(out[14]).all() and np.isfinite(out[11]).all()

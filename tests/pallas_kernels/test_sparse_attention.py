"""The tokens with the highest scores, and latent attention to them, against NumPy in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sparse_attention import attend_to_slots, attention, choose_tokens, write_keys

PAGE_SIZE, NUM_PAGES, HEADS, WIDTH, TOP_K = 4, 16, 3, 8, 5
ROWS = {
    "ragged": ([30, 7, 50, 20, 1, 0], [20, 7, 33, 1, 1, 0], None),
    "all are chosen": ([3, 4, 5], [3, 4, 1], None),
    "decode": ([60, 4, 0, 17], [1, 1, 1, 1], 1),
    "drafts": ([60, 3, 9], [3, 3, 3], 3),
}
"""Keys and queries of each row, and what a decode has of each."""

choose = jax.jit(partial(choose_tokens, top_k=TOP_K, chunk=2 * PAGE_SIZE), static_argnames="num_queries")


def case(name, *, whole, padding):
    """Queries, weights, pages of keys, page table, starts and lengths. whole: of small whole numbers, so that many scores are equal."""
    lengths, counts, num_queries = ROWS[name]
    rng = np.random.default_rng(len(name))
    num_tokens = sum(counts) + (0 if num_queries else padding)
    shapes = (num_tokens, HEADS, WIDTH), (num_tokens, HEADS), (len(lengths) * NUM_PAGES, 1, PAGE_SIZE, WIDTH)
    q, weight, pages = (np.round(x) if whole else x for x in (rng.normal(0, 0.7, shape).astype(np.float32) for shape in shapes))
    table = rng.permutation(len(pages)).reshape(len(lengths), NUM_PAGES).astype(np.int32)
    written = np.zeros((len(pages), PAGE_SIZE), bool)
    for row, length in enumerate(lengths):
        at = np.arange(length)
        written[table[row, at // PAGE_SIZE], at % PAGE_SIZE] = True
    pages = np.where(written[:, None, :, None], pages, np.nan)
    starts = np.cumsum([0, *counts], dtype=np.int32)
    return q, weight, pages, table, starts, np.array(lengths, np.int32)


def best(q, weight, pages, table, starts, lengths):
    """Slots of each query in ascending order, -1 where there are fewer."""
    found = np.full((len(q), TOP_K), -1)
    for row, length in enumerate(lengths):
        count = starts[row + 1] - starts[row]
        for token in range(starts[row], starts[row + 1]):
            at = np.arange(max(0, length - (starts[row + 1] - token) + 1 if count else 0))
            keys = np.float64(pages[table[row, at // PAGE_SIZE], 0, at % PAGE_SIZE])
            scores = np.float64(weight[token]) @ np.maximum(np.float64(q[token]) @ keys.T, 0)
            chosen = np.argsort(-scores, kind="stable")[:TOP_K]
            found[token, : len(chosen)] = table[row, at // PAGE_SIZE][chosen] * PAGE_SIZE + at[chosen] % PAGE_SIZE
    return np.sort(found, axis=1)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_the_best_are_chosen_and_of_equal_ones_the_first(name, whole):
    given = case(name, whole=whole, padding=3)
    found = choose(*given, num_queries=ROWS[name][2])
    np.testing.assert_array_equal(np.sort(found, axis=1), best(*given))


def test_keys_are_read_as_they_were_written_as_bits_of_a_narrow_type():
    q, weight, pages, *rows = case("ragged", whole=True, padding=0)
    keys = np.nan_to_num(pages).reshape(-1, WIDTH)
    slots = np.random.default_rng(0).permutation(len(keys)).astype(np.int32)
    slots[:4] = -1
    expected = np.zeros_like(keys)
    expected[slots[4:]] = keys[4:]
    bits = write_keys(jnp.zeros(pages.shape, jnp.uint16), jnp.asarray(keys), jnp.asarray(slots))
    found = choose(jnp.asarray(q, jnp.bfloat16), weight, bits, *rows)
    np.testing.assert_array_equal(np.sort(found, axis=1), best(q, weight, expected.reshape(pages.shape), *rows))


@pytest.mark.parametrize("block_bytes", [attention.BLOCK_BYTES, 3000])
@pytest.mark.slow
def test_attention_sees_the_chosen_slots_alone(block_bytes, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK_BYTES", block_bytes)
    rng = np.random.default_rng(0)
    q, pages = rng.normal(0, 1, (7, HEADS, 12)).astype(np.float32), rng.normal(0, 1, (9, 1, 4, 12)).astype(np.float32)
    slots = np.array([rng.permutation(30)[:TOP_K] for _ in q])
    slots[1, 2:], slots[4] = -1, -1
    pages.reshape(-1, 12)[[0, *range(30, 36)]] = np.nan  # a slot that only the padding reads, and such as none does
    slots[slots == 0] = 29
    found = attend_to_slots(jnp.asarray(q), jnp.asarray(pages), jnp.asarray(slots, jnp.int32), latent_dim=8, scale=0.3)
    for token, own in enumerate(slots):
        vectors = np.float64(pages.reshape(-1, 12)[own[own >= 0]])
        weights = np.exp(0.3 * np.float64(q[token]) @ vectors.T)
        expected = weights @ vectors[:, :8] / np.maximum(weights.sum(-1, keepdims=True), 1e-300)
        np.testing.assert_allclose(found[token], expected, atol=2e-6)

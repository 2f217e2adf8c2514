"""The sampling kernels, interpreted, against plain JAX (same tokens from same seeds) and the float64 NumPy oracle (kept sets)."""

from dataclasses import replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.sampling.columns import pack_columns, unpack_columns
from jaxllm.sampling.logprobs import top_logprobs
from jaxllm.sampling.mask import num_words
from jaxllm.sampling.sampler import sample_full, sample_greedy, sample_random
from jaxllm.sampling.state import SamplingState, admit, pack_admission
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler_output import NO_TOKEN
from pallas_kernels import sampling
from pallas_kernels.sampling import triton_draw, triton_top
from pallas_kernels.sampling.triton_scan import ScanTiles, group_size, num_groups
from tests.helpers import sampling_oracle as oracle

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

KERNELS = {"implementation": "triton", "interpret": True}
LISTED = {"listed": None, "walked": 2}
"""Rows are drawn from a list of groups, or walked where more than so many groups may matter."""


def logits_of(kind, shape, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=shape) * {"flat": 0.3, "peaked": 6.0}.get(kind, 3.0)
    if kind == "ties":
        logits = np.round(logits)  # with -0, which is equal to 0
    if kind == "equal":
        logits = np.ones(shape)
    if kind == "masked":
        logits = np.where(rng.random(shape) < 0.9, -np.inf, logits)
    return logits.astype(np.float32)


KINDS = ("flat", "peaked", "normal", "ties", "equal", "masked")


def params_of(vocab_size, seed):
    """Rows of all sorts side by side: greedy, unfiltered, every filter alone and all together."""
    rng = np.random.default_rng(seed)
    kinds = [
        {"temperature": 0.0},
        {},
        {"top_k": 1},
        {"top_k": int(rng.integers(2, 60))},
        {"top_k": vocab_size},
        {"top_p": float(rng.uniform(0.05, 0.99))},
        {"top_p": 1e-9},
        {"min_p": float(rng.uniform(0, 0.5))},
        {"top_k": int(rng.integers(2, vocab_size)), "top_p": 0.9, "min_p": 0.01},
    ]
    temperatures = rng.choice([0.5, 1.0, 2.0], len(kinds))
    return [
        SamplingParams(**{"temperature": float(temperature), "seed": int(rng.integers(-(2**63), 2**63)), **kind})
        for temperature, kind in zip(temperatures, kinds, strict=True)
    ]


def packed(all_params):
    return np.stack([pack_columns(params) for params in all_params])


@lru_cache
def draw_with(vocab_size, num_rows, max_groups):
    """The kernels with small tiles, so that rows have several splits and several tiles in each."""
    tiles = triton_draw.pick_tiles(num_rows, vocab_size)
    tiles = replace(tiles, scan=ScanTiles(block=128, num_splits=3), walk_block=256, max_groups=max_groups or tiles.max_groups)

    def draw(logits_RV, columns_RC, position_R):
        original = triton_draw.pick_tiles
        triton_draw.pick_tiles = lambda *_: tiles
        try:
            return sample_random(logits_RV, unpack_columns(columns_RC), position_R, **KERNELS)
        finally:
            triton_draw.pick_tiles = original

    return jax.jit(draw)


plain_draw = jax.jit(lambda logits, columns, position: sample_random(logits, unpack_columns(columns), position))


@pytest.mark.slow
@pytest.mark.parametrize("max_groups", LISTED.values(), ids=LISTED)
@pytest.mark.parametrize("kind", KINDS)
def test_seeded_draws_are_those_of_plain_jax(kind, max_groups):
    vocab_size = 1000
    for seed in range(4):
        all_params = params_of(vocab_size, seed)
        num_rows = len(all_params)
        logits, position = logits_of(kind, (num_rows, vocab_size), seed), np.arange(num_rows, dtype=np.int32) * 7 + seed
        columns = packed(all_params)
        found = np.asarray(draw_with(vocab_size, num_rows, max_groups)(logits, columns, position))
        np.testing.assert_array_equal(found, plain_draw(logits, columns, position))
        for r, params in enumerate(all_params):
            assert oracle.kept(logits[r], params, 1e-4)[found[r]] and logits[r, found[r]] > -np.inf


@pytest.mark.slow
@pytest.mark.parametrize("max_groups", LISTED.values(), ids=LISTED)
def test_rows_with_nothing_to_draw_give_a_token_of_the_vocabulary(max_groups):
    all_params = params_of(1000, 0)
    columns, position = packed(all_params), np.zeros(len(all_params), np.int32)
    draw = draw_with(1000, len(all_params), max_groups)
    np.testing.assert_array_equal(draw(np.full((len(all_params), 1000), -np.inf, np.float32), columns, position), 0)
    logits = logits_of("normal", (len(all_params), 1000))
    logits[:, 17] = np.nan
    found = np.asarray(draw(logits, columns, position))
    assert np.all((found >= 0) & (found < 1000))


@pytest.mark.slow
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 50257), (2, 37)])
def test_default_tiles_draw_the_same_too(num_rows, vocab_size):
    params = [SamplingParams(seed=r, top_k=20 * (r % 2 == 0), top_p=0.9 if r % 3 else 1.0) for r in range(num_rows)]
    logits, position = logits_of("normal", (num_rows, vocab_size)), np.arange(num_rows, dtype=np.int32)
    found = jax.jit(lambda *args: sample_random(args[0], unpack_columns(args[1]), args[2], **KERNELS))(
        logits, packed(params), position
    )
    np.testing.assert_array_equal(found, plain_draw(logits, packed(params), position))


@pytest.mark.slow
def test_kernel_draws_follow_the_distribution():
    params = SamplingParams(seed=77, temperature=1.2, top_k=20, top_p=0.9, min_p=0.01)
    logits, num_draws = logits_of("normal", (1, 64))[0] / 2, 8192
    token = jax.jit(lambda *args: sample_random(args[0], unpack_columns(args[1]), args[2], **KERNELS))(
        np.tile(logits, (num_draws, 1)), np.tile(pack_columns(params), (num_draws, 1)), np.arange(num_draws, dtype=np.int32)
    )
    frequency = np.bincount(token, minlength=64) / num_draws
    expected = oracle.probabilities(logits, params, oracle.kept(logits, params))
    assert set(np.flatnonzero(frequency)) <= set(np.flatnonzero(expected))
    assert abs(frequency - expected).sum() / 2 < 0.03


@lru_cache
def full_with(**options):
    return jax.jit(
        lambda logits, columns, position, state, row, mask: sample_full(
            logits, unpack_columns(columns), position, state, row, mask_RW=mask, **options
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ties", "masked"])
@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.25},
        {"repetition_penalty": 0.5, "logit_bias": {7: 2.0}, "top_n_sigma": 2.0},
    ],
    ids=["penalties", "more"],
)
def test_full_sampling_draws_and_reports_the_same(asked, kind):
    """Rows of the state in another order than the batch; every third request asks for nothing, and its row holds another's tokens."""
    vocab_size, rng = 300, np.random.default_rng(5)
    all_params = [replace(params, **asked) if r % 3 else params for r, params in enumerate(params_of(vocab_size, 5))]
    num_rows = len(all_params)
    row_R, state = rng.permutation(num_rows).astype(np.int32), SamplingState.zeros(num_rows + 1, vocab_size)
    for row, params in zip(row_R, all_params, strict=True):
        tokens = rng.integers(0, vocab_size, 90).tolist()
        state = admit(state, jnp.int32(row), pack_admission(params, tokens, 30, (1,), vocab_size=vocab_size))
    mask = rng.integers(-(2**31), 2**31, (num_rows, num_words(vocab_size)), np.int64).astype(np.int32)
    mask[::2], mask[4, 1] = -1, ~(1 << 8)
    logits = logits_of(kind, (num_rows, vocab_size))
    logits[3] = -np.inf
    logits[4] = np.where(np.arange(vocab_size) == 40, 1.0, -np.inf)  # the only token that the mask forbids
    arguments = (logits, packed(all_params), np.full(num_rows, 90, np.int32), state, row_R, mask)
    found, expected = full_with(**KERNELS)(*arguments), full_with()(*arguments)
    np.testing.assert_array_equal(found[0], expected[0])
    assert np.all(np.asarray(found[0])[[3, 4]] == NO_TOKEN) and np.sum(np.asarray(found[0]) == NO_TOKEN) == 2
    jax.tree.map(np.testing.assert_array_equal, found[1], expected[1])
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-6)


@pytest.mark.parametrize(("num_rows", "vocab_size", "num_splits"), [(1, 50257, 4), (8, 1000, 3), (9, 37, 1)])
def test_argmax_takes_the_lowest_of_the_largest(num_rows, vocab_size, num_splits):
    argmax = jax.jit(partial(triton_draw.argmax, interpret=True, tiles=ScanTiles(block=512, num_splits=num_splits)))
    for kind in KINDS:
        logits = logits_of(kind, (num_rows, vocab_size))
        np.testing.assert_array_equal(argmax(logits), logits.argmax(axis=1))
    np.testing.assert_array_equal(argmax(np.full((num_rows, vocab_size), -np.inf, np.float32)), 0)
    logits[:, [11, 30]] = np.nan
    np.testing.assert_array_equal(argmax(logits), 11)


def test_greedy_sampling_runs_the_kernel():
    logits = logits_of("ties", (8, 300))
    np.testing.assert_array_equal(jax.jit(partial(sample_greedy, **KERNELS))(logits), logits.argmax(axis=1))


@pytest.mark.slow
@pytest.mark.parametrize(("vocab_size", "k"), [(1000, 1), (37, 37), (50257, 5)])
def test_top_logprobs_are_those_of_plain_jax(vocab_size, k):
    plain, kernel = jax.jit(partial(top_logprobs, k=k)), jax.jit(partial(top_logprobs, k=k, **KERNELS))
    for seed, kind in enumerate(KINDS):
        logits = logits_of(kind, (3, vocab_size), seed)
        token = np.random.default_rng(seed).integers(0, vocab_size, 3).astype(np.int32)
        found, expected = kernel(logits, token), plain(logits, token)
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_allclose(found[1], expected[1], atol=1e-5)
        np.testing.assert_array_equal(found[2], expected[2])


def test_top_values_of_several_splits_match_sorting():
    logits, own = logits_of("ties", (4, 5000)), np.float32([-1, 0, 3, -np.inf])
    tiles = triton_top.TopTiles(ScanTiles(block=256, num_splits=3))
    top = jax.jit(partial(triton_top.top_values, k=64, interpret=True, tiles=tiles))(logits, own)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :64]
    np.testing.assert_array_equal(top.ids_RK, order)
    np.testing.assert_array_equal(top.values_RK, np.take_along_axis(logits, order, axis=1))
    np.testing.assert_array_equal(top.rank_R, (logits >= own[:, None]).sum(axis=1))
    np.testing.assert_allclose(top.logsumexp_R, np.log(np.exp(logits.astype(np.float64)).sum(axis=1)), rtol=1e-6)


def test_a_kernel_names_what_it_does_not_take():
    logits = jnp.zeros((2, 100), jnp.bfloat16)
    with pytest.raises(ValueError, match="float32 logits, not bfloat16"):
        sampling.argmax(logits, **KERNELS)
    with pytest.raises(ValueError, match="use lax.top_k"):
        sampling.top_values(logits.astype(jnp.float32), jnp.zeros(2), 65, **KERNELS)
    with pytest.raises(ValueError, match="no sampling kernels"):
        sampling.argmax(logits, implementation="mosaic")
    assert not sampling.supports("triton", vocab_size=1 << 20)


def test_groups_of_any_vocabulary_fit_in_registers():
    for vocab_size in (1, 37, 128256, 151936, 262144, 1 << 19):
        assert num_groups(vocab_size) <= 1 << 14 and group_size(vocab_size) >= 16

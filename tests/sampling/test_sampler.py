"""The three sampling programs against the float64 oracle, and what their draws may depend on."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.sampling.columns import NUM_COLUMNS, pack_columns, unpack_columns
from jaxllm.sampling.sampler import sample_full, sample_greedy, sample_random
from jaxllm.sampling.state import SamplingState, admit, pack_admission
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler_output import NO_TOKEN
from tests.helpers import sampling_oracle as oracle

R, V, ROWS = 6, 64, 9
EOS = (3, 4)

greedy = jax.jit(sample_greedy)
random = jax.jit(lambda logits, columns, position: sample_random(logits, unpack_columns(columns), position))
full = jax.jit(lambda logits, columns, *rest: sample_full(logits, unpack_columns(columns), *rest))
admit_jit = jax.jit(admit, donate_argnums=0)


def columns_of(all_params):
    return np.stack([pack_columns(params) for params in all_params])


def empty_state():
    return SamplingState.zeros(ROWS, V)


def admitted(state, row, params, token_ids, num_prompt_tokens):
    packed = pack_admission(params, token_ids, num_prompt_tokens, EOS, vocab_size=V)
    return admit_jit(state, jnp.int32(row), packed)


def grid_logits(rng, shape=(R, V)):
    """Many ties, some -inf, all exact in float32."""
    logits = rng.integers(-24, 25, shape).astype(np.float32) / 4
    return np.where(rng.random(shape) < rng.choice([0, 0.1, 0.9]), -np.inf, logits).astype(np.float32)


def random_filters(rng):
    return {
        "temperature": rng.choice([0, 0.5, 0.7, 1.0, 2.0]),
        "top_k": int(rng.choice([0, 0, 1, 2, 5, V - 1, V, V + 5])),
        "top_p": float(rng.choice([1, 1, rng.uniform(0.01, 1)])),
        "min_p": float(rng.choice([0, 0, rng.uniform(0, 1), 1])),
        "seed": int(rng.integers(-(2**63), 2**63)),
    }


def random_params(rng):
    def ids(high):
        return rng.integers(0, V, rng.integers(1, high)).tolist()

    def sometimes(value):
        return value if rng.random() < 0.4 else None

    # Irrational penalties cannot make ties that rounding would decide.
    return SamplingParams.from_optional(
        **random_filters(rng),
        repetition_penalty=float(rng.choice([1, 1, 0.5, math.sqrt(2)])),
        frequency_penalty=float(rng.choice([0, 0, 0.25, -math.pi / 10])),
        presence_penalty=float(rng.choice([0, 0, 0.5, math.pi / 10])),
        min_tokens=int(rng.choice([0, 0, 2, 9])),
        top_n_sigma=float(rng.choice([0, 0, 0, math.sqrt(2) / 2, math.sqrt(3), 1e30])),
        stop_token_ids=sometimes(ids(4)),
        ignore_eos=bool(rng.random() < 0.3),
        logit_bias=sometimes({token: float(rng.choice([-100, 100, 0.5, -0.25])) for token in ids(6)}),
        allowed_token_ids=sometimes(ids(30)),
        bad_words_token_ids=sometimes([rng.integers(0, 4, rng.integers(1, 4)).tolist() for _ in range(8)]),
    )


def assert_kept(processed, wanted, params):
    """The kept set equals the oracle's except where min_p or top_p fall on a rounding error; kept values agree."""
    found = processed > -np.inf
    assert np.all(oracle.kept(wanted, params, -1e-4) & (wanted > -np.inf) <= found)
    assert np.all(found <= oracle.kept(wanted, params, 1e-4))
    scaled = wanted / (params.temperature or 1)
    np.testing.assert_allclose(processed[found], scaled[found], rtol=1e-5, atol=1e-5)


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32 - 1))
def test_all_stages_together_match_the_oracle(seed):
    rng = np.random.default_rng(seed)
    logits, state = grid_logits(rng), empty_state()
    all_params = [random_params(rng) for _ in range(R)]
    rows = rng.permutation(ROWS - 1)[:R].astype(np.int32)
    contexts = []
    for row, params in zip(rows, all_params, strict=True):
        tokens = rng.integers(0, 6, rng.integers(1, 25)).tolist()  # few different ones, so that bad words complete
        contexts.append((tokens, int(rng.integers(1, len(tokens) + 1))))
        state = admitted(state, row, params, *contexts[-1])
    position = np.array([len(tokens) for tokens, _ in contexts], np.int32)

    token, _, processed = full(logits, columns_of(all_params), position, state, rows)
    token, processed = np.asarray(token), np.asarray(processed)

    for r, (params, (tokens, num_prompt)) in enumerate(zip(all_params, contexts, strict=True)):
        wanted = oracle.processed_logits(logits[r], params, tokens, num_prompt, EOS)
        if not np.any(wanted > -np.inf):
            continue  # nothing may be drawn: any token will do
        assert_kept(processed[r], wanted, params)
        assert processed[r, token[r]] > -np.inf
        if params.is_greedy:
            assert token[r] == np.argmax(wanted)


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_draws_only_what_the_oracle_keeps(seed):
    rng = np.random.default_rng(seed)
    logits, all_params = grid_logits(rng), [SamplingParams(**random_filters(rng)) for _ in range(R)]
    token = np.asarray(random(logits, columns_of(all_params), rng.integers(0, 1000, R).astype(np.int32)))
    for r, params in enumerate(all_params):
        if np.any(logits[r] > -np.inf):
            assert oracle.kept(logits[r], params, 1e-4)[token[r]] and logits[r, token[r]] > -np.inf
        if params.is_greedy:
            assert token[r] == np.argmax(logits[r])


@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 2.0, "top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.05, "temperature": 1.5},
        {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    ],
    ids=str,
)
def test_the_draws_follow_the_distribution(filters):
    logits, num_draws = np.random.default_rng(3).normal(size=32).astype(np.float32) * 2, 16384
    params = SamplingParams(**filters, seed=77)
    token = random(
        np.tile(logits, (num_draws, 1)), np.tile(pack_columns(params), (num_draws, 1)), np.arange(num_draws, dtype=np.int32)
    )
    frequency = np.bincount(token, minlength=32) / num_draws
    expected = oracle.probabilities(logits, params, oracle.kept(logits, params))
    assert set(np.flatnonzero(frequency)) <= set(np.flatnonzero(expected))
    assert abs(frequency - expected).sum() / 2 < 0.02  # total variation; its mean is about 0.01 here


def test_different_seeds_follow_the_distribution_too():
    logits, num_draws = np.random.default_rng(4).normal(size=32).astype(np.float32), 16384
    columns = columns_of([SamplingParams(seed=seed) for seed in range(256)])
    token = random(np.tile(logits, (num_draws, 1)), np.tile(columns, (64, 1)), np.arange(num_draws, dtype=np.int32) // 256)
    frequency = np.bincount(token, minlength=32) / num_draws
    assert abs(frequency - oracle.probabilities(logits, SamplingParams())).sum() / 2 < 0.025


def test_draws_depend_on_seed_and_position_only():
    rng = np.random.default_rng(5)
    logits, position = rng.normal(size=(8, V)).astype(np.float32), rng.integers(0, 99, 8).astype(np.int32)
    columns = columns_of([SamplingParams(seed=int(seed), top_p=0.95) for seed in rng.integers(0, 2**62, 8)])
    token = np.asarray(random(logits, columns, position))

    order = rng.permutation(8)
    np.testing.assert_array_equal(random(logits[order], columns[order], position[order]), token[order])
    np.testing.assert_array_equal(random(logits[:3], columns[:3], position[:3]), token[:3])
    padded = np.pad(logits, ((0, 2), (0, 16)), constant_values=-np.inf)
    padded_columns, padded_position = np.pad(columns, ((0, 2), (0, 0))), np.pad(position, (0, 2))
    np.testing.assert_array_equal(random(padded, padded_columns, padded_position)[:8], token)
    assert len({tuple(np.asarray(random(logits, columns, position + i))) for i in range(4)}) == 4


def test_full_without_state_is_random_whatever_the_state_holds():
    rng = np.random.default_rng(6)
    logits, position = grid_logits(rng), np.arange(R, dtype=np.int32)
    all_params = [SamplingParams(**random_filters(rng)) for _ in range(R)]
    state = empty_state()
    stale = SamplingParams(allowed_token_ids=[1], bad_words_token_ids=[[2]], min_tokens=5)
    for row in range(ROWS):
        state = admitted(state, row, stale, [1, 2, 3], 1)
    before = jax.tree.map(np.asarray, state)
    token, after, _ = full(logits, columns_of(all_params), position, state, np.arange(R, dtype=np.int32))
    np.testing.assert_array_equal(token, random(logits, columns_of(all_params), position))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_padding_rows_of_zeros_are_greedy_and_touch_no_state():
    logits = np.random.default_rng(7).normal(size=(R, V)).astype(np.float32)
    zeros, state = np.zeros((R, NUM_COLUMNS), np.int32), empty_state()
    trash = np.full(R, ROWS - 1, np.int32)
    token, after, processed = full(logits, zeros, np.zeros(R, np.int32), state, trash)
    np.testing.assert_array_equal(token, logits.argmax(axis=1))
    np.testing.assert_array_equal(processed, logits)
    jax.tree.map(np.testing.assert_array_equal, state, after)


def test_greedy_takes_the_lowest_of_equals_and_nan_counts_as_the_highest():
    logits = np.zeros((R, V), np.float32)
    logits[1, [7, 9]] = 1
    logits[2] = -np.inf
    logits[3, 5:] = -np.inf
    logits[4, 6:] = np.nan
    assert np.asarray(greedy(logits))[:5].tolist() == [0, 7, 0, 0, 6]
    many = np.zeros((2, 20_000), np.float32)
    many[0, 2], many[0, 5] = 1, np.nan
    assert np.asarray(greedy(many)).tolist() == [5, 0]


def run_alone(params, token_ids, logits_SV, *, num_prompt_tokens=None, row=2):
    """Tokens of one request over the steps' logits, next to an unrelated request."""
    width, tokens = logits_SV.shape[1], list(token_ids)
    packed = pack_admission(params, tokens, num_prompt_tokens or len(tokens), EOS, vocab_size=width)
    state = admit_jit(SamplingState.zeros(ROWS, width), jnp.int32(row), packed)
    columns, rows = np.stack([pack_columns(params), pack_columns(SamplingParams(seed=1))]), np.array([row, 5])
    for logits in logits_SV:
        token, state, _ = full(np.stack([logits, logits / 2]), columns, np.array([len(tokens), 3]), state, rows)
        tokens.append(int(token[0]))
    return tokens, state


def test_the_state_after_steps_equals_a_fresh_admission():
    rng = np.random.default_rng(8)
    params = SamplingParams(
        seed=3, repetition_penalty=1.2, frequency_penalty=0.5, min_tokens=4, bad_words_token_ids=[[1, 2]], stop_token_ids=[9]
    )
    tokens, state = run_alone(params, [1, 2, 1], rng.normal(size=(24, V)).astype(np.float32))
    fresh = admitted(empty_state(), 2, params, tokens, 3)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda a: a[2], state), jax.tree.map(lambda a: a[2], fresh))


def test_a_preempted_request_draws_the_same_tokens():
    logits = np.random.default_rng(9).normal(size=(20, V)).astype(np.float32)
    params = SamplingParams(seed=3, frequency_penalty=1.0, top_p=0.9, min_tokens=2)
    whole, _ = run_alone(params, [1, 2, 1], logits)
    resumed, _ = run_alone(params, whole[:11], logits[8:], num_prompt_tokens=3, row=7)
    assert resumed == whole


def test_a_bad_word_is_avoided_at_its_last_token_only():
    wanted = np.full((8, V), -5.0, np.float32)
    for step, token in enumerate([10, 11, 12, 10, 11, 12, 11, 12]):
        wanted[step, token] = 5
        wanted[step, token + 20] = 4  # second choice
    params = SamplingParams(temperature=0, bad_words_token_ids=[[10, 11, 12], [20, 21], [30]])
    tokens, _ = run_alone(params, [10, 11], wanted)
    # At the second step 10, 11 and the prompt's tokens do not count: bad words are about the output.
    assert tokens[2:] == [10, 11, 32, 10, 11, 32, 11, 12]


def test_bias_of_100_forces_and_of_minus_100_bans():
    logits = np.random.default_rng(10).normal(size=(4, V)).astype(np.float32) * 3
    forced, _ = run_alone(SamplingParams(seed=1, logit_bias={7: 100}), [1], logits)
    assert forced[1:] == [7] * 4
    best = logits.argmax(axis=1)
    banned, _ = run_alone(SamplingParams(temperature=0, logit_bias={int(token): -100 for token in best}), [1], logits)
    assert not set(banned[1:]) & set(best.tolist())


def test_top_n_sigma_looks_at_the_tokens_that_may_be_drawn():
    logits = np.full((R, V), -np.inf, np.float32)
    logits[:5, 10:14] = [4, 3, 1, 0]  # σ is √2.5: more than 1 and less than 2 below the highest
    logits[4, 11] = np.nan
    all_params = [SamplingParams(seed=1, top_n_sigma=n) for n in (1, 2, 0.5, 0, 1, 1)]
    token, _, processed = full(logits, columns_of(all_params), np.zeros(R, np.int32), empty_state(), np.arange(R))
    kept = [np.flatnonzero(row > -np.inf).tolist() for row in np.asarray(processed)]
    assert kept[:4] == [[10, 11], [10, 11, 12], [10], [10, 11, 12, 13]]
    assert token[4] == 11, "a NaN is drawn, so that it is found"
    assert token[5] == NO_TOKEN


def test_min_tokens_mask_eos_and_stop_tokens_until_reached():
    logits = np.zeros((5, V), np.float32)
    logits[:, [3, 9, 20]] = [9, 8, 7]
    tokens, _ = run_alone(SamplingParams(temperature=0, min_tokens=3, stop_token_ids=[9]), [1, 2], logits)
    assert tokens[2:] == [20, 20, 20, 3, 3]
    tokens, _ = run_alone(SamplingParams(temperature=0, min_tokens=3, ignore_eos=True, stop_token_ids=[9]), [1, 2], logits)
    assert tokens[2:] == [3] * 5
    tokens, _ = run_alone(SamplingParams(temperature=0, min_tokens=3, allowed_token_ids=[3]), [1, 2], logits)
    assert tokens[2:] == [3] * 5  # nothing else may be drawn


@pytest.mark.slow
def test_padding_the_vocabulary_changes_no_token():
    logits = np.random.default_rng(11).normal(size=(10, V)).astype(np.float32)
    params = SamplingParams(seed=5, frequency_penalty=1, top_k=10, logit_bias={2: 1.0}, allowed_token_ids=list(range(50)))
    padded = np.pad(logits, ((0, 0), (0, 32)), constant_values=-np.inf)
    assert run_alone(params, [1, 2, 3], logits)[0] == run_alone(params, [1, 2, 3], padded)[0]


def test_tokens_are_int32():
    columns, position = np.zeros((R, NUM_COLUMNS), np.int32), np.zeros(R, np.int32)
    for token in (greedy(np.zeros((R, V), np.float32)), random(np.zeros((R, V), np.float32), columns, position)):
        assert token.dtype == jnp.int32

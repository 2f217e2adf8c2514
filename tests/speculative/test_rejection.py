"""Acceptance of drafts: by the ratio of probabilities the output keeps its distribution, by equality every token."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.acceptance import Acceptance
from jaxllm.engine.core import EngineCore
from jaxllm.request import EngineCoreRequest
from jaxllm.runner.drafter import NO_DRAFT
from jaxllm.runner.features.drafts.rows import DraftRows, accept, forget_drafts
from jaxllm.runner.layout import NUM_ROW_COLUMNS, Column
from jaxllm.sampling.columns import SamplingColumns, pack_columns, unpack_columns
from jaxllm.sampling.noise import Stream
from jaxllm.sampling.rejection import as_kept, sample_verified
from jaxllm.sampling.sampler import sample_random
from jaxllm.sampling.stages import scale, threshold
from jaxllm.sampling_params import SamplingParams
from jaxllm.speculative.control import AdaptiveControl
from tests.helpers import engines, goldens

MIXTURE = "qwen3_moe"
NUM_ROWS, V = 20_000, 7
FIRST = 11
"""Position of the first draft."""
RNG = np.random.default_rng(5)
P_LOGITS, Q_LOGITS = (RNG.standard_normal((4, V, V)).astype(np.float32) * 1.5 for _ in range(2))
"""By place and the token before it."""


def columns_of(num_rows: int = NUM_ROWS, **params) -> SamplingColumns:
    """Columns of rows that differ in their seeds alone."""
    row = unpack_columns(jnp.asarray(pack_columns(SamplingParams(seed=0, **params)))[None])
    columns = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_rows,)), row)
    return replace(columns, seed_low=jnp.arange(num_rows, dtype=jnp.uint32))


def probabilities(logits_XV: np.ndarray, **params) -> np.ndarray:
    """float64[X, V] after temperature and filters."""
    columns = columns_of(len(logits_XV), **params)
    scaled = np.asarray(scale(logits_XV, columns), np.float64)
    scaled[scaled < np.asarray(filtered(logits_XV, columns))[:, None]] = -np.inf
    weight = np.exp(scaled - scaled.max(1, keepdims=True))
    return weight / weight.sum(1, keepdims=True)


def kept(logits: np.ndarray) -> np.ndarray:
    """A drafter's logits as they are kept."""
    return np.asarray(as_kept(jnp.asarray(logits)), np.float32)


def check_counts(token_R: np.ndarray, p_V: np.ndarray) -> None:
    """Tokens are drawn from p: by chi-square, with less than one false alarm in 100 000."""
    counts = np.bincount(token_R, minlength=len(p_V))
    assert not counts[p_V == 0].any()
    expected = counts.sum() * p_V[p_V > 0]
    freedom = len(expected) - 1
    statistic = ((counts[p_V > 0] - expected) ** 2 / expected).sum()
    # Wilson and Hilferty: the cube root is almost normal.
    if freedom:
        spread = 2 / (9 * freedom)
        assert ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5 < 4.3, (counts, expected)


def check_rate(is_accepted_R: np.ndarray, rate: float) -> None:
    """Within 4.4 standard errors."""
    assert abs(is_accepted_R.mean() - rate) <= 4.4 * (rate * (1 - rate) / len(is_accepted_R)) ** 0.5 + 1e-9


filtered, take = jax.jit(threshold), jax.jit(accept)
draw = jax.jit(sample_random, static_argnames="stream")
judge = jax.jit(sample_verified)
"""All tests call these with arrays of the same shapes: most of their time is compilation."""


def step(columns: SamplingColumns, num_drafts: int, drafts_are: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Drafts of each row and what a step makes of them: draft_RK, the tokens that count and a last column as of `accept`, last_R."""
    before_R, drafts, tokens = np.zeros(NUM_ROWS, np.int32), [], []
    for place in range(num_drafts + 1):
        position_R, kept_RV = np.full(NUM_ROWS, FIRST + place), as_kept(jnp.asarray(Q_LOGITS[place][before_R]))
        draft_R = np.full(NUM_ROWS, NO_DRAFT, np.int32)
        if place < num_drafts and drafts_are == "drawn":
            draft_R = np.asarray(draw(kept_RV.astype(jnp.float32), columns, position_R, stream=Stream.DRAFT))
        elif place < num_drafts:
            draft_R = np.asarray(jnp.argmax(kept_RV, axis=1), np.int32)
        q_RV = kept_RV if drafts_are == "drawn" else None
        tokens.append(judge(P_LOGITS[place][before_R], columns, position_R, draft_R, q_RV))
        drafts.append(draft_R)
        before_R = draft_R
    draft_RK, row_R = np.stack(drafts[:-1], axis=1), np.arange(NUM_ROWS)
    columns_RC = np.zeros((NUM_ROWS, NUM_ROW_COLUMNS), np.int32)
    columns_RC[:, [Column.ROW, Column.TOKEN_ROW]] = row_R[:, None]
    columns_RC[:, Column.NUM_DRAFTS], columns_RC[:, Column.NUM_TOKENS] = num_drafts, num_drafts + 1
    rows = DraftRows(
        jnp.zeros(NUM_ROWS, jnp.int32), jnp.asarray(draft_RK), jnp.zeros((NUM_ROWS, num_drafts + 1), jnp.int32), ()
    )
    _, last_R, drawn_RX = take(rows, jnp.asarray(columns_RC), jnp.stack(tokens, axis=1))
    return draft_RK, np.asarray(drawn_RX), np.asarray(last_R)


@pytest.mark.slow
@pytest.mark.parametrize("drafts_are", ["drawn", "likeliest"])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 4},
        {"temperature": 1.4, "top_p": 0.8},
        {"temperature": 0.9, "min_p": 0.1, "top_k": 5, "top_p": 0.9},
    ],
    ids=str,
)
def test_tokens_have_the_targets_distribution(params, drafts_are):
    """Given the tokens before it, each token of a step is distributed as without drafts; as many drafts count as theory says."""
    num_drafts = 3
    draft_RK, drawn_RX, last_R = step(columns_of(**params), num_drafts, drafts_are)
    drawn_RW = drawn_RX[:, :-1]
    before_R, is_alive_R = np.zeros(NUM_ROWS, np.int32), np.ones(NUM_ROWS, bool)
    for place in range(num_drafts + 1):
        p_XV, q_XV = probabilities(P_LOGITS[place], **params), probabilities(kept(Q_LOGITS[place]), **params)
        for before in np.unique(before_R[is_alive_R]):
            here_R = is_alive_R & (before_R == before)
            if here_R.sum() < 2000:
                continue
            check_counts(drawn_RW[here_R, place], p_XV[before])
            if place < num_drafts:
                if drafts_are == "drawn":
                    check_counts(draft_RK[here_R, place], q_XV[before])
                    rate = np.minimum(p_XV[before], q_XV[before]).sum()
                else:
                    rate = p_XV[before, kept(Q_LOGITS[place])[before].argmax()]
                check_rate(drawn_RW[here_R, place] == draft_RK[here_R, place], rate)
        assert (drawn_RW[~is_alive_R, place] == NO_DRAFT).all()
        before_R = drawn_RW[:, place]
        if place < num_drafts:
            is_alive_R = is_alive_R & (before_R == draft_RK[:, place])
    num_drawn_R = (drawn_RW != NO_DRAFT).sum(1)
    assert len(set(num_drawn_R)) > 1
    assert (last_R == drawn_RW[np.arange(NUM_ROWS), num_drawn_R - 1]).all()


def verify(p_logits, columns, draft, q_logits=None, position=FIRST):
    """A token of each row, all with the same logits and draft."""
    p_RV = np.tile(np.float32(p_logits), (NUM_ROWS, 1))
    q_RV = None if q_logits is None else as_kept(jnp.tile(jnp.asarray(q_logits, jnp.float32), (NUM_ROWS, 1)))
    return np.asarray(judge(p_RV, columns, np.full(NUM_ROWS, position), np.full(NUM_ROWS, draft, np.int32), q_RV))


def test_drafts_that_are_certain_impossible_or_missing():
    columns = columns_of(temperature=1.0)
    p = P_LOGITS[0, 0]
    assert (verify(kept(p[None])[0], columns, 3, p) == 3).all()  # of the same distribution
    only_3 = np.where(np.arange(V) == 3, 0, -np.inf)
    assert (verify(only_3, columns, 3) == 3).all() and (verify(only_3, columns, 3, np.zeros(V)) == 3).all()
    without_3 = np.where(np.arange(V) == 3, -np.inf, p)
    for q in (None, Q_LOGITS[0, 0]):
        assert not (verify(without_3, columns, 3, q) == 3).any()
    # Without a draft the token is the target's own, with its own noise.
    alone = np.asarray(draw(np.tile(p, (NUM_ROWS, 1)), columns, np.full(NUM_ROWS, FIRST)))
    assert (verify(p, columns, NO_DRAFT, Q_LOGITS[0, 0]) == alone).all()
    # Greedy rows accept the likeliest token alone.
    greedy = columns_of(temperature=0.0)
    for draft in range(V):
        assert (verify(p, greedy, draft, Q_LOGITS[0, 0]) == p.argmax()).all()


def test_drafts_are_dropped_that_nothing_followed():
    """A later request in the row would take them for its own, with other probabilities."""
    drafts = DraftRows(jnp.zeros(3, jnp.int32), jnp.full((3, 2), 7), jnp.zeros((3, 3), jnp.int32), ())
    columns_RC = jnp.zeros((2, NUM_ROW_COLUMNS), jnp.int32).at[:, Column.TOKEN_ROW].set(jnp.array([0, 2]))
    assert forget_drafts(drafts, columns_RC).draft_NK.tolist() == [[NO_DRAFT] * 2, [7, 7], [NO_DRAFT] * 2]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_logit_that_is_not_finite_is_what_is_drawn(bad):
    """So the caller finds it."""
    logits = np.where(np.arange(V) == 4, bad, P_LOGITS[0, 0])
    assert (verify(logits, columns_of(temperature=1.0), 2, Q_LOGITS[0, 0]) == 4).all()


@pytest.mark.slow
def test_draws_depend_on_seed_and_position_alone():
    columns = columns_of(temperature=1.0)
    found = step(columns, 2, "drawn")
    order = np.random.default_rng(0).permutation(NUM_ROWS)
    moved = step(jax.tree.map(lambda x: x[order], columns), 2, "drawn")
    for one, other in zip(found, moved, strict=True):
        np.testing.assert_array_equal(np.asarray(one)[order], other)
    p, q = P_LOGITS[0, 0], Q_LOGITS[0, 0]
    at_first, at_next = (verify(p, columns, 2, q, position) for position in (FIRST, FIRST + 1))
    check_rate((at_first == 2) & (at_next == 2), (at_first == 2).mean() * (at_next == 2).mean())


def test_exact_acceptance_keeps_tokens_and_is_as_frequent_as_theory_says():
    """Under shared noise the likeliest of log p + g and of log q + g are the same token x with probability
    1 / sum over y of max(p(y) / p(x), q(y) / q(x))."""
    columns = columns_of(temperature=1.0)
    p_logits, q_logits = P_LOGITS[0, 0], Q_LOGITS[0, 0]
    position_R = np.full(NUM_ROWS, FIRST)
    tokens = [np.asarray(draw(np.tile(x, (NUM_ROWS, 1)), columns, position_R)) for x in (p_logits, q_logits)]
    p, q = (probabilities(x[None], temperature=1.0)[0] for x in (p_logits, q_logits))
    check_counts(tokens[0], p)
    check_counts(tokens[1], q)
    equal = 1 / np.maximum(p[None] / p[:, None], q[None] / q[:, None]).sum(1)
    check_rate(tokens[0] == tokens[1], equal.sum())
    # No method accepts more often than the ratio of probabilities, and shared noise at least half of what it could.
    assert np.minimum(p, q).sum() > equal.sum() > np.minimum(p, q).sum() / (2 - np.minimum(p, q).sum())


def acceptance_of(core: EngineCore, requests: list[EngineCoreRequest]) -> tuple[Acceptance, dict[str, list[int]]]:
    """Number of drafts that an engine accepts while it answers requests, and their tokens."""
    before = Acceptance.of(core.stats())
    answers = engines.run(core, requests)
    return Acceptance.of(core.stats()) - before, {name: answer.tokens for name, answer in answers.items()}


@pytest.mark.slow
def test_data_parallel_ranks_of_two_devices_accept_what_a_model_drafts_for_itself(monkeypatch):
    """All of it, but for the half precision that distributions are kept in, in whatever rows the requests are. As a draft, each rank
    has all experts; as target, they share them."""
    options = {
        "method": "draft_model",
        "model": str(goldens.golden(MIXTURE).directory),
        "num_speculative_tokens": 2,
        "rejection_sample_method": "standard",
    }
    monkeypatch.setattr(AdaptiveControl, "most", lambda control, num_running, running=(): control.num_drafts)  # whatever pays
    layout = {"data_parallel_size": 2, "enable_expert_parallel": True, "tensor_parallel_size": 2}
    core = engines.make_core(MIXTURE, speculative_config=options, **layout)
    engines.reschedule(core, max_in_flight=1)
    results = goldens.golden(MIXTURE).results

    def requests(**params):
        return [engines.request(str(i), result.prompt, seed=i, max_tokens=24, **params) for i, result in enumerate(results)]

    sampled = {"temperature": 1.5, "top_p": 0.95, "min_p": 0.001}
    found, tokens = acceptance_of(core, [*requests(temperature=0.0)[:2], *requests(**sampled)[2:]])
    assert found.num_draft_tokens > 30 and found.rate > 0.97
    assert [tokens["0"], tokens["1"]] == [result.tokens[:24] for result in results[:2]]
    for alone in requests(**sampled)[-2:]:
        assert acceptance_of(core, [alone])[1] == {alone.request_id: tokens[alone.request_id]}
    core.shutdown()

"""What check_gpu.py and bench_kernels.py do with right, wrong and failing kernels, on toy ones."""

import math
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scripts.kernels
from scripts.bench_kernels import chained
from scripts.gpu_checks import kernels, logits
from scripts.kernels import Case, attention, cache_write


def toy_case(name: str, **variants) -> Case:
    """A carry of 8 numbers, to which a constant is added."""

    def make():
        return jnp.arange(8.0), (jnp.full((8,), 2.0),)

    def error(carry, constants, got):
        return float(jnp.abs(got - carry - constants[0]).max())

    return Case(name, make, variants, error, tolerance=1e-6, bytes=96)


def breaks(carry, constant):
    raise ValueError("shared memory too small")


@pytest.fixture
def toy_op(monkeypatch):
    """Registers an op of the given cases."""

    def register(*found: Case) -> None:
        module = types.SimpleNamespace(
            speed_cases=lambda tiny, tune: list(found), check_cases=lambda tiny: list(found), __spec__=None
        )
        monkeypatch.setitem(sys.modules, "toy_op_cases", module)
        monkeypatch.setitem(scripts.kernels.OPS, "toy", "toy_op_cases")

    return register


def outcomes(deadline: float = math.inf) -> dict[str, kernels.Outcome]:
    return {found.name: found for found in kernels.check(ops=["toy"], tiny=True, deadline=deadline, repeats=2)}


def test_right_wrong_and_failing_variants_are_told_apart(toy_op) -> None:
    toy_op(
        toy_case("a", right=lambda x, c: x + c, wrong=lambda x, c: x, nan=lambda x, c: x * jnp.nan, broken=breaks),
        toy_case("b", right=lambda x, c: x + c),
    )
    found = outcomes()
    assert {name for name, outcome in found.items() if outcome.passed} == {"toy: a, right", "toy: b, right"}
    assert "error 2.0e+00, allowed 1e-06" in found["toy: a, wrong"].detail
    assert "ValueError: shared memory too small" in found["toy: a, broken"].detail


def test_cases_without_time_fail_by_name(toy_op) -> None:
    toy_op(toy_case("a", right=lambda x, c: x + c))
    [outcome] = outcomes(deadline=time.perf_counter() - 1).values()
    assert outcome.name == "toy: 1 cases" and outcome.failed
    assert "not run for lack of time (--seconds): a" in outcome.detail


def test_shares_run_every_case_once(toy_op) -> None:
    toy_op(*(toy_case(name, right=lambda x, c: x + c) for name in "abcde"))
    parts = [list(kernels.check(ops=["toy"], tiny=True, deadline=math.inf, repeats=0, share=(i, 2))) for i in range(2)]
    assert [len(part) for part in parts] == [3, 2]
    assert sorted(outcome.name for part in parts for outcome in part) == [f"toy: {name}, right" for name in "abcde"]


def test_runs_that_differ_in_a_bit_are_counted() -> None:
    nan = jnp.array([1.0, jnp.nan])
    results = iter([nan, nan.at[0].set(np.nextafter(np.float32(1), np.float32(2))), nan])
    assert kernels.count_differing(lambda carry: next(results), None, (), nan, repeats=3) == 1


def test_chained_calls_rotate_over_the_copies() -> None:
    case = toy_case("a", right=lambda x, c: x + c)
    carry, constants = case.make()
    copies = [constants, (constants[0] * 10,)]
    got = jax.jit(chained(case.variants["right"], case.feed, unroll=3, trips=2))(carry, copies)
    np.testing.assert_allclose(got, np.arange(8.0) + 2 * (2 + 20 + 2))


BATCH = attention.Batch(
    "toy", decodes=(3, 0, 9), prompts=((4, 5),), num_kv_heads=2, num_groups=2, head_dim=16, page_size=8, padding=2, poison=True
)


@pytest.mark.parametrize(("prompts", "padding"), [((), 0), (((4, 5),), 2)])
def test_attention_is_measured_by_its_worst_head(prompts, padding) -> None:
    batch = attention.replace(BATCH, prompts=prompts, padding=padding, dtype="float32")
    q, constants = attention.make_arrays(batch)
    call = attention._call(attention.reference, batch, batch.options)
    got = jax.jit(call)(q, *constants)
    assert attention.worst_error(batch, q, constants, got) < 1e-6
    assert attention.worst_error(batch, q, constants, got.at[-1 - batch.padding, 1, 1].multiply(1.01)) == pytest.approx(
        0.01, rel=0.01
    )
    assert math.isnan(attention.worst_error(batch, q, constants, got.at[-1].set(jnp.nan)))


def test_slots_of_nobody_are_nan_and_padding_rows_have_no_query_beside_prompts() -> None:
    assert BATCH.query_lengths == [1, 0, 1, 4] and attention.replace(BATCH, prompts=()).query_lengths == [1, 1, 1]
    _, (k, _, table, query_start, kv_length) = attention.make_arrays(BATCH)
    assert query_start.tolist() == [0, 1, 1, 2, 6] and kv_length.tolist() == [3, 0, 9, 9]
    finite = np.isfinite(np.asarray(k, np.float32)).all(axis=(1, 3))
    assert finite.sum() == 3 + 9 + 9 and not finite[0].any()
    assert finite[table[2, 0]].all() and finite[table[2, 1]].tolist() == [True] + [False] * 7


def test_a_cache_write_must_be_exact() -> None:
    [case] = cache_write.check_cases(tiny=True)
    carry, constants = case.make()
    got = jax.jit(case.variants["xla"])(carry, *constants)
    assert case.error(carry, constants, got) == 0.0
    assert case.error(carry, constants, (got[0], got[1].at[0, 0, 0, 0].add(1))) == math.inf


def test_every_op_names_its_cases_and_all_can_be_shaped() -> None:
    for kind, options in (("check", {}), ("speed", {"tune": False})):
        found = scripts.kernels.cases(kind, scripts.kernels.OPS, tiny=True, **options)
        for _, case in found:
            jax.eval_shape(case.make)
            assert case.variants
    with pytest.raises(SystemExit, match="no op 'dance'; there are attention, write, rope, sampling"):
        scripts.kernels.cases("check", ["dance"], tiny=True)


def test_logits_may_be_off_as_far_as_plain_xla_and_a_little_more() -> None:
    rng = np.random.default_rng(0)
    exact, noise = rng.normal(size=(2, 9, 64))
    plain = exact + 0.01 * noise
    assert logits.compare("same", exact, plain, plain).passed
    assert logits.compare("a little", exact, plain, exact + 0.014 * noise).passed
    assert not logits.compare("too far", exact, plain, exact + 0.017 * noise).passed
    one_wrong = plain.copy()
    one_wrong[4] = exact[4] + 0.035 * noise[4]
    assert not logits.compare("one token", exact, plain, one_wrong).passed
    assert not logits.compare("nan", exact, plain, plain * np.nan).passed
    assert not logits.compare("plain is nonsense", exact, exact + noise, exact).passed


def test_the_steps_of_the_logits_write_each_slot_once_and_decodes_follow_prompts() -> None:
    steps = logits.Steps(prompts=(20, 1, 17), num_decodes=2)
    parts = [steps.prefill(64), steps.decode(64, 0), steps.decode(64, 1)]
    slots = np.concatenate([np.asarray(part.slot_T) for part in parts])
    written = slots[slots >= 0]
    assert len(written) == len(set(written)) == 38 + 2 * 3 and written.min() >= 16
    assert parts[0].query_start_R1.tolist() == [0, 20, 21, *[38] * 6]
    assert parts[1].position_T.tolist()[:3] == [20, 1, 17] and parts[2].kv_length_R.tolist() == [22, 3, 19, *[0] * 5]
    ids = steps.token_ids(64)
    assert parts[2].token_ids_T.tolist()[:3] == [request[-1] for request in ids]

"""check_gpu.py and bench_kernels.py with right, wrong and failing kernels, on toy ones."""

import contextlib
import dataclasses
import json
import math
import sys
import time
import types
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scripts.kernels
from jaxllm.runner import paged_context, program_store
from pallas_kernels import verified
from pallas_kernels.checking import collectives as checking_collectives
from pallas_kernels.paged_attention import reference
from scripts import check_gpu
from scripts.bench_kernels import chained
from scripts.gpu_checks import (
    Outcome,
    collectives,
    engine,
    images,
    jobs,
    kernels,
    logits,
    parallel_models,
    parts,
    record,
    sanitizing,
    scoring,
    speech,
    state,
    tensor_parallel,
    tensor_parallel_traffic,
    tokens,
    traffic,
)
from scripts.kernels import Case, attention
from tests.helpers import goldens


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


@pytest.mark.slow
@pytest.mark.parametrize(("prompts", "padding"), [((), 0), (((4, 5),), 2)])
def test_attention_is_measured_by_its_worst_head(prompts, padding) -> None:
    batch = replace(BATCH, prompts=prompts, padding=padding, dtype="float32")
    q, constants = attention.make_arrays(batch)
    call = attention.call(reference, batch)
    got = jax.jit(call)(q, *constants)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(compiled_programs := lambda event, *_, **__: compiled.append(event))
    assert attention.worst_error(batch, q, constants, got) < 1e-6
    jax.monitoring.unregister_event_duration_listener(compiled_programs)
    assert sum("backend_compile" in event for event in compiled) == 1, "one program, for all variants of a case"
    assert attention.worst_error(batch, q, constants, got.at[-1 - batch.padding, 1, 1].multiply(1.01)) == pytest.approx(
        0.01, rel=0.01
    )
    assert math.isnan(attention.worst_error(batch, q, constants, got.at[-1].set(jnp.nan)))


def test_slots_of_nobody_are_nan_and_padding_rows_have_no_query_beside_prompts() -> None:
    assert BATCH.query_lengths == [1, 0, 1, 4] and replace(BATCH, prompts=()).query_lengths == [1, 1, 1]
    _, (k, _, table, query_start, kv_length) = attention.make_arrays(BATCH)
    assert query_start.tolist() == [0, 1, 1, 2, 6] and kv_length.tolist() == [3, 0, 9, 9]
    finite = np.isfinite(np.asarray(k, np.float32)).all(axis=(1, 3))
    assert finite.sum() == 3 + 9 + 9 and not finite[0].any()
    assert finite[table[2, 0]].all() and finite[table[2, 1]].tolist() == [True] + [False] * 7


def test_every_op_names_its_cases_and_all_can_be_shaped() -> None:
    for kind, options in (("check", {}), ("speed", {"tune": False})):
        found = scripts.kernels.cases(kind, scripts.kernels.OPS, tiny=True, **options)
        for _, case in found:
            jax.eval_shape(case.make)
            assert case.variants
    with pytest.raises(
        SystemExit,
        match="no op 'dance'; there are attention, .*experts, gated, latent, lora, quantize, quantized, rope, router, sampling",
    ):
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


@pytest.mark.slow
def test_logits_come_from_the_step_functions_of_an_engine() -> None:
    steps = logits.Steps(prompts=(20, 1, 17), num_decodes=2)
    directory = str(goldens.golden("llama_gqa").directory)
    found = logits.run(directory, steps, dtype="float32", attention_implementation="reference", compilation_cache=False)
    assert [x.shape for x in found.logits.values()] == [(38, 128), (6, 128)]
    assert all(np.isfinite(x).all() and x.std() > 0 for x in found.logits.values())


@pytest.mark.parametrize("first", [(), (12, 0, 17)])
def test_the_steps_of_the_logits_write_each_slot_once_and_decodes_follow_prompts(first) -> None:
    steps = logits.Steps(prompts=(20, 1, 17), num_decodes=2, first=first, num_groups=2)
    batches = [batch for of_name in steps.batches(64).values() for batch in of_name]
    places = [batch.places for batch in batches]
    slots = np.concatenate([np.asarray(table.slot_T) for place in places for table in place.tables])
    written = slots[slots >= 0]
    assert len(written) == len(set(written)) == 2 * (38 + 2 * 3) and written.min() >= 16
    assert sum(batch.count for batch in batches[:-2]) == 38 and len(batches) == (4 if first else 3)
    starts = [place.query_start_R1.tolist() for place in places[:-2]]
    assert starts == ([[0, 12, 12, *[29] * 6], [0, 8, *[9] * 7]] if first else [[0, 20, 21, *[38] * 6]])
    assert places[-3].kv_length_R.tolist() == [20, 1, 0 if first else 17, *[0] * 5]
    assert places[-2].position_T.tolist()[:3] == [20, 1, 17] and places[-1].kv_length_R.tolist() == [22, 3, 19, *[0] * 5]
    ids = steps.token_ids(64)
    assert batches[-1].token_ids_T.tolist()[:3] == [request[-1] for request in ids]


def test_tokens_of_a_span_see_its_later_ones() -> None:
    steps = logits.Steps(prompts=(9, 4), num_decodes=1, first=(5, 0), spans=((0, 1, 3), (0, 5, 4), (1, 0, 2)))
    first, rest, decode = (batch for (batch,) in steps.batches(64).values())
    assert first.later.num_T.tolist()[:5] == [0, 2, 1, 0, 0]
    assert rest.later.num_T.tolist()[:8] == [3, 2, 1, 0, 1, 0, 0, 0] and rest.later.most == 3
    assert decode.later is None


@pytest.fixture(scope="module")
def shared_programs(tmp_path_factory):
    """The engines of this file's tests keep their programs in one place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXLLM_CACHE_DIR", str(tmp_path_factory.mktemp("programs")))
        yield patch


@pytest.fixture
def wrong_attention(monkeypatch, shared_programs):
    """The reference attention reads a page of row 0 for row 1 in decodes and drops a key of the others."""

    def wrong_decode(q, k, v, table, length, **options):
        return decode(q, k, v, table.at[1, 0].set(table[0, 0]), length, **options)

    def wrong_attention(q, k, v, table, start, length, **options):
        return attention_(q, k, v, table, start, jnp.where(length > 16, length - 1, length), **options)

    decode, attention_ = reference.paged_decode, reference.paged_attention
    monkeypatch.setattr(reference, "paged_decode", wrong_decode)
    monkeypatch.setattr(reference, "paged_attention", wrong_attention)
    # A program of this kernel must neither come from a right one's trace nor stay for others.
    paged_context._write_and_attend.clear_cache()
    monkeypatch.setattr(program_store.ProgramStore, "load", only_of("xla", program_store.ProgramStore.load))
    monkeypatch.setattr(program_store.ProgramStore, "save", only_of("xla", program_store.ProgramStore.save))
    yield
    paged_context._write_and_attend.clear_cache()


def only_of(implementation: str, function):
    """A store's function for engines with this attention; for others it does nothing."""

    def call(store, *args):
        compiled_for = program_store.read_manifest(store.directory)
        return function(store, *args) if compiled_for["attention_implementation"] == implementation else None

    return call


def engine_outcomes() -> dict[str, kernels.Outcome]:
    found = engine.check(tiny=True, deadline=math.inf, models=engine.MODELS[:1], attention_implementation="reference")
    return {outcome.name.partition(": ")[2]: outcome for outcome in found}


@pytest.mark.slow
def test_a_right_engine_passes_with_preemptions_and_cached_prefixes(shared_programs) -> None:
    found = engine_outcomes()
    assert len(found) == 7 and not [outcome for outcome in found.values() if outcome.failed]
    for name in ("together", "together, sampled apart"):
        assert ", 0 preemptions" not in found[name].detail and ", 0 tokens from" not in found[name].detail
    assert "0 tokens from cached" in found["no prefix caching, prompts scored"].detail


@pytest.mark.slow
def test_wrong_attention_in_prompts_or_decodes_fails_the_engine(wrong_attention) -> None:
    failed = {name for name, outcome in engine_outcomes().items() if outcome.failed}
    assert failed >= {"together", "together, tokens only", "alone", "no prefix caching, prompts scored"}


def test_no_engine_is_begun_after_the_deadline() -> None:
    found = list(engine.check(tiny=True, deadline=time.perf_counter() - 1))
    assert [outcome.failed for outcome in found] == [True] * len(engine.MODELS)
    assert all("not run for lack of time" in outcome.detail for outcome in found)


@pytest.mark.slow
def test_images_are_encoded_right(shared_programs) -> None:
    """The other shares compare tokens, as those of speech are, and logits of spans: tests/end_to_end does so for images."""
    found = list(images.check(tiny=True, deadline=math.inf, share=(0, 3)))
    assert not [outcome.line() for outcome in found if not outcome.passed] and len(found) == 2


@pytest.mark.slow
def test_prompts_with_speech_pass(shared_programs) -> None:
    """The other share measures logits: see `test_logits_come_from_the_step_functions_of_an_engine`."""
    found = list(speech.check(tiny=True, deadline=math.inf, share=(0, 2)))
    assert not [outcome.line() for outcome in found if not outcome.passed] and len(found) == 6


@pytest.mark.parametrize(
    ("part", "count"),
    [(images, len(images.ENCODERS) + 1 + len(images.FAMILIES)), (speech, 1 + len(speech.WIDTHS))],
    ids=["images", "speech"],
)
def test_each_share_leaves_its_checks_out_after_the_deadline(part, count) -> None:
    found = [list(part.check(tiny=False, deadline=time.perf_counter() - 1, share=(i, 3))) for i in range(3)]
    assert all(outcome.failed and "lack of time" in outcome.detail for share in found for outcome in share)
    names = [outcome.name for share in found for outcome in share]
    assert len(names) == len(set(names)) == count


class ToyLLM:
    """Answers with tokens that a function of the number of devices gives."""

    def __init__(self, first_token):
        self.first_token = first_token
        self.llm_engine = types.SimpleNamespace(
            core=types.SimpleNamespace(memory_plan=types.SimpleNamespace(num_cache_tokens=99)), check_integrity=lambda: None
        )

    def generate(self, prompts, params, use_tqdm):
        all_params = params if isinstance(params, list) else [params] * len(prompts)
        answers = [
            types.SimpleNamespace(token_ids=[self.first_token] * params.max_tokens, cumulative_logprob=-1.0)
            for params in all_params
        ]
        return [types.SimpleNamespace(outputs=[answer]) for answer in answers]


@pytest.mark.parametrize(("tokens", "passed"), [({1: 5, 2: 5}, True), ({1: 5, 2: 6}, False)])
def test_tokens_of_two_devices_must_be_those_of_one(tokens, passed, monkeypatch) -> None:
    monkeypatch.setattr(tensor_parallel, "_engine", lambda model, size, **_: contextlib.nullcontext(ToyLLM(tokens[size])))
    monkeypatch.setattr(tensor_parallel_traffic, "check", lambda **_: ())
    skipped, started, again, *equal = tensor_parallel.check(tiny=True, deadline=math.inf, sizes=(16, 2))
    assert skipped.skipped and not skipped.passed and "8 visible" in skipped.detail
    assert started.passed and "8 of 8 requests answered" in started.detail
    assert again.passed and "again" in again.name and "one KV head" in equal[1].name
    assert [outcome.passed for outcome in equal] == [passed] * 2
    assert f"{4 * passed} of 4 seeded requests equal one device's" in equal[0].detail


def test_an_engine_over_devices_that_does_not_start_has_failed(monkeypatch) -> None:
    def refuse(*args, **options):
        raise RuntimeError("Failed to allocate collective memory")

    monkeypatch.setattr(tensor_parallel, "_engine", refuse)
    monkeypatch.setattr(tensor_parallel_traffic, "LLM", refuse)
    found = list(tensor_parallel.check(tiny=True, deadline=math.inf, sizes=(2,)))
    assert found and all(outcome.failed and "collective memory" in outcome.detail for outcome in found)


@pytest.mark.parametrize(("token", "off", "passed"), [(5, 0.1, [True, True]), (6, 0.1, [False, True]), (5, 0.2, [True, False])])
def test_other_models_over_devices_say_one_devices_tokens_and_are_as_near_to_float32(token, off, passed, monkeypatch) -> None:
    def answers(run, size, *, dtype, **_):
        exact = dtype == "float32"
        return [[5], [5 if size == 1 else token]], [-1.0 if exact else -1.1 if size == 1 else -1.0 - off], {}

    monkeypatch.setattr(parallel_models._Run, "_answers", answers)
    skipped, *found = parallel_models.check(tiny=True, deadline=math.inf, sizes=(2, 16))
    assert skipped.skipped and [outcome.passed for outcome in found] == passed * len(parallel_models.models(tiny=True))


@pytest.mark.slow
def test_requests_of_a_kind_for_each_program_over_four_devices(shared_programs, monkeypatch) -> None:
    """Which hold copies of two KV heads."""
    kinds = traffic.kinds
    some = ("greedy", "seeded", "penalties, seeded", "prompt logprobs", "long")
    monkeypatch.setattr(traffic, "kinds", lambda count: {name: kinds(count)[name] for name in some})
    found = list(tensor_parallel_traffic.check(tiny=True, deadline=math.inf, sizes=(4,)))
    assert not [outcome.line() for outcome in found if not outcome.passed]
    names = [outcome.name.partition(": ")[2] for outcome in found]
    assert names == [
        "requests of every kind",
        "the same from cached prefixes",
        "vectors",
        "injected out of memory",
        "after sleep at level 1",
        "after sleep at level 2",
    ]
    assert "5 of 5 requests answered as by one device" in found[0].detail and " 0 preemptions" not in found[0].detail


def test_another_token_or_logprob_is_noticed() -> None:
    expected = {
        "greedy": [traffic.Answer((5, 6, 7)), traffic.Answer((5, 6))],
        "logprobs": [traffic.Answer((5,), (-0.5, -1.0), (5, 6))],
    }
    assert traffic.differing(expected, expected) == []
    moved = traffic.Answer((5,), (-0.5, -0.99), (5, 6))
    found = {"greedy": [traffic.Answer((5, 6, 8)), expected["greedy"][1]], "logprobs": [moved]}
    assert traffic.differing(found, expected) == [("greedy", 0), ("logprobs", 0)]


@pytest.mark.parametrize(("token", "is_tie"), [(6, True), (7, False)])
def test_a_less_likely_token_is_no_tie_whatever_one_device_has_answered(monkeypatch, token, is_tie) -> None:
    class Llm:
        """After token 3 comes 4, or 6, which is all but as likely."""

        def generate(self, prompts, params, use_tqdm):
            scores = {4: 1.0, 6: 1.0 - traffic.NUDGE / 2, 7: 1.0 - 2 * traffic.NUDGE}
            likeliest = max(scores, key=lambda token: scores[token] + params.logit_bias.get(token, 0.0))
            return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=[3, likeliest, 5])])]

    monkeypatch.setattr(traffic, "answers", lambda llm, size, kinds: {"greedy": [traffic.Answer((3, 4, 5))]})
    assert traffic.is_tie(Llm(), traffic.TINY, "greedy", 0, traffic.Answer((3, token, 5))) == is_tie


def test_a_line_without_answers_to_compare_with_or_that_took_too_long_has_failed() -> None:
    passed, detail = tensor_parallel_traffic._Run(True, math.inf)._compare(None, {})
    assert not passed and "no answers to compare with" in detail
    assert tensor_parallel_traffic.guarded("slow", math.inf, lambda: (True, "right"), most_seconds=0.0).failed


def scored(rng, count: int = 20, length: int = 30) -> tuple[list[scoring.Answer], dict, dict]:
    """Answers of 10 tokens by an engine as noisy as the plain one, with the scores of plain and exact."""
    answers, plain, exact = [], {}, {}
    for i in range(count):
        tokens = tuple(int(token) for token in rng.integers(0, 50, length - 1)) + (i,)
        logprobs, best = -3 - rng.random((2, length - 1))
        best_ids = np.array(tokens[1:])
        exact[tokens] = scoring.Scores(logprobs, best_ids, logprobs)
        plain[tokens] = scoring.Scores(logprobs + 0.01 * rng.normal(size=length - 1), best_ids, best)
        ours = logprobs + 0.01 * rng.normal(size=length - 1)
        answers.append(scoring.Answer(tokens[:20], tokens[20:], ours[19:], ours[:19]))
    return answers, plain, exact


def test_noise_like_the_plain_path_passes_and_one_wrong_request_or_token_fails() -> None:
    answers, plain, exact = scored(np.random.default_rng(0))
    assert scoring.judge("same", answers, plain, exact).passed
    first, *others = answers
    for logprobs in (first.logprobs + 0.06, np.where(np.arange(10) == 3, first.logprobs + 0.12, first.logprobs)):
        wrong = dataclasses.replace(first, logprobs=logprobs)
        assert not scoring.judge("wrong", [wrong, *others], plain, exact).passed
    in_prompt = dataclasses.replace(first, prompt_logprobs=first.prompt_logprobs * np.nan)
    assert not scoring.judge("nan", [in_prompt, *others], plain, exact).passed


def test_a_token_that_exact_finds_unlikely_fails_without_logprobs() -> None:
    answers, plain, exact = scored(np.random.default_rng(0))
    answers = [dataclasses.replace(answer, logprobs=None, prompt_logprobs=None) for answer in answers]
    assert scoring.judge("same", answers, plain, exact).passed
    first = answers[0].sequence
    better = exact[first].logprobs.copy()
    better[-1] += 1.0
    exact[first] = dataclasses.replace(exact[first], best_logprobs=better)
    assert not scoring.judge("unlikely", answers, plain, exact).passed


JOB = """
import json, sys
part, share = sys.argv[sys.argv.index("--parts") + 1], sys.argv[sys.argv.index("--share") + 1]
print("a line of a library")
print("\\x1echeck_gpu " + json.dumps({"kind": "Hello", "device_kind": "toy", "num_devices": 1, "backend": "gpu"}))
print("half a line", end="")
detail = sys.stdin.read()
print("\\x1echeck_gpu " + json.dumps({"kind": "Outcome", "name": part + share, "passed": True, "detail": detail}))
sys.exit(7 if part == "crashes" else 0)
"""


def run_jobs(tmp_path, *found: jobs.Job, seconds: float = 60, **options) -> list[tuple[str, object]]:
    (tmp_path / "job.py").write_text(JOB)
    options |= {"total_gib": 10, "until": time.perf_counter() + seconds, "script": tmp_path / "job.py"}
    return [(str(job), event) for job, event in jobs.run(found, [], **options)]


def test_processes_report_and_one_that_crashes_has_failed(tmp_path) -> None:
    found = run_jobs(tmp_path, jobs.Job("a", 0, 2, gib=4), jobs.Job("a", 1, 2, gib=4), jobs.Job("crashes", gib=4))
    outcomes = [event for _, event in found if isinstance(event, jobs.Outcome)]
    assert {outcome.name for outcome in outcomes if outcome.passed} == {"a0/2", "a1/2", "crashes0/1"}
    [failed] = [outcome for outcome in outcomes if outcome.failed]
    assert failed.name == "crashes" and "status 7 after 1 outcomes; its last line: a line of a library" in failed.detail
    assert sum(isinstance(event, jobs.Ended) for _, event in found) == 3


def test_a_process_without_time_has_failed(tmp_path) -> None:
    [(_, outcome)] = run_jobs(tmp_path, jobs.Job("a", gib=4), seconds=-1)
    assert outcome.failed and "not run for lack of time" in outcome.detail
    long = {"needed_seconds": lambda job: 200.0, "done": lambda job: ["b", "a"]}
    found = run_jobs(tmp_path, jobs.Job("first", gib=4), jobs.Job("second", gib=4), **long)
    found = {event.name: event for _, event in found if isinstance(event, Outcome)}
    assert found["first0/1"].detail == '["a", "b"]' and found["second"].num_left == 1


def test_a_job_waits_for_memory_and_one_for_the_whole_machine_for_all_others(monkeypatch) -> None:
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    small, large, whole = jobs.Job("small", gib=3), jobs.Job("large", gib=50), jobs.Job("whole")
    assert jobs._next([large, small], set(), 9) is large and jobs._next([large], {small}, 9) is None
    assert jobs._next([large, small], {jobs.Job("other", gib=6)}, 9) is small
    assert jobs._next([whole], {small}, 9) is None and jobs._next([whole], set(), 9) is whole
    assert jobs.environment(large, 10)["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.9000"
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in jobs.environment(whole, 10)


def test_the_sanitizer_sees_every_kernel() -> None:
    names = [f"{name}: {case.name}" for name, case in sanitizing.kernel_cases(interpret=False)]
    for kind in ("attention mosaic h128", "attention mosaic h256", "attention mosaic h64", "attention triton h128"):
        assert {f"{kind}{rest}" for rest in ("ragged batch", "decode of 8 rows", "decode of 24 rows")} <= {
            kind + name.partition(": ")[2].partition(",")[0] for name in names if name.startswith(kind)
        }
    for kernel in (
        "experts mosaic: 1 token",
        "experts mosaic int4: 1 token",
        "experts triton biases",
        "quantize triton",
        "quantized mosaic: int4 200x640 g128 bfloat16 zeros, 150 rows",
        "quantized mosaic: int4 128x2048 g128 bfloat16, 13 rows",
        "quantized mosaic: int4 128x2048 g128 bfloat16, 150 rows",
        "rope triton",
        "sampling triton: argmax",
        "sampling triton: draw",
        "sampling triton: top_values",
    ):
        assert any(name.startswith(kernel) for name in names)


def test_parts_without_small_cases_are_not_sanitized(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["check_gpu.py", "--sanitize", "--parts", "kernels,tokens"])
    with pytest.raises(SystemExit):
        check_gpu.main()
    assert "no part tokens to sanitize; there are kernels, tiers" in capsys.readouterr().err


def test_collectives_are_checked_between_as_many_devices_as_there_are(monkeypatch) -> None:
    few = [checking_collectives.Single("all_reduce", (3, 64)), checking_collectives.Single("all_gather", (5, 2), "int32")]
    monkeypatch.setattr(checking_collectives, "singles", lambda num_devices: few)
    skipped, *found = collectives.check(tiny=True, deadline=math.inf, sizes=(16, 2))
    assert skipped.skipped and "8 visible, collectives between 16 were not checked" in skipped.detail
    assert [outcome.name for outcome in found] == [f"2 devices: {case}" for case in few]
    assert all(outcome.passed for outcome in found)
    first, last = collectives.check(tiny=True, deadline=-math.inf, sizes=(2,))
    assert first.passed and last.failed and "for lack of time" in last.detail
    (alone,) = collectives.check(tiny=False, deadline=math.inf, sizes=(2,))
    assert alone.skipped and "cannot access each other's memory" in alone.detail


@pytest.fixture
def resumed_run(toy_op, tmp_path, monkeypatch):
    """Runs check_gpu.py on toy kernels and a part that finds nothing wrong, each time with the same state; gives its last words."""
    monkeypatch.setenv("JAXLLM_CACHE_DIR", "")  # main sets it
    monkeypatch.setitem(record.OPS_OF_CASES, "toy", "sampling")
    monkeypatch.setattr(parts, "hello", lambda: jobs.Hello("toy", 1, "gpu"))
    monkeypatch.setattr(tokens, "check", lambda tiny: [Outcome("greedy", True, "")])

    def run(*found: Case, seconds: float = 60, versions: str = "1") -> str:
        toy_op(*found)
        monkeypatch.setattr(record, "versions", lambda: {"jax": versions})
        options = ["--parts", "kernels,tokens", "--ops", "toy", "--repeats", "1", "--seconds", str(seconds)]
        options += ["--state", str(tmp_path / "state"), "--record-to", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", ["check_gpu.py", "--in-turn", *options])
        try:
            check_gpu.main()
        except SystemExit as failed:
            return str(failed)
        return json.loads((tmp_path / "out/verified.json").read_text())["toy"]["parts"]

    return run


def test_a_run_goes_on_with_what_is_left_and_the_last_one_records_all(resumed_run, tmp_path, capsys) -> None:
    ran = []

    def case(name: str, right: bool = True) -> Case:
        made = toy_case(name, one=lambda x, c: x + c * right, two=lambda x, c: x + c)
        return replace(made, make=lambda: ran.append(name) or toy_case(name).make())

    def run(*found: Case, **options) -> object:
        ran.clear()
        return resumed_run(*found, **options)

    cases = [case("a"), case("b", right=False), case("c")]
    assert "toy: b, one" in run(*cases) and not (tmp_path / "out").exists()
    assert "left: kernels" in (printed := capsys.readouterr().out) and "tokens 1 of 1" in printed
    run(*cases)
    assert set(ran) == {"b"} and "kept: kernels 5, tokens 1" in capsys.readouterr().out
    late = run(*cases, seconds=-1)
    assert "toy: 1 cases" in late and "(1 cases)" in capsys.readouterr().out and not (tmp_path / "out").exists()
    found = run(case("a"), case("b"), case("c"))
    assert "b" in ran and "left" not in capsys.readouterr().out
    assert (found["kernels"]["passed"], found["kernels"]["failed"], found["tokens"]["passed"]) == (6, 0, 1)
    assert run(*cases)["kernels"]["passed"] == 6 and not ran, "nothing is left"
    run(*cases, versions="2")
    assert {"a", "b", "c"} <= set(ran), "another version of JAX"


def test_what_depends_on_a_changed_source_is_checked_again(monkeypatch, tmp_path) -> None:
    identity = state.Identity("toy", 1, {"jax": "1"}, repeats=1, tiny=False)
    kernel, engine_job, tokens_job = jobs.Job("kernels", 0, 3), jobs.Job("engine", 0, 4), jobs.Job("tokens")

    def reopened() -> state.State:
        return state.State(tmp_path / "state", identity)

    now = reopened()
    for job, names in ((kernel, ("attention: a", "lora: b")), (engine_job, ("one",)), (tokens_job, ("greedy",))):
        now.begin(job)
        for name in names:
            now.add(job, Outcome(name, True, ""))
        if job is not tokens_job:  # which was killed
            now.end(job)
    assert [reopened().is_finished(job) for job in (kernel, engine_job, tokens_job)] == [True, True, False]
    assert not reopened().kept(tokens_job) and reopened().left([kernel, engine_job], 80) == ""
    digest = verified.source_digest
    monkeypatch.setattr(verified, "source_digest", lambda op: "changed" if op == "lora" else digest(op))
    assert not reopened().is_finished(kernel) and [found.name for found in reopened().kept(kernel)] == ["attention: a"]
    monkeypatch.setattr(state, "_digest", lambda names: "changed")
    assert not reopened().kept(kernel) and not reopened().kept(engine_job)
    other = state.State(tmp_path / "state", replace(identity, device="another"))
    other.begin(tokens_job)
    assert len(json.loads((tmp_path / "state").read_text())) == 2 and not other.kept(engine_job)

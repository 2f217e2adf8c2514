"""Requests whose step fails, on a tiny model: they give the same tokens as in an engine without failures."""

import re
from dataclasses import replace
from functools import partial
from itertools import cycle

import pytest
from llguidance import LLMatcher

from jaxllm.device_errors import Failure, is_out_of_memory, kind_of
from jaxllm.engine import failures
from jaxllm.engine.failures import FailurePolicy, explain
from jaxllm.engine.fault_points import injected
from jaxllm.errors import EngineDeadError, OutOfMemoryError
from jaxllm.request import ErrorKind, FinishReason, Grammar
from jaxllm.worker_thread import WorkerThread
from tests.helpers import engines, goldens

NAME = "llama_gqa"
PROMPTS = [result.prompt for result in goldens.golden(NAME).results]
NUM_TOKENS = 16
SMALL_LETTERS = Grammar(LLMatcher.grammar_from_lark("start: /[a-z]{30,60}/"))


def requests():
    """Greedy and random ones, with the state of full sampling, a grammar or neither, more than run at a time."""
    some = {"temperature": 1.0, "seed": 7}
    return [
        engines.request("a", PROMPTS[0], max_tokens=NUM_TOKENS),
        engines.request("b", PROMPTS[1], max_tokens=NUM_TOKENS, **some),
        engines.request("c", PROMPTS[2], max_tokens=NUM_TOKENS, logprobs=2, presence_penalty=0.5, **some),
        engines.request("d", PROMPTS[3], max_tokens=NUM_TOKENS, top_p=0.8, **some),
        engines.request("e", PROMPTS[4], max_tokens=NUM_TOKENS),
        replace(engines.request("f", PROMPTS[5], max_tokens=NUM_TOKENS, **some), grammar=SMALL_LETTERS),
    ]


@pytest.fixture(scope="module")
def undisturbed(tiny_core):
    """The tokens of each request when nothing fails."""
    engines.renew(tiny_core)
    tokens = {request_id: answer.tokens for request_id, answer in engines.run(tiny_core, requests()).items()}
    assert all(len(each) == NUM_TOKENS for each in tokens.values())
    return tokens


def run(core, faults: str):
    with injected(faults):
        answers = engines.run(core, requests())
    core.check_integrity()
    return answers


def failed(answers) -> set[str]:
    return {request_id for request_id, answer in answers.items() if answer.finish_reason is FinishReason.ERROR}


def check_survivors(answers, undisturbed, lost: set[str]) -> None:
    """All but the lost ones have all their tokens, and those have the beginning of theirs."""
    assert failed(answers) == lost
    for request_id, answer in answers.items():
        if request_id in lost:
            assert answer.tokens == undisturbed[request_id][: len(answer.tokens)]
        else:
            assert answer.tokens == undisturbed[request_id]


# Out of memory


@pytest.mark.parametrize(
    ("place", "number"),
    [("step", 7), ("launch", 3), ("mask", 1), ("draw", 3), ("result", 1)],
)
def test_after_out_of_memory_every_request_gets_the_tokens_it_would_have_got(core, undisturbed, place, number):
    check_survivors(run(core, f"{place}:{number}:oom"), undisturbed, set())


def test_failed_steps_are_counted_by_what_became_of_them(core):
    run(core, "result:3:oom,stop:4:error,step:9:error")
    assert (core.stats().num_retried_steps, core.stats().num_lost_steps) == (1, 1)


def test_out_of_memory_in_a_launching_thread_is_survived_too(core, undisturbed, monkeypatch):
    launcher = WorkerThread("launch")
    monkeypatch.setattr(core.runner, "_launcher", launcher)
    check_survivors(run(core, "launch:4:oom,launch:12:oom,launch:13:oom"), undisturbed, set())
    launcher.shutdown()


def test_after_out_of_memory_steps_are_smaller_and_grow_again(core, monkeypatch):
    monkeypatch.setattr(failures, "CALM_STEPS", 4)
    sizes = []
    dispatch = core.runner.dispatch
    monkeypatch.setattr(core.runner, "dispatch", lambda plan: (sizes.append(len(plan.num_scheduled_tokens)), dispatch(plan))[1])
    run(core, "result:5:oom,result:9:oom")  # what is in flight then, 6 to 8, is waited for
    smallest = sizes.index(1)
    assert sizes[3] == 4 and smallest < 14 and max(sizes[smallest : smallest + 4]) == 1 and max(sizes[smallest + 4 :]) == 4
    assert not core._failures.limits_steps and core.scheduler.limits.max_num_seqs == 4


@pytest.mark.parametrize("awaits", [False, True])
def test_steps_grow_after_so_many_finished_steps_whether_or_not_their_ends_are_awaited(core, monkeypatch, awaits):
    monkeypatch.setattr(failures, "CALM_STEPS", 4)
    finished = []
    update = core.scheduler.update_from_output
    monkeypatch.setattr(core.scheduler, "update_from_output", lambda *read: (finished.append(1), update(*read))[1])
    if awaits:  # every second turn of the loop returns without a finished step
        monkeypatch.setattr(core.loop, "_seconds_to_plan", partial(next, cycle([1e-4, 0.0])))
    for request in requests():
        core.add_request(request)
    with injected("result:3:oom"):
        while not core._failures.limits_steps:
            core.step()
    finished.clear()
    while core._failures.limits_steps:
        core.step()
    assert len(finished) == 4


def test_a_request_that_never_fits_is_given_up_and_the_others_go_on(core, undisturbed):
    with injected("launch:1-:oom"):
        for request in requests()[:2]:
            core.add_request(request)
        outputs = [output for _ in range(12) for output in core.step()]
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("a", "error"), ("b", "error")]
    assert {output.error_kind for output in outputs} == {ErrorKind.OUT_OF_MEMORY}
    assert "no memory" in str(outputs[0].stop_reason)
    core.check_integrity()
    check_survivors(engines.run(core, requests()), undisturbed, set())


def test_out_of_memory_while_starting_over_ends_the_engine(core):
    core.add_request(requests()[0])
    with injected("step:1:oom,caches:1:oom"), pytest.raises(EngineDeadError, match="could not start over"):
        core.step()
    assert not core.has_unfinished_requests()


# Other errors in steps


@pytest.mark.parametrize("place", ["step", "launch", "result"])
def test_an_error_in_a_step_ends_its_requests_and_no_other(core, undisturbed, place):
    answers = run(core, f"{place}:5:error")
    check_survivors(answers, undisturbed, {"a", "b", "c", "d"})
    assert all(0 < len(answers[request_id].tokens) < NUM_TOKENS for request_id in "abcd")


def test_too_many_failed_steps_in_a_minute_end_the_engine(core):
    now = [0.0]
    core._failures = FailurePolicy(clock=lambda: now[0])

    def fail(number: int):
        core.add_request(engines.request(str(number), PROMPTS[0], max_tokens=4))
        while core.has_unfinished_requests():
            core.step()

    with injected("launch:1-:error"):
        for number in range(3):
            fail(number)
            now[0] += 25.0
        fail(3)  # the first is a minute ago
        with pytest.raises(EngineDeadError, match="4th failed step in 60 s"):
            fail(4)


def test_a_lost_device_ends_the_engine_at_once(core):
    for request in requests():
        core.add_request(request)
    with injected("result:3:fatal"), pytest.raises(EngineDeadError, match="ILLEGAL_ADDRESS"):
        for _ in range(9):
            core.step()
    assert not core.has_unfinished_requests()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12 bytes"), Failure.OUT_OF_MEMORY),
        (RuntimeError("INTERNAL: failed call: CUDA_ERROR_OUT_OF_MEMORY: out of memory"), Failure.OUT_OF_MEMORY),
        (OutOfMemoryError("too large"), Failure.OUT_OF_MEMORY),
        (RuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access"), Failure.ENGINE),
        (RuntimeError("INTERNAL: NCCL operation ncclAllReduce failed: unhandled system error"), Failure.ENGINE),
        (RuntimeError("INTERNAL: NCCL operation ncclCommInitRankConfig failed: Cuda failure 'out of memory'"), Failure.ENGINE),
        (RuntimeError("INTERNAL: failed to create cublas handle: CUBLAS_STATUS_ALLOC_FAILED"), Failure.OUT_OF_MEMORY),
        (AssertionError("a bug"), Failure.STEP),
        (MemoryError(), Failure.STEP),
    ],
    ids=str,
)
def test_errors_are_told_apart_by_their_texts(error, kind):
    assert kind_of(error) is kind


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12 bytes",
            "lower --max-num-batched-tokens, --max-num-seqs, ",
        ),
        ("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory", "beside JAX's pool .* lower --gpu-memory-utilization"),
        (
            "INTERNAL: NCCL operation ncclCommInitRankConfig failed: Cuda failure 'out of memory'",
            "beside JAX's pool .*collectives",
        ),
        ("INTERNAL: NCCL operation failed: Failed to CUDA calloc async 608 bytes", "beside JAX's pool"),
        ("INTERNAL: Failed to allocate collective memory", "beside JAX's pool"),
    ],
)
def test_memory_that_ran_out_is_told_with_what_to_lower(text, told):
    error = RuntimeError("the launch failed")
    error.__cause__ = RuntimeError(text)
    assert is_out_of_memory(error) and is_out_of_memory(error.__cause__)
    assert re.search(told, explain(error.__cause__))


@pytest.mark.parametrize("text", ["INTERNAL: NCCL operation ncclAllReduce failed: unhandled system error", "no memory of that"])
def test_other_errors_are_not_called_out_of_memory(text):
    assert not is_out_of_memory(RuntimeError(text))
    assert explain(RuntimeError(text)) == f"a step failed: RuntimeError: {text}"


# Errors in what is done for one request


@pytest.mark.parametrize("place", ["row", "stop", "allocate"])
def test_an_error_in_one_requests_own_code_ends_that_request_alone(core, undisturbed, place):
    answers = run(core, f"{place}:id=b:error")
    check_survivors(answers, undisturbed, {"b"})


def test_a_grammar_that_cannot_be_followed_ends_that_request_alone(core, undisturbed):
    check_survivors(run(core, "grammar:id=f:error"), undisturbed, {"f"})


@pytest.mark.parametrize("place", ["admit", "sampler"])
def test_an_error_in_what_only_full_sampling_does_ends_that_request_alone(core, undisturbed, place):
    check_survivors(run(core, f"{place}:id=c:error"), undisturbed, {"c"})


def test_requests_whose_end_was_noted_before_the_books_broke_are_told(core, undisturbed):
    short = [engines.request("a", PROMPTS[0], max_tokens=4), engines.request("b", PROMPTS[1], max_tokens=4)]
    with injected("free:id=b:error"):
        answers = engines.run(core, [*short, *requests()[2:]])
    assert answers["a"].finish_reason is FinishReason.LENGTH and answers["a"].tokens == undisturbed["a"][:4]
    assert failed(answers) == {"b", "c", "d"}
    check_survivors({id: answer for id, answer in answers.items() if id in "cdef"}, undisturbed, {"c", "d"})
    core.check_integrity()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_lone_request_that_gets_no_row_ends_alone(core, undisturbed, depth):
    engines.reschedule(core, max_in_flight=depth)
    with injected("row:1:error"):
        answers = engines.run(core, requests()[:1])
    assert failed(answers) == {"a"} and answers["a"].tokens == []
    check_survivors(engines.run(core, requests()), undisturbed, set())


def test_nobody_reads_blocks_of_a_request_that_gets_no_row(core):
    """Others with its prompt find them in the same step, and in those that are planned before it is known."""
    prompt = [token for part in PROMPTS for token in part][:50]
    copies = [engines.request(name, prompt, max_tokens=NUM_TOKENS) for name in ("fails", "a", "a2", "a3", "a4")]
    alone = engines.run(core, copies[1:2])["a"].tokens
    assert core.reset_prefix_cache()
    engines.run(core, requests())  # whose keys and values stay in the blocks
    with injected("row:id=fails:error"):
        answers = engines.run(core, copies)
    check_survivors(answers, {each.request_id: alone for each in copies}, {"fails"})
    core.check_integrity()


def test_a_refused_request_leaves_nothing_behind(core, undisturbed):
    with injected("add:id=b:error"):
        core.add_request(requests()[0])
        with pytest.raises(RuntimeError):
            core.add_request(requests()[1])
    check_survivors(engines.run(core, [*requests()[2:], requests()[1]]), undisturbed, set())
    core.check_integrity()


def test_many_faults_leave_every_other_request_whole(core, undisturbed):
    faults = "launch:3:oom,stop:id=e:error,result:9:oom,row:id=b:error,step:14:oom,result:20:oom"
    check_survivors(run(core, faults), undisturbed, {"b", "e"})

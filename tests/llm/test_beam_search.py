import asyncio
import itertools
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.beam_search import search_beams, step_params
from jaxllm.errors import InvalidRequestError, OverloadedError, RequestFailedError
from jaxllm.llm import LLM
from jaxllm.outputs import CompletionOutput, EngineCoreOutput, Logprob, RequestOutput
from jaxllm.request import EngineCoreRequest, ErrorKind, FinishReason
from jaxllm.request_options import RequestOptions
from jaxllm.sampling_params import BeamSearchParams, SamplingParams
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.scripted_core import fake_core, guessing_core
from tests.helpers.stand_in_media import PLACEHOLDER_ID, StandInProcessor, picture, stand_in_media

VOCAB, EOS = 4, 3


def model(context: Sequence[int]) -> np.ndarray:
    """A language model: logprobs that depend on the whole context."""
    logits = np.random.default_rng(list(context)).normal(size=VOCAB) * 2
    return logits - math.log(np.exp(logits).sum())


def run(params: SamplingParams, prompts: list[tuple[int, list[int]]]) -> list[RequestOutput]:
    """One step of every prompt."""
    outputs = []
    for _, prompt in prompts:
        logprobs = model(prompt)
        wanted = params.logprob_token_ids or np.argsort(-logprobs)[: params.logprobs].tolist()
        row = {int(token): Logprob(float(logprobs[token])) for token in wanted}
        outputs.append(
            RequestOutput(
                "r", None, prompt, [CompletionOutput(0, "", [max(row, key=lambda t: row[t].logprob)], logprobs=[row])], True
            )
        )
    return outputs


def search(params: BeamSearchParams, prompts: Sequence[list[int]] = ([1],), max_model_len: int = 100) -> list[list[list[int]]]:
    step = partial(run, step_params(params, -1))
    found = search_beams(step, prompts, params, eos_token_ids=(EOS,), max_model_len=max_model_len, tokenizer=None)
    return [[sequence.tokens for sequence in output.sequences] for output in found]


def all_answers(
    prompt: list[int], length: int, *, allowed: Sequence[int] = range(VOCAB), end: int | None = EOS
) -> list[tuple[float, list[int]]]:
    """Every answer with its logprob per token, best first."""
    scored = []
    for answer in itertools.chain.from_iterable(itertools.product(allowed, repeat=n) for n in range(1, length + 1)):
        if end in answer[:-1] or (answer[-1] != end and len(answer) < length):
            continue
        total = sum(model([*prompt, *answer[:place]])[token] for place, token in enumerate(answer))
        kept = answer[:-1] if answer[-1] == end else answer
        scored.append((total / len(answer), [*prompt, *kept]))
    return sorted(scored, reverse=True)


@pytest.mark.parametrize("prompt", [[1], [2, 0], [0]])
def test_a_wide_beam_finds_the_best_answers_of_all(prompt: list[int]) -> None:
    expected = [tokens for _, tokens in all_answers(prompt, 4)]
    width = VOCAB**4
    assert search(BeamSearchParams(width, 4), [prompt])[0][:20] == expected[:20]


def test_several_prompts_are_searched_at_once() -> None:
    both = search(BeamSearchParams(3, 5), [[1], [2, 2]])
    assert both == [search(BeamSearchParams(3, 5), [prompt])[0] for prompt in ([1], [2, 2])]
    assert all(len(sequences) == 3 for sequences in both)


def test_a_beam_of_one_is_greedy() -> None:
    tokens = [1]
    for _ in range(5):
        tokens.append(int(np.argmax(model(tokens))))
    assert search(BeamSearchParams(1, 5, ignore_eos=True))[0][0] == tokens


def test_eos_ends_an_answer_and_is_left_out() -> None:
    params = BeamSearchParams(8, 3)
    step = partial(run, step_params(params, -1))
    (output,) = search_beams(step, [[1]], params, eos_token_ids=(9, EOS), max_model_len=100, tokenizer=None)
    ended = [sequence for sequence in output.sequences if sequence.finish_reason == "stop"]
    assert ended and all(EOS not in sequence.tokens and sequence.stop_reason == EOS for sequence in ended)
    assert all(
        sequence.finish_reason == "length" and len(sequence.tokens) == 4
        for sequence in output.sequences
        if sequence not in ended
    )
    with_eos = search(BeamSearchParams(8, 3, include_stop_str_in_output=True))[0]
    assert any(tokens[-1] == EOS for tokens in with_eos)
    assert any(EOS in tokens[:-1] for tokens in search(BeamSearchParams(8, 3, ignore_eos=True))[0])


def test_a_length_penalty_favours_long_answers() -> None:
    lengths = [np.mean([len(t) for t in search(BeamSearchParams(4, 6, length_penalty=p))[0]]) for p in (-3.0, 0.0, 3.0)]
    assert lengths[0] <= lengths[1] <= lengths[2] and lengths[0] < lengths[2]


def test_only_allowed_tokens_are_used() -> None:
    expected = [tokens for _, tokens in all_answers([1], 3, allowed=(0, 2), end=None)]
    assert search(BeamSearchParams(8, 3, allowed_token_ids=[0, 2]))[0] == expected


def test_answers_end_where_the_model_does() -> None:
    assert max(len(tokens) for tokens in search(BeamSearchParams(4, 50, ignore_eos=True), max_model_len=6)[0]) == 6


def test_what_cannot_be_searched_is_a_clear_error(model_directory: Path) -> None:
    core = fake_core(model_directory)
    llm = LLM.from_config(core.config, core=core)
    with pytest.raises(InvalidRequestError, match="beam_width is 11, which takes 22 logprobs.*--max-logprobs"):
        llm.beam_search("hi", BeamSearchParams(11, 5))
    with pytest.raises(InvalidRequestError, match="temperature is 0.5, must be 0"):
        llm.beam_search("hi", BeamSearchParams(2, 5, temperature=0.5))
    with pytest.raises(InvalidRequestError, match="at most 128"):
        llm.beam_search("hi", BeamSearchParams(2, 5, allowed_token_ids=list(range(200))))
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        llm.beam_search("", BeamSearchParams(2, 5))


def test_through_an_llm_answers_have_text(model_directory: Path) -> None:
    core = fake_core(model_directory)
    llm = LLM.from_config(core.config, core=core)
    for output in llm.beam_search(["hi", {"prompt": "ho"}], BeamSearchParams(2, 3)):
        assert len(output.sequences) == 2
        best = output.sequences[0]
        assert best.text == llm.get_tokenizer().decode(best.tokens, skip_special_tokens=True)
    assert all(request.sampling_params.max_tokens == 1 for request in core.requests)


def test_every_step_of_a_prompt_has_its_images(model_directory: Path) -> None:
    core = fake_core(model_directory)
    llm = LLM.from_config(core.config, core=core)
    llm.llm_engine.input_processor.media = stand_in_media(StandInProcessor())
    prompts: list[Any] = [[3, 4], {"prompt_token_ids": [3, PLACEHOLDER_ID], "multi_modal_data": {"image": picture(1, 3)}}]
    _, found = llm.beam_search(prompts, BeamSearchParams(2, 3))
    assert found.sequences[0].tokens[:4] == [3, *[PLACEHOLDER_ID] * 3]
    for request in core.requests:
        assert [item.num_tokens for item in request.items] == ([3] if request.prompt_token_ids[1] == PLACEHOLDER_ID else [])


# Of asyncio programs


@pytest.fixture
def core(model_directory: Path) -> FakeEngineCore:
    return guessing_core(model_directory)


@pytest.fixture
def engine(core: FakeEngineCore) -> Iterator[AsyncLLM]:
    with AsyncLLM(core=core) as engine:
        yield engine
        asyncio.run(engine.check_integrity())
        assert not core.running and not engine._searches


@pytest.fixture
def gate(core: FakeEngineCore) -> Iterator[threading.Semaphore]:
    """Each step of the engine waits to be released."""
    gate = threading.Semaphore(0)
    core.before_step = gate.acquire  # type: ignore[assignment]
    yield gate
    gate.release(1000)


def run_async(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 20))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 3.0])
def test_a_program_finds_what_a_script_finds(model_directory: Path, engine: AsyncLLM, length_penalty: float) -> None:
    params = BeamSearchParams(3, 6, length_penalty=length_penalty)
    llm = LLM.from_config(engine.config, core=guessing_core(model_directory))
    expected = llm.beam_search("hi", params)[0].sequences
    output = run_async(engine.beam_search("hi", params, "r"))
    decode = engine.get_tokenizer().decode
    assert [decode(output.prompt_token_ids, skip_special_tokens=True) + answer.text for answer in output.outputs] == [
        sequence.text for sequence in expected
    ]
    assert [answer.cumulative_logprob for answer in output.outputs] == [sequence.cum_logprob for sequence in expected]
    assert [answer.finish_reason for answer in output.outputs] == [sequence.finish_reason for sequence in expected]
    eos = engine.input_processor.eos_token_ids[0]
    for answer, sequence in zip(output.outputs, expected, strict=True):
        assert answer.token_ids == [*sequence.tokens[3:], *([eos] if answer.finish_reason == "stop" else [])]
    assert output.finished and output.metrics.num_generation_tokens == sum(len(answer.token_ids) for answer in output.outputs)


def test_only_the_logprobs_that_were_asked_for_are_reported(engine: AsyncLLM, core: FakeEngineCore) -> None:
    for asked, num_computed in ((None, 4), (0, 4), (1, 4), (7, 7)):
        output = run_async(engine.beam_search("hi", BeamSearchParams(2, 4, logprobs=asked), "r"))
        assert core.requests[-1].sampling_params.logprobs == num_computed
        for answer in output.outputs:
            if asked is None:
                assert answer.logprobs is None
                continue
            own = [position[token] for position, token in zip(answer.logprobs, answer.token_ids, strict=True)]
            assert sum(entry.logprob for entry in own) == pytest.approx(answer.cumulative_logprob)
            for position, entry in zip(answer.logprobs, own, strict=True):
                ranks = {each.rank for each in position.values()}
                assert ranks == {entry.rank, *range(1, asked + 1)}
                assert all(each.decoded_token is not None for each in position.values())


def test_more_logprobs_do_not_change_what_is_found(engine: AsyncLLM) -> None:
    few, many = (
        run_async(engine.beam_search("hi", BeamSearchParams(1, 6, logprobs=count), "r")).outputs[0].token_ids
        for count in (0, 9)
    )
    assert few == many


def test_all_beams_of_a_step_begin_in_it(engine: AsyncLLM, core: FakeEngineCore) -> None:
    run_async(engine.beam_search("hi", BeamSearchParams(4, 5, ignore_eos=True), "r"))
    assert core.num_steps == 5 and len(core.requests) == 1 + 4 * 4


def test_cancelling_aborts_all_beams(engine: AsyncLLM, core: FakeEngineCore) -> None:
    advance = core._advance

    def only_the_first(running: Any) -> EngineCoreOutput:
        return advance(running) if len(core.requests) == 1 else EngineCoreOutput(running.request.request_id, [])

    core._advance = only_the_first  # type: ignore[method-assign]

    async def main() -> None:
        task = asyncio.create_task(engine.beam_search("hi", BeamSearchParams(4, 50, ignore_eos=True), "r"))
        await until(lambda: len(core.requests) == 1 + 4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not core.running)

    run_async(main())
    assert core.aborted == [request.request_id for request in core.requests[1:]]


def test_a_search_ends_with_the_error_of_a_step_and_the_other_beams_with_it(engine: AsyncLLM, core: FakeEngineCore) -> None:
    add = core.add_request

    def refuse_the_third(request: EngineCoreRequest) -> None:
        if len(core.requests) == 3:
            raise OverloadedError("the queue is full", 7)
        add(request)

    core.add_request = refuse_the_third  # type: ignore[method-assign]
    with pytest.raises(OverloadedError, match="the queue is full"):
        run_async(engine.beam_search("hi", BeamSearchParams(4, 50, ignore_eos=True), "r"))
    assert len(core.requests) == 3


def test_a_step_that_fails_in_the_engine_fails_the_search(engine: AsyncLLM, core: FakeEngineCore) -> None:
    advance = core._advance

    def fail_the_third(running: Any) -> EngineCoreOutput:
        if running.request not in core.requests[2:3]:
            return advance(running)
        del core.running[running.request.request_id]
        return EngineCoreOutput(
            running.request.request_id, [], FinishReason.ERROR, "no room", error_kind=ErrorKind.OUT_OF_MEMORY
        )

    core._advance = fail_the_third  # type: ignore[method-assign]
    params = BeamSearchParams(3, 50, ignore_eos=True)
    with pytest.raises(RequestFailedError, match="no room") as caught:
        run_async(engine.beam_search("hi", params, "r"))
    assert caught.value.kind == "out_of_memory"
    core.requests.clear()

    async def streamed() -> list[RequestOutput]:
        return [output async for output in engine.stream(await engine.prepare("hi", params, "r"))]

    [output] = run_async(streamed())
    assert output.finished and [answer.index for answer in output.outputs] == [0, 1, 2]
    assert {(answer.finish_reason, answer.error_kind) for answer in output.outputs} == {("error", "out_of_memory")}


def test_a_search_can_be_aborted_by_its_id(engine: AsyncLLM, core: FakeEngineCore, gate: threading.Semaphore) -> None:
    async def main() -> RequestOutput:
        task = asyncio.create_task(engine.beam_search("hi", BeamSearchParams(4, 50, ignore_eos=True), "r"))
        gate.release(1)
        await until(lambda: len(core.requests) == 5)
        abort = asyncio.create_task(engine.abort("r"))
        await until(lambda: not engine._searches)
        gate.release(1000)
        await abort
        return await task

    assert [answer.finish_reason for answer in run_async(main()).outputs] == ["abort"] * 4
    assert len(core.requests) == 5


def test_a_search_can_be_aborted_between_two_steps(
    engine: AsyncLLM, core: FakeEngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = engine._run_together

    async def and_abort(requests: Any) -> list[RequestOutput]:
        outputs = await together(requests)
        await engine.abort("r")
        return outputs

    monkeypatch.setattr(engine, "_run_together", and_abort)
    output = run_async(engine.beam_search("hi", BeamSearchParams(4, 50, ignore_eos=True), "r"))
    assert len(core.requests) == 1 and {answer.finish_reason for answer in output.outputs} == {"abort"}


@pytest.mark.parametrize("jump_seconds", [0, 3600, -3600])
def test_its_time_is_that_of_all_steps_and_only_the_first_waits_in_the_queue(
    engine: AsyncLLM, core: FakeEngineCore, jump_seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the machine's time is set meanwhile."""
    real = time.time
    core.before_step = lambda: monkeypatch.setattr(time, "time", lambda: real() + jump_seconds)

    async def main() -> None:
        params = BeamSearchParams(2, 3, ignore_eos=True)
        prompt = {"prompt": "hi", "cache_salt": "s"}
        request = await engine.prepare(prompt, params, "r", RequestOptions(queue_timeout_seconds=30.0, timeout_seconds=60.0))
        async for _ in engine.stream(request):
            pass

    run_async(main())
    first, *others = core.requests
    assert (first.options.queue_timeout_seconds, {other.options.queue_timeout_seconds for other in others}) == (30.0, {None})
    times = [request.options.timeout_seconds for request in core.requests]
    assert times == sorted(times, reverse=True) and times[0] <= 60.0 and times[-1] > 30.0
    assert {request.options.cache_salt for request in core.requests} == {"s"}


def test_what_cannot_be_searched_is_refused_before_anything_runs(engine: AsyncLLM, core: FakeEngineCore) -> None:
    for params, match in (
        (BeamSearchParams(11, 5), "beam_width is 11, which takes 22 logprobs"),
        (BeamSearchParams(2, 5, logprobs=21), "logprobs is 21"),
        (BeamSearchParams(2, 5, logprobs=1, allowed_token_ids=[5]), "logprobs is 1, must be 0"),
        (BeamSearchParams(2, 5, allowed_token_ids=[10**6]), "allowed_token_ids has token id"),
    ):
        with pytest.raises(InvalidRequestError, match=match):
            run_async(engine.beam_search("hi", params, "r"))
    with pytest.raises(InvalidRequestError, match="length_penalty is"):
        BeamSearchParams(2, 5, length_penalty=1e300)
    assert not core.requests

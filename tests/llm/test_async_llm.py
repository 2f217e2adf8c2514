import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllm import unread_streams
from jaxllm.async_llm import AsyncLLM
from jaxllm.errors import EngineDeadError, EngineError, EngineSleepingError, InvalidRequestError
from jaxllm.mailbox import merged
from jaxllm.metrics.metric import Histogram
from jaxllm.outputs import CompletionOutput, Logprob, RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.scripted_core import fake_core
from tests.helpers.stand_in_media import PLACEHOLDER_ID, StandInProcessor, picture, stand_in_media

DELTA = SamplingParams(max_tokens=50, output_kind=RequestOutputKind.DELTA)
ENDLESS = SamplingParams(max_tokens=10_000, output_kind=RequestOutputKind.DELTA, ignore_eos=True)


@pytest.fixture
def core(model_directory: Path) -> FakeEngineCore:
    core = fake_core(model_directory, max_model_len=20_000)
    core.before_step = lambda: time.sleep(0.0005)
    return core


@pytest.fixture
def llm(core: FakeEngineCore) -> Iterator[AsyncLLM]:
    with AsyncLLM(core=core) as llm:
        yield llm
    assert core.is_shut_down and not core.running


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 120))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def text_of(llm: AsyncLLM, prompt: str, request_id: str = "r", params: SamplingParams = DELTA) -> str:
    return "".join([output.outputs[0].text async for output in llm.generate(prompt, params, request_id)])


def test_many_requests_stream_at_once(llm: AsyncLLM, core: FakeEngineCore) -> None:
    async def main() -> None:
        texts = await asyncio.gather(*(text_of(llm, f"prompt {n}", f"r{n}") for n in range(20)))
        assert texts == ["one two three"] * 20

    run(main())


@pytest.mark.parametrize("jump_seconds", [3600, -3600])
def test_times_are_right_though_the_machine_s_time_is_set(
    llm: AsyncLLM, core: FakeEngineCore, jump_seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    core.before_step = lambda: monkeypatch.setattr(time, "time", lambda: real() + core.num_steps % 2 * jump_seconds)

    async def main() -> None:
        outputs = [output async for output in llm.generate("hi", DELTA, "r")]
        metrics = outputs[-1].metrics
        assert metrics is not None and metrics.first_token_time is not None and metrics.finished_time is not None
        assert abs(metrics.arrival_time - real()) < 60
        assert 0 <= metrics.first_token_time - metrics.arrival_time <= metrics.finished_time - metrics.arrival_time < 60
        sums = {metric.name: metric.sum for metric in await llm.get_metrics() if isinstance(metric, Histogram)}
        times = [value for name, value in sums.items() if name.endswith("seconds")]
        assert len(times) > 3 and all(0 <= value < 60 for value in times)

    run(main())


def test_requests_of_a_caller_that_does_not_read_are_held_until_it_does(
    llm: AsyncLLM, core: FakeEngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unread_streams, "TICK_SECONDS", 0.005)

    async def main() -> None:
        unread = llm.hold_unread_streams()
        params = SamplingParams(max_tokens=300, output_kind=RequestOutputKind.DELTA, n=2, ignore_eos=True)
        stream = llm.generate("a prompt", params, "unread")
        reader = asyncio.ensure_future(text_of(llm, "x", "read", ENDLESS))
        received = {0: 0, 1: 0}

        async def take() -> None:
            for answer in (await anext(stream)).outputs:
                received[answer.index] += len(answer.token_ids)

        await take()
        await until(lambda: len(core.held) == 2)
        assert unread.num_held == 1 and len(core.running) == 3
        count = core.num_steps
        await until(lambda: core.num_steps > count + 20)  # for the one who reads
        await take()
        await until(lambda: not core.held)
        with contextlib.suppress(StopAsyncIteration):
            while True:
                await take()
        assert received == {0: 300, 1: 300}
        reader.cancel()
        await asyncio.wait({reader})
        gone = llm.generate("a prompt", ENDLESS, "gone")
        await anext(gone)
        await until(lambda: bool(core.held & core.running.keys()))
        await gone.aclose()
        await until(lambda: not core.running)

    run(main())


def test_a_slow_caller_loses_nothing(llm: AsyncLLM, core: FakeEngineCore) -> None:
    async def main() -> None:
        params = SamplingParams(max_tokens=50, output_kind=RequestOutputKind.DELTA, logprobs=1, n=2)
        outputs = []
        async for output in llm.generate("hi", params, "r"):
            outputs.append(output)
            await until(lambda: not core.running)
        assert len(outputs) < 5, "nothing was merged"
        for index in range(2):
            answers = [answer for output in outputs for answer in output.outputs if answer.index == index]
            assert "".join(answer.text for answer in answers) == "one two three"
            assert sum(len(answer.token_ids) for answer in answers) == sum(len(answer.logprobs or []) for answer in answers)
            assert [answer.finish_reason for answer in answers][-1] == "stop"

    run(main())


def test_closing_or_cancelling_aborts_and_the_id_can_be_used_again(llm: AsyncLLM, core: FakeEngineCore) -> None:
    async def first_output() -> None:
        generator = llm.generate("hi", ENDLESS, "r")
        async for _ in generator:
            break
        await generator.aclose()

    async def main() -> None:
        for _ in range(3):
            await first_output()
            await until(lambda: not core.running)
            task = asyncio.create_task(text_of(llm, "hi", "r", ENDLESS))
            await until(lambda: bool(core.running))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: not core.running)
        assert await text_of(llm, "hi") == "one two three"

    run(main())
    assert len(core.aborted) == 6


def test_aborting_by_id_ends_every_request_of_that_id(llm: AsyncLLM, core: FakeEngineCore) -> None:
    async def main() -> None:
        async def last() -> RequestOutput:
            outputs = [output async for output in llm.generate("hi", ENDLESS, "same")]
            return outputs[-1]

        tasks = [asyncio.create_task(last()) for _ in range(3)]
        await until(lambda: len(core.running) == 3)
        await llm.abort("same")
        for output in await asyncio.gather(*tasks):
            assert output.finished and output.outputs[0].finish_reason == "abort"
        assert not core.running

    run(main())


def test_images_are_prepared_beside_the_event_loop_and_freed_once_the_answer_begins(
    llm: AsyncLLM, core: FakeEngineCore
) -> None:
    threads: set[str] = set()

    class Preparing(StandInProcessor):
        def process(self, *given: Any) -> Any:
            threads.add(threading.current_thread().name.rpartition("_")[0])
            return super().process(*given)

    llm.input_processor.media = stand_in_media(Preparing())
    prompt: Any = {
        "prompt_token_ids": [3, PLACEHOLDER_ID, 4, PLACEHOLDER_ID],
        "multi_modal_data": {"image": [picture(1, 3), picture(2, 2)]},
    }

    async def main() -> None:
        request = await llm.prepare(prompt, SamplingParams(n=2, max_tokens=2), "r")
        assert threads == {"jaxllm-images"}
        assert [[len(item.payload) for item in child.items] for child in request.children] == [[3, 4]] * 2
        async for _ in llm.stream(request):
            assert [[len(item.payload) for item in child.items] for child in request.children] == [[0, 0]] * 2
        with pytest.raises(InvalidRequestError, match="is no image"):
            await llm.prepare({**prompt, "multi_modal_data": {"image": [3, 4]}}, DELTA, "r")

    run(main())
    assert [[len(item.payload) for item in sent.items] for sent in core.requests] == [[3, 4]] * 2


def test_a_bad_request_is_its_own_affair(llm: AsyncLLM) -> None:
    async def main() -> None:
        with pytest.raises(InvalidRequestError, match="prompt is empty"):
            await text_of(llm, "")
        assert await text_of(llm, "hi") == "one two three"

    run(main())


def test_a_request_that_the_core_refuses_is_its_own_affair(
    llm: AsyncLLM, core: FakeEngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(request: object) -> None:
        raise InvalidRequestError("never fits")

    async def main() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(core, "add_request", refuse)
            with pytest.raises(InvalidRequestError, match="never fits"):
                await text_of(llm, "hi")
        assert await text_of(llm, "hi") == "one two three"

    run(main())


def test_a_dead_engine_ends_every_request_and_refuses_later_ones(llm: AsyncLLM, core: FakeEngineCore) -> None:
    def fail() -> None:
        if len(core.running) == 3:
            raise EngineDeadError("the device is lost")
        time.sleep(0.001)

    core.before_step = fail

    async def main() -> None:
        await llm.check_health()
        results = await asyncio.gather(*(text_of(llm, "hi", str(n), ENDLESS) for n in range(3)), return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) and "the device is lost" in str(result) for result in results)
        for call in (text_of(llm, "hi"), llm.check_health(), llm.get_metrics(), llm.abort("r")):
            with pytest.raises(EngineDeadError):
                await call
        assert not llm.is_running and llm.dead_error is not None

    run(main())


def test_a_failed_step_that_is_not_fatal_ends_its_requests_only(llm: AsyncLLM, core: FakeEngineCore) -> None:
    failures = [EngineError("bad step")]

    def fail_once() -> None:
        if failures:
            raise failures.pop()

    core.before_step = fail_once

    async def main() -> None:
        with pytest.raises(EngineError, match="bad step"):
            await text_of(llm, "hi")
        assert await text_of(llm, "hi") == "one two three"

    run(main())


def test_shutting_down_ends_requests_with_abort(core: FakeEngineCore) -> None:
    async def main() -> None:
        llm = AsyncLLM(core=core)
        generator = llm.generate("hi", ENDLESS, "r")
        await anext(generator)
        await asyncio.to_thread(llm.shutdown)
        outputs = [output async for output in generator]
        assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
        with pytest.raises(EngineDeadError, match="shut down"):
            await text_of(llm, "hi")
        llm.shutdown()

    run(main())
    assert core.is_shut_down


def test_metrics_and_cache_are_served_between_steps(llm: AsyncLLM, core: FakeEngineCore) -> None:
    async def main() -> None:
        task = asyncio.create_task(text_of(llm, "hi", "r", ENDLESS))
        await until(lambda: bool(core.running))
        gauges = {metric.name: getattr(metric, "value", None) for metric in await llm.get_metrics()}
        assert gauges["jaxllm:num_requests_running"] == 1
        assert await llm.reset_prefix_cache() is False
        task.cancel()
        await until(lambda: not core.running)
        assert await llm.reset_prefix_cache() is True

    run(main())


def test_a_caller_that_goes_away_while_the_thread_is_busy_harms_nobody(llm: AsyncLLM, core: FakeEngineCore) -> None:
    async def main() -> None:
        may_go_on = threading.Event()
        core.before_step = may_go_on.wait
        task = asyncio.create_task(text_of(llm, "hi"))
        await until(lambda: core.num_steps == 1)
        for call in (llm.get_metrics(), llm.abort("other")):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(call, 0.001)
        may_go_on.set()
        assert await task == "one two three" and llm.is_running

    run(main())


def test_a_generator_dropped_without_closing_is_aborted(llm: AsyncLLM, core: FakeEngineCore) -> None:
    async def main() -> None:
        generator = llm.generate("hi", ENDLESS, "r")
        await anext(generator)
        del generator
        gc.collect()
        await until(lambda: not core.running)
        assert len(core.aborted) == 1, "it ran to its end"

    run(main())


def test_deltas_merge_and_whole_outputs_replace() -> None:
    def output(index: int, text: str, reason: str | None = None) -> RequestOutput:
        row = {1: Logprob(-1.0)}
        return RequestOutput("r", None, [1], [CompletionOutput(index, text, [1], -1.0, [row], reason)], reason is not None)

    both = merged(output(0, "a"), output(0, "b", "stop"), RequestOutputKind.DELTA)
    assert (both.outputs[0].text, both.outputs[0].token_ids, both.outputs[0].finish_reason) == ("ab", [1, 1], "stop")
    assert both.finished and len(both.outputs[0].logprobs or []) == 2
    two = merged(output(1, "a"), output(0, "b"), RequestOutputKind.DELTA)
    assert [answer.index for answer in two.outputs] == [0, 1]
    assert merged(output(0, "a"), output(0, "ab"), RequestOutputKind.CUMULATIVE).outputs[0].text == "ab"


def test_falling_asleep_aborts_what_runs_and_waking_up_serves_again(llm: AsyncLLM, core: FakeEngineCore) -> None:
    async def main() -> None:
        running = asyncio.create_task(text_of(llm, "hi", params=ENDLESS))
        await until(lambda: bool(core.running))
        await llm.sleep()
        await running
        assert await llm.is_sleeping()
        with pytest.raises(EngineSleepingError):
            await text_of(llm, "hi")
        await llm.wake_up()
        assert await text_of(llm, "hi") == "one two three"
        await llm.check_integrity()

    run(main())


def test_a_request_left_behind_is_noticed(llm: AsyncLLM, core: FakeEngineCore) -> None:
    async def main() -> None:
        running = asyncio.create_task(text_of(llm, "hi", params=ENDLESS))
        await until(lambda: bool(core.running))
        with pytest.raises(AssertionError, match="1 mailboxes"):
            await llm.check_integrity()
        running.cancel()

    run(main())

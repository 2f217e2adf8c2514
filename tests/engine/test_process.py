import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.engine.sockets import EXIT_HUNG
from jaxllm.errors import EngineDeadError, EngineError, EngineSleepingError, InvalidRequestError
from jaxllm.outputs import RequestOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from tests.helpers.engine_processes import Served, served, until
from tests.helpers.fake_engine_core import WIDTH
from tests.helpers.served_core import SLOW_FACTORY
from tests.helpers.tiny_tokenizers import write_tokenizer

DELTA = SamplingParams(max_tokens=50, output_kind=RequestOutputKind.DELTA)
ENDLESS = SamplingParams(max_tokens=10_000, output_kind=RequestOutputKind.DELTA, ignore_eos=True)


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared(model_directory: Path) -> Iterator[Served]:
    """One engine process for all tests that leave it alive."""
    with served(model_directory) as engine:
        yield engine
        assert engine.end() == 0


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 30))


async def text_of(llm: AsyncLLM, prompt: str = "hi", request_id: str = "r", params: SamplingParams = DELTA) -> str:
    return "".join([output.outputs[0].text async for output in llm.generate(prompt, params, request_id)]).strip()


async def begun(llm: AsyncLLM, prompt: str = "hi", request_id: str = "r") -> "asyncio.Task[str]":
    """An endless request that has its first token."""
    first = asyncio.Event()

    async def consume() -> str:
        text = ""
        async for output in llm.generate(prompt, ENDLESS, request_id):
            text += output.outputs[0].text
            first.set()
        return text

    task = asyncio.create_task(consume())
    await first.wait()
    return task


async def num_running(llm: AsyncLLM) -> float:
    return next(metric.value for metric in await llm.get_metrics() if metric.name == "jaxllm:num_requests_running")


async def until_running(llm: AsyncLLM, count: int) -> None:
    while await num_running(llm) != count:
        pass


async def until_idle(llm: AsyncLLM) -> None:
    await until_running(llm, 0)


def test_vectors_come_from_the_engine_process(shared: Served) -> None:
    async def main() -> None:
        async with shared.front() as llm:
            params = PoolingParams(task="token_embed", use_activation=False)
            outputs = await asyncio.gather(*(llm.pool([place, 5], params, str(place)) for place in range(8)))
            for place, output in enumerate(outputs):
                np.testing.assert_array_equal(output.outputs.data, np.eye(WIDTH, dtype=np.float32)[[place, 5]])
            with pytest.raises(InvalidRequestError, match="dimensions"):
                await llm.pool([1], PoolingParams(dimensions=2), "r")

    run(main())


def test_many_requests_stream_at_once(shared: Served) -> None:
    async def main() -> None:
        async with shared.front() as llm:
            texts = await asyncio.gather(*(text_of(llm, f"prompt {n}", f"r{n}") for n in range(30)))
            assert texts == ["one two three"] * 30
            await until_idle(llm)

    run(main())


def test_closing_or_cancelling_aborts_in_the_engine(shared: Served) -> None:
    async def main() -> None:
        async with shared.front() as llm:
            for _ in range(2):
                task = await begun(llm)
                assert await num_running(llm) == 1
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await until_idle(llm)
                assert await num_running(llm) == 0

    run(main())


def test_aborting_by_id_gives_a_last_output(shared: Served) -> None:
    async def main() -> None:
        async with shared.front() as llm:

            async def last() -> RequestOutput:
                outputs = [output async for output in llm.generate("hi", ENDLESS, "same")]
                return outputs[-1]

            tasks = [asyncio.create_task(last()) for _ in range(3)]
            await until_running(llm, 3)
            await llm.abort("same")
            for output in await asyncio.gather(*tasks):
                assert output.finished and output.outputs[0].finish_reason == "abort"
            await until_idle(llm)

    run(main())


def test_an_engine_that_sleeps_ends_and_refuses_requests_of_every_front(shared: Served) -> None:
    async def main() -> None:
        async with shared.front(0) as one, shared.front(1) as other:
            running = await begun(one)
            await other.sleep(1)
            await running
            assert await one.is_sleeping() and await other.is_sleeping()
            for llm in (one, other):
                with pytest.raises(EngineSleepingError):
                    await text_of(llm)
            await one.wake_up()
            assert await text_of(other) == "one two three"
            await one.check_integrity()

    run(main())


def test_what_the_core_refuses_ends_that_request_alone(shared: Served) -> None:
    async def main() -> None:
        async with shared.front() as llm:
            other = await begun(llm)
            with pytest.raises(InvalidRequestError, match="never fits") as raised:
                await text_of(llm, "refuse this")
            assert raised.value.param == "prompt"
            with pytest.raises(EngineError, match="RuntimeError") as hidden:
                await text_of(llm, "stumble here", params=SamplingParams(n=2))
            assert "/some/path" not in str(hidden.value)
            assert not other.done() and await text_of(llm) == "one two three"
            other.cancel()
            await until_idle(llm)

    run(main())


def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(shared: Served) -> None:
    async def main() -> None:
        async with shared.front(0) as llm, shared.front(1) as other:
            task = await begun(other)
            for failing in (text_of(llm, "fail now"), task):
                with pytest.raises(EngineError, match="bad step"):
                    await failing
            assert await text_of(llm) == await text_of(other) == "one two three"

    run(main())


def test_two_fronts_may_use_the_same_ids_and_share_metrics(shared: Served) -> None:
    def succeeded(metrics: list[Any]) -> int:
        return sum(m.value for m in metrics if m.name == "jaxllm:request_success" and m.labels["finished_reason"] == "stop")

    async def main() -> None:
        async with shared.front(0) as one, shared.front(1) as two:
            before = succeeded(await one.get_metrics())
            texts = await asyncio.gather(*(text_of(llm, request_id="same") for llm in (one, two) for _ in range(5)))
            assert texts == ["one two three"] * 10
            await two.get_metrics()
            assert succeeded(await one.get_metrics()) - before == 10
            two.shutdown()
            await until_idle(one)
            assert succeeded(await one.get_metrics()) - before == 10, "what a front counted was lost with it"

    run(main())


def test_calls_reach_the_core_between_steps(shared: Served) -> None:
    async def main() -> None:
        async with shared.front() as llm:
            task = await begun(llm)
            assert await llm.reset_prefix_cache() is False
            assert await llm.reset_prefix_cache(reset_running_requests=True) is True
            task.cancel()

    run(main())


def test_garbage_is_refused_and_nothing_dies(shared: Served) -> None:
    import random

    import zmq

    from jaxllm.engine import messages
    from jaxllm.engine.sockets import socket_address
    from jaxllm.request import EngineCoreRequest

    random_source = random.Random(0)
    request = EngineCoreRequest(request_id="x", prompt_token_ids=[1, 2, 3], sampling_params=DELTA)
    whole = messages.encode(messages.Add("nobody", request))
    frames = [b"", b"\xc1", b"\x91" * 5000, whole[:-1], *(whole[:size] for size in range(0, len(whole), 7))]
    for _ in range(300):
        frame = bytearray(whole)
        for _ in range(random_source.randint(1, 4)):
            frame[random_source.randrange(len(frame))] = random_source.randrange(256)
        frames.append(bytes(frame))
    frames += [random_source.randbytes(random_source.randrange(200)) for _ in range(300)]

    async def main() -> None:
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.connect(socket_address(shared.directory, "engine"))
            for frame in frames:
                socket.send(frame)
        async with shared.front() as llm:
            front = shared.client(5)
            for frame in frames:
                try:
                    message = messages.decode_engine_message(frame)
                except messages.MessageError:
                    continue
                front._take(message)
            front.close()
            assert await text_of(llm) == "one two three"

    run(main())


def test_an_add_that_cannot_be_read_ends_that_request(shared: Served) -> None:
    async def main() -> None:
        async with shared.front() as llm:
            request = await llm.prepare("hi", DELTA, "r")
            request.children[0].sampling_params.temperature = -5.0
            with pytest.raises(EngineError, match="could not read the request"):
                async for _ in llm.stream(request):
                    pass
            assert await text_of(llm) == "one two three"

    run(main())


# Ends of engine processes; each has its own


async def seconds_until_dead(llm: AsyncLLM, cause: Callable[[], None], num_requests: int = 20) -> float:
    """How long after the cause every request has ended with EngineDeadError."""
    tasks = [await begun(llm, request_id=str(n)) for n in range(num_requests)]
    start = time.monotonic()
    cause()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    seconds = time.monotonic() - start
    assert all(isinstance(result, EngineDeadError) for result in results)
    assert llm.dead_error is not None and not llm.is_running
    for call in (text_of(llm), llm.check_health(), llm.get_metrics()):
        with pytest.raises(EngineDeadError):
            await call
    return seconds


def test_every_request_hears_of_the_engine_s_end_at_once(model_directory: Path) -> None:
    async def main() -> None:
        with served(model_directory) as engine:
            async with engine.front() as llm:
                assert await seconds_until_dead(llm, engine.process.kill) < 5.0

    run(main())


def test_a_fatal_step_is_told_and_ends_the_process(model_directory: Path) -> None:
    async def main() -> None:
        with served(model_directory) as engine:
            async with engine.front() as llm:
                with pytest.raises(EngineDeadError, match="the device is lost"):
                    await text_of(llm, "die now")
                assert "the device is lost" in str(llm.dead_error)
            assert await asyncio.to_thread(engine.process.wait, 10) == 1

    run(main())


def test_a_step_that_hangs_is_found_but_not_one_that_compiles(model_directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        with served(model_directory, step_timeout_seconds=0.5) as engine:
            async with engine.front() as llm:
                assert await text_of(llm, "compile first") == "one two three"
                with pytest.raises(EngineDeadError, match="--step-timeout 0"):
                    await text_of(llm, "hang now")
            assert await asyncio.to_thread(engine.process.wait, 10) == EXIT_HUNG

    run(main())
    assert "served_core.py" in capfd.readouterr().err, "no stacks in the log"


def test_loading_is_told_with_phase_and_amount_and_its_failure_with_the_reason(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path)

    async def main() -> None:
        with served(directory, SLOW_FACTORY) as engine:
            client = engine.client()
            await until(lambda: client.status is not None and client.status.phase == "loading weights")
            assert client.status is not None
            assert (client.status.state, client.status.done, client.status.total) == ("loading", 1, 4)
            (directory / "bad").touch()
            (directory / "go").touch()
            with pytest.raises(EngineDeadError, match="the weights are torn"):
                await client.ready()
            client.close()
            assert await asyncio.to_thread(engine.process.wait, 10) == 1

    run(main())


def test_the_engine_ends_when_its_parent_is_gone(model_directory: Path) -> None:
    async def main() -> None:
        with served(model_directory) as engine:
            async with engine.front() as llm:
                assert await text_of(llm) == "one two three"
                assert engine.process.stdin is not None
                engine.process.stdin.close()  # as the kernel does when the parent dies
                await until(lambda: llm.dead_error is not None)
            assert await asyncio.to_thread(engine.process.wait, 10) == 1

    run(main())


KILLED_FRONT = """
import asyncio, sys
from jaxllm.async_llm import AsyncLLM
from jaxllm.engine.client import EngineClient
from jaxllm.sampling_params import SamplingParams

async def main():
    llm = await AsyncLLM.connect(EngineClient(sys.argv[1], int(sys.argv[2]), index=3))
    params = SamplingParams(max_tokens=10_000, ignore_eos=True, n=4)
    async for output in llm.generate("hi", params, "r"):
        print("jax" in sys.modules, flush=True)
asyncio.run(main())
"""


def test_the_requests_of_a_front_that_was_killed_are_aborted_and_a_front_imports_no_jax(shared: Served) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", KILLED_FRONT, str(shared.directory), str(shared.process.pid)]

    async def main() -> None:
        async with shared.front() as llm:
            with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as killed:
                assert killed.stdout is not None
                assert await asyncio.to_thread(killed.stdout.readline) == b"False\n"
                assert await num_running(llm) == 4
                killed.kill()
            await until_idle(llm)
            assert await num_running(llm) == 0

    run(main())

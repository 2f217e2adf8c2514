import asyncio
import faulthandler
import itertools
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from jaxllm.async_llm import AsyncLLM
from jaxllm.engine import messages, process, process_core, sockets
from jaxllm.engine.client import EngineClient
from jaxllm.engine.launch import socket_directory
from jaxllm.engine.process import EngineLoop
from jaxllm.engine.sockets import ENGINE_SOCKET, EXIT_HUNG, Listener, Pulse, Stop, socket_address
from jaxllm.errors import EngineDeadError, EngineError, EngineSleepingError, EngineStalledError, InvalidRequestError
from jaxllm.metrics.metric import Counter, Gauge, Histogram
from jaxllm.outputs import EngineCoreOutput, RequestOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.request import EngineCoreRequest, PromptItem
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.scheduler_stats import SchedulerStats
from tests.helpers.engine_processes import Served, served, until
from tests.helpers.fake_engine_core import WIDTH, FakeEngineCore, fake_logprobs
from tests.helpers.served_core import SLOW_FACTORY
from tests.helpers.tiny_tokenizers import write_tokenizer
from tests.helpers.waiting import wait_until

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
    return asyncio.run(asyncio.wait_for(coroutine, 120))


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
        async with shared.connected() as llm:
            params = PoolingParams(task="token_embed", use_activation=False)
            outputs = await asyncio.gather(*(llm.pool([place, 5], params, str(place)) for place in range(8)))
            for place, output in enumerate(outputs):
                np.testing.assert_array_equal(output.outputs.data, np.eye(WIDTH, dtype=np.float32)[[place, 5]])
            with pytest.raises(InvalidRequestError, match="dimensions"):
                await llm.pool([1], PoolingParams(dimensions=2), "r")

    run(main())


def test_many_requests_stream_at_once(shared: Served) -> None:
    async def main() -> None:
        async with shared.connected() as llm:
            texts = await asyncio.gather(*(text_of(llm, f"prompt {n}", f"r{n}") for n in range(30)))
            assert texts == ["one two three"] * 30
            await until_idle(llm)

    run(main())


def test_closing_or_cancelling_aborts_in_the_engine(shared: Served) -> None:
    async def main() -> None:
        async with shared.connected() as llm:
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
        async with shared.connected() as llm:

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


def test_an_engine_that_sleeps_ends_and_refuses_requests_of_every_client(shared: Served) -> None:
    async def main() -> None:
        async with shared.connected(0) as one, shared.connected(1) as other:
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


def test_a_pause_is_that_of_every_client(shared: Served) -> None:
    async def main() -> None:
        async with shared.connected(0) as one, shared.connected(1) as other:
            running = await begun(one)
            await other.pause("abort")
            await running
            assert await one.is_paused() and await other.is_paused()
            await one.resume()
            assert await text_of(other) == "one two three" and not await other.is_paused()
            await one.check_integrity()

    run(main())


def test_what_the_core_refuses_ends_that_request_alone(shared: Served) -> None:
    async def main() -> None:
        async with shared.connected() as llm:
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
        async with shared.connected(0) as llm, shared.connected(1) as other:
            task = await begun(other)
            for failing in (text_of(llm, "fail now"), task):
                with pytest.raises(EngineError, match="bad step"):
                    await failing
            assert await text_of(llm) == await text_of(other) == "one two three"

    run(main())


def test_two_clients_may_use_the_same_ids_and_share_metrics(shared: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_core, "SHARE_SECONDS", 30.0)  # a busy machine may take more than a second

    def succeeded(metrics: list[Any]) -> int:
        return sum(m.value for m in metrics if m.name == "jaxllm:request_success" and m.labels["finished_reason"] == "stop")

    async def main() -> None:
        async with shared.connected(0) as one, shared.connected(1) as two:
            before = succeeded(await one.get_metrics())
            texts = await asyncio.gather(*(text_of(llm, request_id="same") for llm in (one, two) for _ in range(5)))
            assert texts == ["one two three"] * 10
            assert succeeded(await one.get_metrics()) - before == 10
            two.shutdown()
            await until_idle(one)
            assert succeeded(await one.get_metrics()) - before == 10, "what a client counted was lost with it"

    run(main())


def test_a_client_that_does_not_answer_holds_up_one_scrape_alone(shared: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        stopped = shared.client(1)
        await stopped.ready()
        await stopped.call(messages.ShareMetrics([Counter("jaxllm:test_stopped", {}, "", 7)]))

        def seen(metrics: list[Any]) -> list[float]:
            return [metric.value for metric in metrics if metric.name == "jaxllm:test_stopped"]

        async with shared.connected(0) as llm:
            monkeypatch.setattr(process_core, "SHARE_SECONDS", 0.05)
            assert seen(await llm.get_metrics()) in ([], [7])  # it waits as long as it may
            await llm.call_core("is_paused")  # so the engine has been asked
            await asyncio.sleep(1.1)
            monkeypatch.setattr(process_core, "SHARE_SECONDS", 600.0)
            async with asyncio.timeout(60):
                assert seen(await llm.get_metrics()) == [7]
        stopped.close()

    run(main())


def test_metrics_that_a_client_shared_before_it_was_asked_do_not_answer_a_scrape(
    shared: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_core, "SHARE_SECONDS", 30.0)  # a busy machine may take more than a second

    def share(client: EngineClient, count: int, asked: int) -> asyncio.Future[Any]:
        own = [Counter("jaxllm:test_shared", {}, "", count)]
        return client.call(messages.ShareMetrics(own, asked=asked))

    async def main() -> None:
        other = shared.client(1)
        await other.ready()
        await share(other, 1, asked=0)
        replies: list[asyncio.Future[Any]] = []

        def asked(number: int) -> None:
            replies.append(share(other, 1, asked=number - 1))  # was under way
            replies.append(share(other, 2, asked=number))

        other.on_want_metrics = asked
        async with shared.connected(0) as llm:
            found = await llm.get_metrics()
            assert [m.value for m in found if m.name == "jaxllm:test_shared"] == [2]
            await asyncio.gather(*replies)
        other.close()

    run(main())


def test_calls_reach_the_core_between_steps(shared: Served) -> None:
    async def main() -> None:
        async with shared.connected() as llm:
            task = await begun(llm)
            assert await llm.reset_prefix_cache() is False
            assert await llm.reset_prefix_cache(reset_running_requests=True) is True
            task.cancel()

    run(main())


def damaged(whole: bytes, source: random.Random) -> list[bytes]:
    """A message cut short, and with bytes of it changed."""
    frames = [b"", b"\xc1", b"\x91" * 5000, whole[:-1], *(whole[:size] for size in range(0, len(whole), 7))]
    for _ in range(300):
        frame = bytearray(whole)
        for _ in range(source.randint(1, 4)):
            frame[source.randrange(len(frame))] = source.randrange(256)
        frames.append(bytes(frame))
    return frames + [source.randbytes(source.randrange(200)) for _ in range(300)]


def strange_messages() -> Iterator[Any]:
    """Valid messages that no API server sends."""
    name = "client-0-0123456789abcdef"
    for client in (name, "../" + name, "", "a" * 200 + "-0-0123456789abcdef", "client-" + "1" * 300 + "-0123456789abcdef"):
        for pid in (-1, 0, 1 << 31, 1 << 40, 1 << 63, os.getpid()):
            yield messages.Hello(client, pid)
        yield from (messages.Abort(client, ["x", ""]), messages.NoMore(client), messages.Bye(client), messages.Bye(client))
        for metric in (Counter("m", {}, "", -1.0), Gauge("m", {}, "", float("nan")), Histogram("m", {}, "", -1, 0.0, {"a": 1})):
            yield messages.Call(client, -1, messages.ShareMetrics([metric, metric], fresh=True, asked=1 << 62))


def test_garbage_is_refused_at_both_ends_and_nothing_dies(shared: Served) -> None:
    source = random.Random(0)
    request = EngineCoreRequest(request_id="x", prompt_token_ids=[1, 2, 3], sampling_params=DELTA)
    output = EngineCoreOutput("x", [1], new_logprobs=fake_logprobs([1], 2, 100), pooled=np.ones((2, 3), np.float32))
    load = messages.Load(SchedulerStats(1, 2, 0.5, 0, 0, 0, 0, 0))
    sent = [messages.Outputs([output], load), messages.Status("running", 0.1, load=load), messages.Reply(1, True)]
    sent += [messages.Refused("x", messages.Fault("invalid", "no")), messages.Failed("no")]

    def send(socket: zmq.Socket[bytes], *whole: Any) -> None:
        for message in whole:
            for frame in damaged(messages.encode(message), source):
                socket.send(frame)
        socket.send(messages.encode(messages.Failed("the end")))  # which an API server never sends

    async def main() -> None:
        # Open to the end: what a receiver has not read when its peer goes is lost.
        with zmq.Context() as context, context.socket(zmq.PUSH) as to_engine, context.socket(zmq.PUSH) as to_client:
            to_engine.connect(socket_address(shared.directory, ENGINE_SOCKET))
            await asyncio.to_thread(send, to_engine, messages.Add("nobody", request))
            for message in strange_messages():
                to_engine.send(messages.encode(message))
            async with shared.connected() as llm:
                for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b""):  # no socket of ZeroMQ
                    with socket.socket(socket.AF_UNIX) as raw:
                        raw.connect(str(shared.directory / ENGINE_SOCKET))
                        raw.sendall(data)
                client, all_came = shared.client(5), asyncio.Event()
                receiver = await AsyncLLM.connect(client)
                client.on_failed = lambda message: all_came.set() if message.message == "the end" else None
                to_client.connect(socket_address(shared.directory, client.name))
                await asyncio.to_thread(send, to_client, *sent)
                await all_came.wait()
                assert await text_of(receiver) == await text_of(llm) == "one two three"
                receiver.shutdown()

    run(main())


BAD_ARRAYS = [("|O", (1,), b"12345678"), ("<f4", (-1,), b""), ("<f4", (1 << 62, 4), b""), ("<f4", (2,), b"1234")]


@pytest.mark.parametrize(("dtype", "shape", "data"), BAD_ARRAYS)
def test_arrays_that_are_none_are_refused(dtype: str, shape: tuple[int, ...], data: bytes) -> None:
    load = messages.Load(SchedulerStats(1, 2, 0.5, 0, 0, 0, 0, 0))
    good = messages.encode(messages.Outputs([EngineCoreOutput("x", [1], pooled=np.ones(2, np.float32))], load))
    fields = msgspec.msgpack.decode(good)
    array = next(value for value in fields[1][0] if isinstance(value, list) and value[:1] == ["<f4"])
    array[:] = [dtype, shape, data]
    with pytest.raises(messages.MessageError):
        messages.decode_engine_message(msgspec.msgpack.encode(fields))


def test_an_add_that_cannot_be_read_ends_that_request(shared: Served) -> None:
    async def main() -> None:
        async with shared.connected() as llm:
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
            async with engine.connected() as llm:
                assert await seconds_until_dead(llm, engine.process.kill) < 30

    run(main())


def test_an_engine_that_drains_ends_once_every_client_has_let_it_go(model_directory: Path) -> None:
    async def work() -> None:
        with served(model_directory) as engine:
            async with engine.connected() as llm, engine.connected(1) as other:
                client = other._core._client  # type: ignore[attr-defined]
                client.on_draining = lambda: None
                answers = await begun(llm, request_id="a"), await begun(other, request_id="b")
                client.drain()
                await until(lambda: client.is_draining)
                late = engine.client(2)
                await llm.abort("a")
                assert await answers[0]
                assert await text_of(other, request_id="c"), "what a client sends before it lets go is answered"
                await other.abort("b")
                assert await answers[1] and engine.process.poll() is None
                client.let_go()
                await until(lambda: engine.process.poll() is not None)
                assert engine.process.returncode == 0 and not late.is_ready
                late.close()

    run(work())


def test_a_prefill_engine_that_drains_ends_once_its_blocks_are_fetched(model_directory: Path) -> None:
    async def work() -> None:
        with served(model_directory) as engine:
            leased = model_directory / "leased"
            leased.touch()
            try:
                async with engine.connected() as llm:
                    client = llm._core._client  # type: ignore[attr-defined]
                    client.drain()
                    await until(lambda: client.is_draining)  # it is let go at once
                    await asyncio.sleep(1.0)
                    assert engine.process.poll() is None
                    leased.unlink()
                    await until(lambda: engine.process.poll() is not None)
                    assert engine.process.returncode == 0
            finally:
                leased.unlink(missing_ok=True)

    run(work())


def test_a_fatal_step_is_told_and_ends_the_process(model_directory: Path) -> None:
    async def main() -> None:
        with served(model_directory) as engine:
            async with engine.connected() as llm:
                with pytest.raises(EngineDeadError, match="the device is lost"):
                    await text_of(llm, "die now")
                assert "the device is lost" in str(llm.dead_error)
                assert await asyncio.to_thread(engine.process.wait, 60) == 1

    run(main())


@pytest.mark.slow
def test_an_engine_process_that_stands_still_is_found(model_directory: Path) -> None:
    async def main() -> None:
        with served(model_directory) as engine:
            client = engine.client(silence_seconds=2.0, stall_seconds=0.75)
            told: list[str | None] = []
            client.on_stall = told.append
            llm = await AsyncLLM.connect(client)
            task = await begun(llm)
            await llm.check_ready()
            engine.process.send_signal(signal.SIGSTOP)
            await until(lambda: llm.replicas()[0].state == "stalled")
            with pytest.raises(EngineStalledError, match="no sign of life from the engine process for 1 s"):
                await llm.check_ready()
            await llm.check_health()
            await until(lambda: told)
            engine.process.send_signal(signal.SIGCONT)
            await until(lambda: llm.replicas()[0].state == "serving")
            await llm.check_ready()
            assert not task.done() and await text_of(llm, request_id="s") == "one two three"
            await until(lambda: len(told) == 2)
            assert told[0] is not None and told[1] is None
            engine.process.send_signal(signal.SIGSTOP)
            with pytest.raises(EngineDeadError, match="no sign of life"):
                await task
            client.close()

    run(main())


def test_metrics_are_told_while_a_step_does_not_end(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_core, "SHARE_SECONDS", 0.05)

    async def main() -> None:
        with served(model_directory) as engine:
            async with engine.connected() as llm:
                task = asyncio.create_task(text_of(llm, "hang now"))
                seconds = 0.0
                while seconds < process_core.SHARE_SECONDS:  # until the engine answers no more
                    start = time.monotonic()
                    metrics = await llm.get_metrics()
                    seconds = time.monotonic() - start
                assert "jaxllm:num_requests_running" in {metric.name for metric in metrics}
                engine.process.kill()
                with pytest.raises(EngineDeadError):
                    await task

    run(main())


def test_a_step_that_hangs_is_found_but_not_one_that_compiles(
    model_directory: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_core, "SHARE_SECONDS", 0.05)

    async def programs(llm: AsyncLLM) -> dict[str, float]:
        metrics = await llm.get_metrics()
        return {metric.labels["state"]: metric.value for metric in metrics if metric.name == "jaxllm:awaited_programs"}

    async def main() -> None:
        with served(model_directory, step_timeout_seconds=1.0, stall_timeout_seconds=0.25) as engine:
            async with engine.connected() as llm:
                task = asyncio.create_task(text_of(llm, "compile first"))
                while await programs(llm) != {"ready": 1, "missing": 2}:
                    assert not task.done(), "the programs that the request waits for are not reported"
                await until(lambda: llm.replicas()[0].detail == "compiling program 2 of 3, for 1 s")
                await llm.check_ready()
                assert await task == "one two three"
                assert await programs(llm) == {"ready": 0, "missing": 0}
                hung = asyncio.create_task(text_of(llm, "hang now"))
                await until(lambda: llm.replicas()[0].state == "stalled")
                assert "in one step for" in llm.replicas()[0].detail
                with pytest.raises(EngineDeadError, match="--step-timeout 1"):
                    await hung
            assert await asyncio.to_thread(engine.process.wait, 60) == EXIT_HUNG

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
            assert await asyncio.to_thread(engine.process.wait, 60) == 1
            client.close()

    run(main())


def test_the_engine_ends_when_its_parent_is_gone(model_directory: Path) -> None:
    async def main() -> None:
        with served(model_directory) as engine:
            async with engine.connected() as llm:
                assert await text_of(llm) == "one two three"
                assert engine.process.stdin is not None
                engine.process.stdin.close()  # as the kernel does when the parent dies
                await until(lambda: llm.dead_error is not None)
                assert await asyncio.to_thread(engine.process.wait, 60) == 1

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


def test_the_requests_of_a_client_that_was_killed_are_aborted_and_a_client_imports_no_jax(shared: Served) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", KILLED_FRONT, str(shared.directory), str(shared.process.pid)]

    async def main() -> None:
        async with shared.connected() as llm:
            with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as killed:
                assert killed.stdout is not None
                assert await asyncio.to_thread(killed.stdout.readline) == b"False\n"
                assert await num_running(llm) == 4
                killed.kill()
            await until_idle(llm)
            assert await num_running(llm) == 0
            assert not list(shared.directory.glob("client-3-*")), "its socket is left"

    run(main())


@pytest.mark.parametrize(
    ("call", "state"), [("wake_up", "calling"), ("sleep", "calling"), ("list_adapters", "running"), ("is_paused", "running")]
)
def test_the_heartbeat_tells_short_calls_that_hang_from_long_ones(
    call: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, commands, pulse = FakeEngineCore(lambda request: [5]), queue.SimpleQueue(), Pulse()  # type: ignore[var-annotated]
    loop = EngineLoop(core, commands, FullOutbox(room=9), pulse)  # type: ignore[arg-type]
    found: list[str] = []
    monkeypatch.setattr(core, call, lambda *_: found.append(pulse.state()))
    commands.put(messages.Call("client", 1, messages.call_of(call)))
    commands.put(lambda: found.append(pulse.state()))
    commands.put(Stop())
    loop.run()
    assert found == [state, "running"]
    pulse.rest()
    assert pulse.state() == "idle"


@pytest.mark.parametrize(
    ("call", "beats", "death"),
    [
        ("", (100.0, 101.0, 102.5), "a step has not ended for 2 s, more than --step-timeout 2 s"),
        ("", (100.0, 101.0, 301.0, 302.0), None),  # this process did not run
        ("wake_up", (100.0, 102.5), None),
        ("wake_up", (100.0, 109.0), "wake_up has not ended for 9 s, more than --compile-timeout 8 s"),
    ],
)
def test_the_watch_ends_what_hangs_but_not_after_a_time_in_which_it_did_not_run(
    call: str, beats: tuple[float, ...], death: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: None)
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=beats[0])
    monkeypatch.setattr(sockets, "time", clock)
    pulse = Pulse(is_loaded=True)
    with socket_directory() as directory:
        listener = Listener(
            str(directory), pulse, step_timeout_seconds=2.0, compile_timeout_seconds=8.0, stall_timeout_seconds=1.0
        )
        deaths: list[str] = []
        monkeypatch.setattr(listener, "_die", deaths.append)
        pulse.begin(call)
        for clock.now in beats:
            listener._beat()
        listener._inbox.close()
        listener.context.destroy(linger=0)
    assert deaths == ([] if death is None else [death])


def test_a_client_that_was_killed_before_it_was_greeted_leaves_no_socket() -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    with socket_directory() as directory:
        listener = Listener(
            str(directory), Pulse(), step_timeout_seconds=2.0, compile_timeout_seconds=8.0, stall_timeout_seconds=1.0
        )
        left = Path(directory, client := f"client-0-{'0' * 16}")
        left.touch()
        listener._take(memoryview(messages.encode(messages.Hello(client, ended.pid))))
        assert not left.exists() and not listener._outbox.clients and not listener._processes
        assert listener.commands.get_nowait() == sockets.Gone(client) and listener.commands.empty(), "nothing is sent to it"
        listener._inbox.close()
        listener.context.destroy(linger=0)


def test_a_client_that_did_not_run_does_not_take_that_for_the_engine_s_silence(
    shared: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with shared.connected() as llm:
            client = llm._core._client  # type: ignore[attr-defined]
            monkeypatch.setattr(client, "_fetch", lambda: None)
            client._heard = client._ticked = time.monotonic() - 1000.0
            client._tick()
            assert client.dead_error is None and client.stall is None
            client._heard = time.monotonic() - 1000.0
            client._tick()
            assert "no sign of life" in str(client.dead_error)

    run(main())


class FullOutbox:
    """An outbox to one API server, which takes so many messages and then none."""

    def __init__(self, room: int):
        self.room = room
        self.sent: list[messages.EngineMessage] = []
        self.clients = ["client"]

    def connect(self, client: str) -> None:
        """It is."""

    def send(self, client: str, frame: bytes) -> bool:
        if len(self.sent) < self.room:
            self.sent.append(messages.decode_engine_message(frame))
            return True
        return False


def test_the_requests_of_a_client_that_fetches_nothing_are_ended_and_it_hears_of_it_later() -> None:
    core, outbox, commands = FakeEngineCore(lambda request: [5] * 100), FullOutbox(room=3), queue.SimpleQueue()  # type: ignore[var-annotated]
    loop = EngineLoop(core, commands, outbox, Pulse())  # type: ignore[arg-type]
    request = EngineCoreRequest(request_id="x", prompt_token_ids=[1], sampling_params=ENDLESS)
    commands.put(messages.Add("client", request))
    while not core.aborted:
        loop._obey()
        loop._step()
    assert core.num_steps == 4 and core.aborted == ["x"]
    outbox.room = 10
    commands.put(Stop())
    loop.run()
    assert isinstance(outbox.sent[-1], messages.Failed)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_load_is_told_when_requests_come_or_end_and_now_and_then_but_not_in_every_step(
    num_replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, outbox, commands = FakeEngineCore(lambda request: []), FullOutbox(room=10_000), queue.SimpleQueue()  # type: ignore[var-annotated]
    pulse, num_calls, stats = Pulse(), itertools.count(), core.stats
    monkeypatch.setattr(core, "stats", lambda: (next(num_calls), stats())[1])
    loop = EngineLoop(core, commands, outbox, pulse, num_replicas=num_replicas)  # type: ignore[arg-type]

    def add(request_id: str, max_tokens: int) -> None:
        params = replace(ENDLESS, max_tokens=max_tokens)
        request = EngineCoreRequest(request_id=request_id, prompt_token_ids=[1], sampling_params=params)
        commands.put(messages.Add("client", request))

    def told(num_steps: int) -> list[int]:
        """The numbers of running requests that so many steps tell. The heartbeat has the latest."""
        outbox.sent.clear()
        for _ in range(num_steps):
            loop._obey()
            loop._step()
        found = [each.load for each in outbox.sent if isinstance(each, messages.Outputs) and each.load is not None]
        if found:
            assert pulse.load is found[-1] or pulse.load == found[-1]
        return [load.stats.num_running for load in found]

    for each in ("LOAD_SECONDS", "_UPDATE_SECONDS"):
        monkeypatch.setattr(process, each, 3600.0)
    add("long", 100)
    assert told(50) == [1]
    add("short", 20)
    before = next(num_calls)
    assert told(30) == [2, 1], "once it has come and once it has ended"
    assert next(num_calls) - before < 6
    for each in ("LOAD_SECONDS", "_UPDATE_SECONDS"):
        monkeypatch.setattr(process, each, 0.0)
    assert told(5) == [1] * 5
    for each in ("LOAD_SECONDS", "_UPDATE_SECONDS"):
        monkeypatch.setattr(process, each, 3600.0)
    assert told(15) == [0] and not core.has_unfinished_requests(), "the last one has ended"
    core.outputs, before = [EngineCoreOutput("aborted", [5])], next(num_calls)
    loop._step()
    assert next(num_calls) - before == 2, "no further step comes"
    commands.put(Stop())
    loop.run()
    updates = [each.load.stats.num_running for each in outbox.sent if isinstance(each, messages.Update)]
    assert updates == ([] if num_replicas == 1 else [0]), "what is owed is sent before it waits"


def test_a_client_knows_the_load_once_requests_have_come_and_ended(shared: Served) -> None:
    async def main() -> None:
        async with shared.connected() as llm:
            first = await begun(llm)
            assert (await llm.load()).num_running == 1
            second = await begun(llm, request_id="s")
            assert (await llm.load()).num_running == 2 == await num_running(llm)
            second.cancel()
            await until_running(llm, 1)
            assert (await llm.load()).num_running == 1
            assert await text_of(llm, request_id="t") == "one two three"
            assert (await llm.load()).num_running == 1
            first.cancel()
            await until_idle(llm)

    run(main())


def test_an_engine_without_work_tells_that_its_load_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode engine fetches what a prefill engine keeps while that one has nothing to do."""
    monkeypatch.setattr(process, "_IDLE_LOAD_SECONDS", 0.001)
    core, commands = FakeEngineCore(lambda request: [5]), queue.SimpleQueue()  # type: ignore[var-annotated]
    numbers, usual = itertools.chain([1, 1, 1], itertools.repeat(0)), core.stats()
    monkeypatch.setattr(core, "stats", lambda: replace(usual, num_kv_leases=next(numbers)))
    outbox = FullOutbox(room=1000)
    loop = EngineLoop(core, commands, outbox, Pulse(), num_replicas=2)  # type: ignore[arg-type]

    def told() -> list[int]:
        return [message.load.stats.num_kv_leases for message in outbox.sent if isinstance(message, messages.Update)]

    def stop() -> None:
        try:
            wait_until(lambda: 0 in told())
        finally:
            commands.put(Stop())

    stopping = threading.Thread(target=stop)
    stopping.start()
    loop.run()
    stopping.join()
    assert (told()[0], told()[-1]) == (1, 0)


def test_answers_to_a_prompt_share_its_images_which_are_sent_once(shared: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    items = (PromptItem("image", b"dog", position=0, num_tokens=1, payload=b"pixels"),)

    def request(name: str, items: tuple[PromptItem, ...]) -> EngineCoreRequest:
        return EngineCoreRequest(request_id=name, prompt_token_ids=[1], items=items, sampling_params=ENDLESS)

    async def sent() -> list[bytes]:
        client = shared.client(6)
        await client.ready()
        frames: list[bytes] = []
        monkeypatch.setattr(client, "_send", lambda message: frames.append(messages.encode(message)))
        for name, its in (("a", items), ("b", items), ("c", ()), ("d", items)):
            client.add(request(name, its))
        await asyncio.sleep(0)  # the client does not keep them
        client.add(request("e", items))
        monkeypatch.undo()
        client.close()
        return frames

    frames = run(sent())
    assert [frame.count(b"pixels") for frame in frames] == [1, 0, 0, 1, 1]
    core, commands = FakeEngineCore(lambda request: [5] * 100), queue.SimpleQueue()  # type: ignore[var-annotated]
    outbox = FullOutbox(room=9)
    loop = EngineLoop(core, commands, outbox, Pulse())  # type: ignore[arg-type]
    for frame in [*frames, messages.encode(messages.Add("another", request("f", ()), items_of="a"))]:
        commands.put(messages.decode_client_message(frame))
    while len(core.requests) < 5 or not outbox.sent:
        loop._obey()
    assert [each.items for each in core.requests] == [items, items, (), items, items]
    assert core.requests[0].items is core.requests[1].items
    (refusal,) = outbox.sent
    assert isinstance(refusal, messages.Refused) and refusal.request_id == "f"

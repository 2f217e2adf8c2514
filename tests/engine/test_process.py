"""Requests and calls of API servers, at an engine process with a fake core."""

import asyncio
import os
import queue
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxllm.engine import messages, sockets
from jaxllm.engine.launch import socket_directory
from jaxllm.engine.process import EngineLoop
from jaxllm.engine.sockets import Listener, Pulse, Stop
from jaxllm.errors import EngineError, EngineSleepingError, InvalidRequestError
from jaxllm.outputs import RequestOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.request import EngineCoreRequest, PromptItem
from jaxllm.sampling_params import SamplingParams
from tests.helpers.engine_processes import (
    ENDLESS,
    FullOutbox,
    Served,
    begun,
    num_running,
    run,
    text_of,
    until_idle,
    until_running,
)
from tests.helpers.fake_engine_core import WIDTH, FakeEngineCore


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


def test_calls_reach_the_core_between_steps(shared: Served) -> None:
    async def main() -> None:
        async with shared.connected() as llm:
            task = await begun(llm)
            assert await llm.reset_prefix_cache() is False
            assert await llm.reset_prefix_cache(reset_running_requests=True) is True
            task.cancel()

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

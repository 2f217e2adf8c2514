"""Damaged and strange messages, to an engine process and to its API servers."""

import asyncio
import os
import random
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from jaxllm.async_llm import AsyncLLM
from jaxllm.engine import messages
from jaxllm.engine.sockets import ENGINE_SOCKET, socket_address
from jaxllm.errors import EngineError
from jaxllm.metrics.metric import Counter, Gauge, Histogram
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import EngineCoreRequest
from jaxllm.scheduler_stats import SchedulerStats
from tests.helpers.engine_processes import (
    DELTA,
    Served,
    run,
    text_of,
)
from tests.helpers.fake_engine_core import fake_logprobs


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

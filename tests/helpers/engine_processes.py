"""Engine processes with a fake core, clients of them, and what tests do with both."""

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

from jaxllm.async_llm import AsyncLLM
from jaxllm.config import EngineConfig
from jaxllm.engine import messages
from jaxllm.engine.client import EngineClient
from jaxllm.engine.launch import socket_directory, start_engine
from jaxllm.engine.messages import EngineStart
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from tests.helpers.served_core import FACTORY

DELTA = SamplingParams(max_tokens=50, output_kind=RequestOutputKind.DELTA)
ENDLESS = SamplingParams(max_tokens=10_000, output_kind=RequestOutputKind.DELTA, ignore_eos=True)


class Served:
    """An engine process and where its sockets are."""

    def __init__(self, process: "subprocess.Popen[bytes]", directory: Path):
        self.process = process
        self.directory = directory

    def client(self, index: int = 0, **options: Any) -> EngineClient:
        return EngineClient(self.directory, self.process.pid, index=index, **options)

    @contextlib.asynccontextmanager
    async def connected(self, index: int = 0) -> AsyncIterator[AsyncLLM]:
        client = self.client(index)
        try:
            yield await AsyncLLM.connect(client)
        finally:
            client.close()

    def end(self) -> int:
        """Have it end in order. Returns its exit code."""
        self.process.terminate()
        return self.process.wait(60)


@contextlib.contextmanager
def served(model_directory: Path, factory: str = FACTORY, **options: Any) -> Iterator[Served]:
    """An engine process for as long as the block lasts."""
    config = EngineConfig.from_options(model=str(model_directory))
    with socket_directory() as directory:
        process = start_engine(EngineStart(config, str(directory), core_factory=factory, **options))
        try:
            yield Served(process, directory)
        finally:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()


async def until(condition: Any, seconds: float = 60.0) -> None:
    """Wait for it, looking every millisecond."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run it in an event loop, for two minutes at most."""
    return asyncio.run(asyncio.wait_for(coroutine, 120))


async def text_of(llm: AsyncLLM, prompt: str = "hi", request_id: str = "r", params: SamplingParams = DELTA) -> str:
    """The whole answer to a request."""
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
    """The running requests of the engine, by its metrics."""
    return next(metric.value for metric in await llm.get_metrics() if metric.name == "jaxllm:num_requests_running")


async def until_running(llm: AsyncLLM, count: int) -> None:
    """Wait until so many requests run."""
    while await num_running(llm) != count:
        pass


async def until_idle(llm: AsyncLLM) -> None:
    """Wait until no request runs."""
    await until_running(llm, 0)


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

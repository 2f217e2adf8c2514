"""Engine processes with a fake core, and clients of them."""

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from jaxllm.async_llm import AsyncLLM
from jaxllm.config import EngineConfig
from jaxllm.engine.client import EngineClient
from jaxllm.engine.launch import socket_directory, start_engine
from jaxllm.engine.messages import EngineStart
from tests.helpers.served_core import FACTORY


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

"""The engine processes of one host: a single one, or one for each replica. Starts and watches them, and starts one of several again."""

import asyncio
import signal
import subprocess
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from jaxllm import address_space
from jaxllm.config import EngineConfig
from jaxllm.engine.client import EngineClient
from jaxllm.engine.launch import start_engine
from jaxllm.engine.messages import EngineStart
from jaxllm.errors import EngineDeadError, EngineError
from jaxllm.log import logger

MAX_RESTARTS = 5
RESTART_WINDOW_SECONDS = 60.0
"""A process that ends more than MAX_RESTARTS times within this many seconds is not restarted."""
POLL_SECONDS = 0.05
END_SECONDS = 5.0
"""Seconds after which a process that was asked to end is killed."""
SECONDS_PER_GIB = 0.5
"""So much longer for each GiB of host memory for blocks (kv_offloading_size). The system takes 0.2 s to free a GiB of memory that processes
share, and CUDA has to unlock it before."""


def end_seconds(config: EngineConfig) -> float:
    """END_SECONDS, and what the memory of all processes takes."""
    return END_SECONDS + SECONDS_PER_GIB * (config.cache.kv_offloading_size or 0.0)


class EngineProcess:
    """A replica's engine process, and where its sockets are; its directory outlives the process."""

    def __init__(self, rank: int, directory: Path, environment: Mapping[str, str]):
        self.rank = rank
        self.directory = directory
        self.environment = environment
        self.process: subprocess.Popen[bytes] | None = None
        self.client: EngineClient | None = None
        self.starts: list[float] = []

    @property
    def pid(self) -> int | None:
        """Id of its process while it runs."""
        return None if self.process is None or self.process.poll() is not None else self.process.pid

    def drain(self) -> bool:
        """Have its process end once it has no requests. False if it does not serve."""
        if self.client is None or not self.client.is_ready:
            return False
        try:
            self.client.drain()
        except EngineError:  # it has just ended
            return False
        return True

    def describe_end(self) -> str:
        """The signal that ended the process, if it was one, and the limit that may have been the cause."""
        code = self.process.poll() if self.process is not None else None
        if code is None or code >= 0:
            return ""
        return f" (signal {-code}: {signal.strsignal(-code)}){address_space.describe_limit()}"


class EngineProcesses:
    """The engine processes of this host's replicas, in the event loop that made it.

    `start`: their parameters, of which `directory`, `replica` and the profiler's directory are filled in for each. `environments`: what
    each has in its environment, by its rank among all replicas. `stopping`: set when none is to be started again. `client_index`: the
    number of their clients here, after those of the API servers. `own_options`: flat options of one replica over those of all, by its rank.
    """

    def __init__(
        self,
        start: EngineStart,
        directory: Path,
        environments: Mapping[int, Mapping[str, str]],
        stopping: asyncio.Event,
        *,
        client_index: int,
        own_options: Mapping[int, Mapping[str, Any]] = MappingProxyType({}),
    ):
        self._start, self._stopping, self._client_index = start, stopping, client_index
        self._own_options = own_options
        self.each = [EngineProcess(rank, directory / str(rank), given) for rank, given in environments.items()]

    def start_all(self) -> None:
        for engine in self.each:
            engine.directory.mkdir()
            self.start(engine)

    @property
    def silence_seconds(self) -> float:
        """Seconds without a heartbeat: it stops only if the whole process hangs; the process itself detects other hangs."""
        timeout = self._start.step_timeout_seconds
        return timeout + 30.0 if timeout else float("inf")

    @property
    def clients(self) -> list[EngineClient]:
        return [engine.client for engine in self.each if engine.client is not None]

    def start(self, engine: EngineProcess) -> None:
        """Start its process. Wait for its end with `ended`."""
        config = self._start.config
        if own := self._own_options.get(engine.rank):
            config = config.replace(**own)
        if self._start.num_replicas > 1 and config.observe.profiler_dir is not None:
            config = config.replace(profiler_dir=str(Path(config.observe.profiler_dir) / f"replica-{engine.rank}"))
        if (port := config.kv_transfer.kv_port) and config.kv_transfer.is_prefill and engine.rank:
            config = config.replace(kv_port=port + engine.rank)
        start = msgspec.structs.replace(self._start, config=config, directory=str(engine.directory), replica=engine.rank)
        engine.process = start_engine(start, engine.environment)
        engine.starts.append(time.monotonic())
        engine.client = EngineClient(
            engine.directory,
            engine.process.pid,
            index=self._client_index,
            silence_seconds=self.silence_seconds,
            stall_seconds=self._start.stall_timeout_seconds,
        )
        engine.client.on_stall = partial(self._log_stall, engine.rank)

    def _log_stall(self, rank: int, reason: str | None) -> None:
        which = f"replica {rank}" if self._start.num_replicas > 1 else "the engine"
        if reason is not None:
            logger.warning("%s seems to hang (--stall-timeout): %s", which, reason)
        else:
            logger.warning("%s goes on", which)

    async def ended(self, engine: EngineProcess) -> EngineDeadError:
        """Wait until the engine's process ends or hangs."""
        client = engine.client
        assert client is not None, "it was not started"
        dead: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()
        client.on_dead = lambda error: None if dead.done() else dead.set_result(error)
        try:
            return client.dead_error or await dead
        finally:
            client.close()

    async def start_again(self, engine: EngineProcess, error: EngineDeadError) -> str | None:
        """Start the process of a replica that has ended again. If it has ended too often lately, returns that instead."""
        assert engine.process is not None
        await end(engine.process, end_seconds(self._start.config))  # it may hang
        if self._stopping.is_set():
            return None
        reason = f"{error}{engine.describe_end()}"
        engine.starts = [start for start in engine.starts if start > time.monotonic() - RESTART_WINDOW_SECONDS]
        if len(engine.starts) <= MAX_RESTARTS:
            logger.error("replica %d: %s; it is started again", engine.rank, reason)
            self.start(engine)
            return None
        return f"replica {engine.rank} ended {len(engine.starts)} times within {RESTART_WINDOW_SECONDS:.0f} s: {reason}"

    async def end_all(self) -> None:
        """Ask all to end, and kill those that do not."""
        seconds = end_seconds(self._start.config)
        await asyncio.gather(*(end(engine.process, seconds) for engine in self.each if engine.process is not None))

    def kill_all(self) -> None:
        for engine in self.each:
            if engine.process is not None and engine.process.poll() is None:
                engine.process.kill()
                engine.process.wait()


async def end(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Ask a process to end, and kill it after a time limit."""
    if process.poll() is None:
        process.terminate()
    deadline = time.monotonic() + seconds
    while process.poll() is None:
        if time.monotonic() > deadline:
            logger.error("process %d did not end within %g s and is killed", process.pid, seconds)
            process.kill()
            process.wait()
        await asyncio.sleep(POLL_SECONDS)

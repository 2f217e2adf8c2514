"""The supervisor: listens, starts and watches the engine process and the API servers, and stops them in order. Handles no HTTP."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from jaxllm import address_space, clock
from jaxllm.config import EngineConfig
from jaxllm.engine.client import show_loading
from jaxllm.engine.features import follow
from jaxllm.engine.launch import socket_directory, start_child
from jaxllm.engine.messages import EngineStart
from jaxllm.errors import EngineDeadError
from jaxllm.log import logger
from jaxllm.progress import SILENT, Progress
from jaxllm.replicas.devices import environments, of_one_host, ranks_here
from jaxllm.replicas.hosts.by_ray import start_others
from jaxllm.replicas.hosts.host import serve_replicas
from jaxllm.replicas.hosts.remote_engines import RemoteEngines, remote_engines
from jaxllm.replicas.processes import (
    END_SECONDS,
    MAX_RESTARTS,
    POLL_SECONDS,
    RESTART_WINDOW_SECONDS,
    EngineProcess,
    EngineProcesses,
    end,
)
from server.api_server import LAST_WORDS_SECONDS, READY, ApiServerStart
from server.grpc.start import check_grpc
from server.listening import check_tls, listen
from server.options import ServerOptions

LAST_ERRORS_SECONDS = 1.0
"""Seconds that API servers continue after the engine's death, to send every client an error."""


@dataclass(frozen=True)
class Serving:
    """Facts to report once requests are accepted."""

    config: EngineConfig
    options: ServerOptions
    socket: socket.socket
    start_seconds: dict[str, float]
    """Duration of each part of the start."""
    seconds: float
    """Since the supervisor's start."""
    offers: str
    """The kind of most requests: "chat", "completions", "token ids", "embeddings" or "classes"."""


class _ApiServer:
    """An API server and its descriptor of the listening socket, which outlives the process."""

    def __init__(self, index: int, listening: socket.socket):
        self.index = index
        self.socket = listening
        self.process: subprocess.Popen[bytes] | None = None
        self.report = -1
        self.told = ""
        self.is_ready = False
        self.offers = ""
        self.starts: list[float] = []

    @property
    def serves(self) -> bool:
        """Whether its present process is ready."""
        return self.process is not None and self.process.poll() is None and self.told.startswith(READY)


class Supervisor:
    """One server. config: with roles, what they make of the options. `on_ready` is called when requests are accepted; `core_factory` is
    for tests."""

    def __init__(
        self,
        config: EngineConfig,
        options: ServerOptions,
        *,
        log_level: str | None = None,
        progress: Progress = SILENT,
        on_ready: Callable[[Serving], None] = lambda serving: None,
        core_factory: str | None = None,
    ):
        self._roles = options.processes.roles
        self._config, self._options = config, options
        self._log_level = log_level
        self._progress = progress
        self._on_ready = on_ready
        self._core_factory = core_factory
        self._began = time.monotonic()
        self._stopping = asyncio.Event()
        self._exit_code = 0
        self._failure: str | None = None
        self._directory = Path()
        self._api_servers: list[_ApiServer] = []
        self._num_api_servers = options.network.api_server_count
        self._engines: EngineProcesses
        self._remote: RemoteEngines | None = None
        """Replicas on other hosts."""
        self._all_served = False
        """Whether every engine and API server was ready once: until then none is started again."""
        self._watchers: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Serve until a signal or a failure. Returns the exit code; raises ConfigError or EngineDeadError for a failed start."""
        address_space.check()
        check_tls(self._options.network)
        check_grpc(self._options.network)
        drain_seconds = self._options.network.shutdown_timeout
        started = start_others(self._config, drain_seconds=drain_seconds, **self._of_engines())
        if started is not None:
            self._config = started.config
        parallel, given = self._config.parallel, ""
        if self._roles is not None:
            given = self._roles.on_hosts(parallel.nnodes)
        environment_of_each = environments(parallel, given)
        if self._roles is not None and parallel.nnodes == 1:  # of several hosts all know the same
            environment_of_each = self._roles.with_secret(environment_of_each)
        sockets = listen(self._options.network)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._take_signal, number)
        with socket_directory() as self._directory:
            self._remote = remote_engines(
                self._config, self._directory, index=self._num_api_servers, started=started, roles=self._roles
            )
            self._engines = self._engine_processes(dict(zip(ranks_here(parallel), environment_of_each, strict=True)))
            try:
                await self._serve(sockets)
            finally:
                self._kill_all()
                for watcher in self._watchers:
                    watcher.cancel()
                if self._remote is not None:
                    self._remote.close()
                for listening in sockets:
                    listening.close()
                if self._options.network.uds is not None:
                    Path(self._options.network.uds).unlink(missing_ok=True)
        return self._exit_code

    def _engine_processes(self, environments: Mapping[int, Mapping[str, str]]) -> EngineProcesses:
        num_replicas = self._config.parallel.num_replicas
        start = EngineStart(of_one_host(self._config), "", num_replicas=num_replicas, **self._of_engines())
        own: dict[int, dict[str, Any]] = {}
        if self._roles is not None:
            address = () if self._remote is None else (self._remote.address,)
            own = self._roles.options_of_each(self._config, *address)
        return EngineProcesses(
            start, self._directory, environments, self._stopping, client_index=self._num_api_servers, own_options=own
        )

    def _of_engines(self) -> dict[str, Any]:
        return {**_fields_of_engines(self._options, self._log_level), "core_factory": self._core_factory}

    def _places(self) -> list[tuple[str, int | None]]:
        """For each replica the directory of its sockets, and its process; None: it is being started again, or may be."""
        places = {engine.rank: (str(engine.directory), engine.pid) for engine in self._engines.each}
        if self._remote is not None:
            # The first API servers wait for all replicas; later ones for those that are there.
            pid = None if self._all_served else os.getpid()
            places |= {rank: (str(directory), pid) for rank, directory in self._remote.directories.items()}
        return [places[rank] for rank in sorted(places)]

    async def _serve(self, sockets: list[socket.socket]) -> None:
        self._engines.start_all()
        for engine in self._engines.each:
            self._watch(self._watch_engine(engine))
        if self._remote is not None:
            await self._remote.start()
        self._api_servers = [_ApiServer(index, listening) for index, listening in enumerate(sockets)]
        for api_server in self._api_servers:
            self._start_api_server(api_server)
        self._watch(self._tell_when_ready())
        await self._stopping.wait()
        await self._end_all()
        if self._failure is not None:
            raise EngineDeadError(self._failure)

    # API servers

    def _start_api_server(self, api_server: _ApiServer) -> None:
        report, child_report = os.pipe()
        start = ApiServerStart(
            api_server.index,
            self._places(),
            self._config,
            self._options,
            api_server.socket.fileno(),
            child_report,
            self._log_level,
            self._engines.silence_seconds,
            accepts_while_loading=not any(other.serves for other in self._api_servers if other is not api_server),
            epoch=clock.epoch(),
        )
        fds = (api_server.socket.fileno(), child_report)
        api_server.process = start_child("server.api_server", msgspec.msgpack.encode(start), fds)
        os.close(child_report)
        os.set_blocking(report, False)
        api_server.report, api_server.told = report, ""
        api_server.starts.append(time.monotonic())
        self._watch(self._watch_api_server(api_server))

    async def _watch_api_server(self, api_server: _ApiServer) -> None:
        """Wait until an API server ends; restart it if it was ready before and has not ended too often."""
        assert api_server.process is not None
        while (code := api_server.process.poll()) is None:
            self._read_report(api_server)
            await asyncio.sleep(POLL_SECONDS)
        self._read_report(api_server)
        os.close(api_server.report)
        if self._stopping.is_set():
            return
        if not api_server.is_ready:
            unsaid = f"an API server could not start (exit code {code}); the log may say why{address_space.describe_limit()}"
            self._fail(api_server.told.strip() or unsaid)
            return
        recent = [start for start in api_server.starts if start > time.monotonic() - RESTART_WINDOW_SECONDS]
        if len(recent) > MAX_RESTARTS:
            self._fail(
                f"API server {api_server.index} ended {len(recent)} times within {RESTART_WINDOW_SECONDS:.0f} s (exit code {code})"
            )
            return
        logger.error("API server %d ended (exit code %d); it is started again", api_server.index, code)
        api_server.starts = recent
        self._start_api_server(api_server)

    def _read_report(self, api_server: _ApiServer) -> None:
        """Read an API server's start report; record whether it is ready."""
        was_told = bool(api_server.told)
        with contextlib.suppress(BlockingIOError):
            api_server.told += os.read(api_server.report, 4096).decode(errors="replace")
        if api_server.told.startswith(READY):
            if api_server.is_ready and not was_told:
                logger.info("API server %d serves again", api_server.index)
            api_server.is_ready = True
            api_server.offers = api_server.told.removeprefix(READY).strip()

    # The engine, or its replicas

    async def _watch_engine(self, engine: EngineProcess) -> None:
        """Wait until the engine's process ends or hangs. One of several is started again, unless it ended too often; without any replica
        the server ends."""
        error = await self._engines.ended(engine)
        if self._stopping.is_set():
            return
        was_ready = all(api_server.is_ready for api_server in self._api_servers)
        if self._all_served and self._config.parallel.num_replicas > 1:
            often = await self._engines.start_again(engine, error)
            if self._stopping.is_set():
                return
            if often is None:
                self._watch(self._watch_engine(engine))
            elif any(other.pid is not None for other in self._engines.each) or (self._remote and self._remote.has_hosts):
                logger.error("%s; it stays down", often)
            elif not self._options.processes.keep_alive_on_engine_death:
                self._fail(often)
            return
        if was_ready and self._options.processes.keep_alive_on_engine_death:
            logger.error("%s; the server goes on and answers 503 (--keep-alive-on-engine-death)", error)
            return
        if was_ready:
            await asyncio.sleep(LAST_ERRORS_SECONDS)
        self._fail(f"{error}{engine.describe_end()}")

    async def _tell_when_ready(self) -> None:
        """Show loading progress, then the served endpoints."""
        clients = self._engines.clients
        loading = asyncio.create_task(show_loading(clients[0], self._progress))
        try:
            ready, *_ = [await client.ready() for client in clients]
            if not await self._others_are_ready():
                return
            while not all(api_server.is_ready for api_server in self._api_servers):
                await asyncio.sleep(0.02)
        except EngineDeadError:  # its watcher reports it
            return
        finally:
            loading.cancel()
            self._progress.finish()
        self._all_served = True
        seconds = time.monotonic() - self._began
        self._on_ready(
            Serving(
                ready.config,
                self._options,
                self._api_servers[0].socket,
                ready.start_seconds,
                seconds,
                self._api_servers[0].offers,
            )
        )

    async def _others_are_ready(self) -> bool:
        """Wait for the replicas on other hosts. Without them, the start fails."""
        try:
            if self._remote is not None:
                await self._remote.ready()
        except EngineDeadError as error:
            self._fail(str(error))
            return False
        return True

    # Shutdown

    def _take_signal(self, number: signal.Signals) -> None:
        if self._stopping.is_set():
            logger.warning("stopped at once")
            self._kill_all()
            _leave_at_once(self._directory, self._options.network.uds, 128 + number)
        names = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
        logger.info(
            "%s: running requests have %g s to end; a second signal stops at once",
            names[number],
            self._options.network.shutdown_timeout,
        )
        self._stopping.set()

    def _fail(self, reason: str) -> None:
        if not self._stopping.is_set():
            self._failure = reason
            self._stopping.set()

    async def _end_all(self) -> None:
        """Stop the API servers, which drain, then the engine."""
        drain_seconds = 0.0 if self._failure else self._options.network.shutdown_timeout + LAST_WORDS_SECONDS
        processes = [api_server.process for api_server in self._api_servers if api_server.process is not None]
        await asyncio.gather(*(end(process, drain_seconds + END_SECONDS) for process in processes))
        if self._remote is not None:
            await self._remote.end(self._failure or "")
        await self._engines.end_all()

    def _kill_all(self) -> None:
        for process in (api_server.process for api_server in self._api_servers):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
        self._engines.kill_all()

    def _watch(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)


def _leave_at_once(directory: Path, uds: str | None, code: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    if uds is not None:
        Path(uds).unlink(missing_ok=True)
    os._exit(code)


def _fields_of_engines(options: ServerOptions, log_level: str | None) -> dict[str, Any]:
    """Fields of EngineStart that are the same on every host."""
    return {
        "log_level": log_level,
        "log_format": options.logging.log_format,
        "step_timeout_seconds": options.processes.step_timeout,
        "compile_timeout_seconds": options.processes.compile_timeout,
        "stall_timeout_seconds": options.processes.stall_timeout,
    }


def serve(config: EngineConfig, options: ServerOptions, **more: object) -> int:
    """Serve until a signal or a failure; `more` are arguments of Supervisor. Returns the exit code.

    Raises ConfigError, or EngineDeadError if the engine could not start or died.
    """

    async def run() -> int:
        return await Supervisor(config, options, **more).run()  # type: ignore[arg-type]

    with contextlib.suppress(KeyboardInterrupt):
        return asyncio.run(run())
    return 130


def follow_host_0(config: EngineConfig, options: ServerOptions, *, log_level: str | None) -> int:
    """Run as another host until host 0 ends, with replicas or with devices of the one engine. Ctrl-C and SIGTERM end this host, in
    the first case once its requests have ended, and in the second with all others. Returns the exit code."""
    if config.parallel.num_replicas > 1:
        drain_seconds, roles = options.network.shutdown_timeout, options.processes.roles
        return serve_replicas(config, drain_seconds=drain_seconds, roles=roles, **_fields_of_engines(options, log_level))
    follow(config)
    return 0

"""A host above 0: connects to host 0, and runs its own replicas until host 0 ends or is lost."""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.engine.launch import socket_directory
from jaxllm.engine.messages import EngineStart
from jaxllm.errors import EngineDeadError
from jaxllm.framing import WireError
from jaxllm.hosts import handshake
from jaxllm.log import logger
from jaxllm.replicas.devices import environments, of_one_host, ranks_here
from jaxllm.replicas.hosts import wire
from jaxllm.replicas.hosts.identity import identity
from jaxllm.replicas.hosts.link import Link
from jaxllm.replicas.hosts.local_engines import LocalEngines
from jaxllm.replicas.hosts.remote_engines import names_of
from jaxllm.replicas.hosts.wire import Failed, Stopping
from jaxllm.replicas.processes import EngineProcess, EngineProcesses
from jaxllm.replicas.roles import Roles
from jaxllm.worker_thread import WorkerThread

EXIT_LOST = 1
_LAST_SECONDS = 1.0


class ReplicaHost:
    """This host of several. `start`: parameters of its engine processes, but for what differs among them; `drain_seconds`: the time that
    running requests get to end after a signal; `roles`: those of the replicas, if they have any."""

    def __init__(self, config: EngineConfig, start: EngineStart, drain_seconds: float, roles: Roles | None = None):
        self._config, self._options, self._roles = config, config.parallel, roles
        self._found = {**identity(config), **({} if roles is None else roles.identity())}
        given = "" if roles is None else roles.on_hosts(config.parallel.nnodes)
        self._environments = dict(zip(ranks_here(config.parallel), environments(config.parallel, given), strict=True))
        self._start, self._drain_seconds = start, drain_seconds
        self._began = time.monotonic()

    async def run(self) -> int:
        """Serve host 0 until that ends, or a signal comes. Returns the exit code; raises ConfigError or EngineDeadError if this host cannot
        start, or its replicas have all ended."""
        self._leaving, self._stopping, self._signal = asyncio.Event(), asyncio.Event(), 0
        """Set when no replica is to be started again, and when all are to end at once."""
        self._failure: str | None = None
        self._have_served = False
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._take_signal, number)
        thread = WorkerThread("connect")
        connecting = asyncio.wrap_future(thread.submit(partial(handshake.connect, self._options, self._found)))
        if not await _unless(self._leaving, connecting):
            return 128 + self._signal
        address = connecting.result().stream.getsockname()[0]
        link = await Link.of(connecting.result(), wire.FROM_HOST_0)
        own = {} if self._roles is None else self._roles.options_of_each(self._config, address)
        with socket_directory() as directory:
            self._engines = EngineProcesses(
                self._start, directory, self._environments, self._leaving, client_index=0, own_options=own
            )
            try:
                return await self._serve(link)
            finally:
                self._engines.kill_all()

    async def _serve(self, link: Link) -> int:
        self._engines.start_all()
        self._local = LocalEngines(link, {engine.rank: engine.directory for engine in self._engines.each})
        watchers = {engine.rank: asyncio.create_task(self._watch(engine)) for engine in self._engines.each}
        others = [asyncio.create_task(self._tell_when_ready()), asyncio.create_task(self._leave(link, watchers))]
        serving = asyncio.create_task(self._local.run())
        code = 0
        try:
            if await _unless(self._stopping, serving):
                reason = serving.result()
                code = EXIT_LOST if reason else 0
                logger.log(
                    logging.ERROR if reason else logging.INFO, "host 0 ends the server%s", f": {reason}" if reason else ""
                )
            else:
                link.send(Failed(self._failure or f"it was stopped ({signal.Signals(self._signal).name})"))
                code = 0 if self._have_served else 128 + self._signal
        except WireError as error:
            logger.error("host 0 is lost: %s; host %d ends", error, self._options.node_rank)
            code = EXIT_LOST
        self._stop()
        for task in (*watchers.values(), *others):
            task.cancel()
        await self._local.close()
        await link.close(within_seconds=_LAST_SECONDS)
        await self._engines.end_all()
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        return code

    async def _leave(self, link: Link, watchers: "Mapping[int, asyncio.Task[None]]") -> None:
        """After a signal, let the running requests of this host's replicas end, without new ones. Then stop."""
        await self._leaving.wait()
        if self._have_served and not self._stopping.is_set():
            name = signal.Signals(self._signal).name
            logger.info("%s: running requests have %g s to end; a second signal stops at once", name, self._drain_seconds)
            link.send(Stopping())
            drained = [watchers[engine.rank] for engine in self._engines.each if engine.drain()]
            if drained and (await asyncio.wait(drained, timeout=self._drain_seconds))[1]:
                logger.warning("some requests did not end within %g s", self._drain_seconds)
        self._stopping.set()

    async def _watch(self, engine: EngineProcess) -> None:
        """Wait until an engine process ends, notify host 0, and start it again, unless that happens too often. Without any
        replica this host ends."""
        while True:
            error = await self._engines.ended(engine)
            if self._stopping.is_set():
                return None
            self._local.engine_ended(engine.rank, f"{error}{engine.describe_end()}")
            if self._leaving.is_set():
                return None
            if not self._have_served:
                return self._fail(f"replica {engine.rank}: {error}{engine.describe_end()}")
            often = await self._engines.start_again(engine, error)
            if self._leaving.is_set():
                return None
            if often is not None:
                if any(other.pid is not None for other in self._engines.each):
                    logger.error("%s; it stays down", often)
                else:
                    self._fail(often)
                return None

    async def _tell_when_ready(self) -> None:
        with contextlib.suppress(EngineDeadError):  # its watcher reports it
            for client in self._engines.clients:
                await client.ready()
            self._have_served = True
            options = self._options
            replicas = names_of(ranks_here(options))
            seconds = time.monotonic() - self._began
            logger.info("host %d of %d is ready in %.1f s, with %s", options.node_rank, options.nnodes, seconds, replicas)

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._stop()

    def _stop(self) -> None:
        self._leaving.set()
        self._stopping.set()

    def _take_signal(self, number: signal.Signals) -> None:
        """Leave; a second signal ends this host at once: the engine processes end with this one."""
        if self._leaving.is_set():
            os._exit(128 + number)
        self._signal = number
        self._leaving.set()


async def _unless(stop: asyncio.Event, work: "asyncio.Future[Any]") -> bool:
    """Wait for it, and return True, or until the event. Raises its error."""
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not work.done():
        work.cancel()
        return False
    work.result()
    return True


def serve_replicas(config: EngineConfig, *, drain_seconds: float, roles: Roles | None = None, **more: Any) -> int:
    """Be host `config.parallel.node_rank` of several with replicas, of these roles; `more` are fields of the EngineStart of its processes.
    Returns the exit code: 0 if host 0 was shut down, or a signal ended this host once it served.

    Raises ConfigError, ModelLoadError or EngineDeadError if this host cannot start, or its replicas end again and again.
    """
    start = EngineStart(of_one_host(config), "", num_replicas=config.parallel.num_replicas, has_remote_clients=True, **more)

    async def run() -> int:
        return await ReplicaHost(config, start, drain_seconds, roles).run()

    return asyncio.run(run())

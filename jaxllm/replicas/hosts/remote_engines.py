"""Sockets of remote engine processes on host 0, and the messages between them and its API servers."""

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from jaxllm.config import EngineConfig
from jaxllm.engine import messages
from jaxllm.engine.client import EngineClient
from jaxllm.engine.messages import Dead, MessageError
from jaxllm.engine.messages import Hello as ClientHello
from jaxllm.engine.sockets import ENGINE_SOCKET, Outbox, is_client_name
from jaxllm.errors import ConfigError, EngineDeadError
from jaxllm.framing import WireError
from jaxllm.hosts.reception import POLL_SECONDS, Arrival, Reception, Started
from jaxllm.log import logger
from jaxllm.replicas.devices import ranks_here
from jaxllm.replicas.hosts import wire
from jaxllm.replicas.hosts.identity import identity
from jaxllm.replicas.hosts.inbox import Inbox
from jaxllm.replicas.hosts.link import Link
from jaxllm.replicas.hosts.wire import End, Ended, Failed, Frame, Greet, Leave, Stopping
from jaxllm.replicas.processes import MAX_RESTARTS, RESTART_WINDOW_SECONDS
from jaxllm.replicas.roles import Roles

_LAST_SECONDS = 1.0
"""The longest wait for the last messages to other hosts to be sent."""


class _Head(msgspec.Struct, array_like=True):
    """Beginning of every message of an API server."""

    tag: str
    client: str


_head = msgspec.msgpack.Decoder(_Head)


@dataclass
class _Host:
    """Another host that is connected."""

    arrival: Arrival
    link: Link
    replicas: range
    is_stopping: bool = False
    """Whether it is to end, and lets its requests end before."""

    def __str__(self) -> str:
        return str(self.arrival)


class StartedReplicas(Started, Protocol):
    """Starter of the other hosts, which can restart them."""

    def start_again(self, rank: int) -> None:
        """Start a host that was lost."""


class RemoteEngines:
    """The replicas of other hosts. Everything runs in an event loop, but for the constructor.

    `directory` gets one for the sockets of each replica; `index`: the number of this process's clients, after the API servers';
    `started`: what started the other hosts, if that was not done by hand; `roles`: those of the replicas, if they have any.
    Raises ConfigError if host 0 cannot listen at its address.
    """

    def __init__(
        self,
        config: EngineConfig,
        directory: Path,
        *,
        index: int,
        started: StartedReplicas | None = None,
        roles: Roles | None = None,
    ):
        self._options, self._index, self._started = config.parallel, index, started
        self._restarts: list[float] = []
        """When hosts were started again."""
        own = {**identity(config), **({} if roles is None else roles.identity())}
        self._reception = Reception(config.parallel, own, self._take, started)
        here = ranks_here(config.parallel)
        self.directories = {rank: directory / str(rank) for rank in range(config.parallel.num_replicas) if rank not in here}
        """Directories of the sockets of each of them."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._hosts: dict[int, _Host] = {}
        self._engines: dict[int, _RemoteEngine] = {}
        self._has_started = False
        """Whether all replicas served once: until then a host that is missing or lost fails the start."""
        self._fault: asyncio.Future[str]
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Wait for the other hosts from now on."""
        self._loop = asyncio.get_running_loop()
        self._fault = self._loop.create_future()
        for rank, directory in self.directories.items():
            directory.mkdir()
            host = rank // (self._options.num_replicas // self._options.nnodes)
            engine = self._engines[rank] = _RemoteEngine(rank, directory, self._context, lambda host=host: self._link_to(host))
            self._tasks.add(asyncio.create_task(engine.run()))
        self._reception.open()
        self._tasks.add(asyncio.create_task(self._watch_start()))

    async def ready(self) -> None:
        """Wait until all of them serve for the first time. Raises EngineDeadError if a host does not come, differs from this one, or
        fails."""
        clients = [EngineClient(directory, os.getpid(), index=self._index) for directory in self.directories.values()]
        all_ready = asyncio.gather(*(client.ready() for client in clients))
        try:
            await asyncio.wait((self._fault, all_ready), return_when=asyncio.FIRST_COMPLETED)
            if not self._fault.done() and all_ready.exception() is not None:
                await asyncio.wait((self._fault,), timeout=_LAST_SECONDS)  # the host says more
            if self._fault.done():
                raise EngineDeadError(self._fault.result())
            all_ready.result()
            self._has_started = True
        finally:
            all_ready.cancel()
            for client in clients:
                client.close()

    @property
    def address(self) -> str:
        """The address of host 0 at which others reach it."""
        return self._reception.address

    @property
    def has_hosts(self) -> bool:
        """Whether any other host is connected."""
        return bool(self._hosts)

    async def end(self, reason: str) -> None:
        """End the other hosts: after a failure with its reason."""
        self._has_started = True
        hosts, self._hosts = self._hosts, {}
        for host in hosts.values():
            host.link.send(End(reason))
        await asyncio.gather(*(host.link.close(within_seconds=_LAST_SECONDS) for host in hosts.values()))
        if self._started is not None:
            await asyncio.to_thread(self._started.end)
        self.close()

    def close(self) -> None:
        """Close all sockets. May be called again."""
        self._reception.close()
        for task in self._tasks:
            task.cancel()
        self._context.destroy(linger=0)

    # Hosts

    def _link_to(self, number: int) -> Link | None:
        host = self._hosts.get(number)
        return None if host is None else host.link

    async def _watch_start(self) -> None:
        """Fail the start if the other hosts do not come in time."""
        try:
            while not (self._has_started or self._fault.done() or self._reception.has_all()):
                await asyncio.sleep(POLL_SECONDS)
        except ConfigError as error:
            self._fail_start(str(error))

    def _fail_start(self, reason: str) -> None:
        if not self._has_started and not self._fault.done():
            self._fault.set_result(reason)

    def _take(self, arrival: Arrival | ConfigError) -> None:
        """A host was welcomed or refused. In any thread."""
        self._loop.call_soon_threadsafe(self._take_in_loop, arrival)

    def _take_in_loop(self, arrival: Arrival | ConfigError) -> None:
        if isinstance(arrival, ConfigError):
            self._fail_start(str(arrival))
        else:
            task = self._loop.create_task(self._serve(arrival))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, arrival: Arrival) -> None:
        """Carry the messages of a host until it ends."""
        share = self._options.num_replicas // self._options.nnodes
        replicas = range(arrival.rank * share, (arrival.rank + 1) * share)
        try:
            link = await Link.of(arrival.connection, wire.FROM_OTHER)
        except WireError as error:
            self._reception.leave(arrival.rank)
            self._fail_start(f"{arrival} is lost: {error}")
            return
        host = self._hosts[arrival.rank] = _Host(arrival, link, replicas)
        logger.info("%s is there, with %s", host, names_of(replicas))
        try:
            reason = f"{host} ended: {await self._listen_to(host)}"
        except WireError as error:
            reason = f"{host} is lost: {error}"
        except Exception:
            logger.exception("what %s sent could not be carried", host)
            reason = f"{host} is dropped: what it sent could not be carried; the log says more"
        if self._hosts.get(arrival.rank) is host:  # else this host ends
            del self._hosts[arrival.rank]
            level = logging.INFO if host.is_stopping else logging.ERROR
            logger.log(level, "%s; until it is started again, %s down", reason, _are(replicas))
            for rank in replicas:
                self._engines[rank].end_all(reason)
            self._fail_start(reason)
            self._reception.leave(arrival.rank)
            await self._start_again(host)
        await link.close()

    async def _start_again(self, host: _Host) -> None:
        """Restart a lost host, if there is a launcher, unless that happens too often."""
        if self._started is None or not self._has_started:
            return
        self._restarts = [at for at in self._restarts if at > time.monotonic() - RESTART_WINDOW_SECONDS]
        if len(self._restarts) < MAX_RESTARTS:
            self._restarts.append(time.monotonic())
            await asyncio.to_thread(self._started.start_again, host.arrival.rank)
        else:
            logger.error("hosts were lost %d times within %g s; %s stays down", MAX_RESTARTS + 1, RESTART_WINDOW_SECONDS, host)

    async def _listen_to(self, host: _Host) -> str:
        """Carry what a host sends, until it ends. Returns why; raises WireError if it is lost."""
        while True:
            message = await host.link.receive()
            if isinstance(message, Failed):
                return message.reason
            if isinstance(message, Stopping):
                host.is_stopping = True
                logger.info("%s is being stopped: running requests of %s may end", host, names_of(host.replicas))
                continue
            if not isinstance(message, (Frame, Ended)) or message.replica not in host.replicas:
                raise WireError("it sent what only another host may send")
            engine = self._engines[message.replica]
            if isinstance(message, Frame):
                engine.deliver(message.client, message.data)
            else:
                engine.end(message.clients, message.reason)


class _RemoteEngine:
    """The sockets of a remote engine process, as local clients see them."""

    def __init__(self, rank: int, directory: Path, context: "zmq.Context[zmq.Socket[bytes]]", link: Any):
        self._rank, self._link = rank, link
        self._inbox = Inbox(context, directory, ENGINE_SOCKET)
        self._outbox = Outbox(context, str(directory))
        self._processes: dict[str, int] = {}
        """Descriptors that become readable when a client's process ends."""
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Carry what clients send."""
        try:
            while True:
                for frame in await self._inbox.frames():
                    self._take(frame)
                if (link := self._link()) is not None:
                    await link.drained()
        finally:
            self._inbox.close()

    def deliver(self, client: str, frame: bytes) -> None:
        """Give a client what the engine sent to it."""
        if client not in self._outbox.clients or self._outbox.send(client, frame):
            return
        logger.error("an API server does not fetch what replica %d sends; its requests there are ended", self._rank)
        self._outbox.disconnect(client)
        self._outbox.connect(client)  # with an empty queue
        self._forget(client, "the server was too slow to fetch what the engine wrote")

    def end(self, clients: Sequence[str], reason: str) -> None:
        """The engine process has ended for these clients."""
        for client in clients:
            if client in self._outbox.clients:
                self._forget(client, reason, tell_host=False)

    def end_all(self, reason: str) -> None:
        """The host is lost."""
        self.end(self._outbox.clients, reason)

    def _take(self, frame: bytes) -> None:
        link: Link | None = self._link()
        try:
            head = _head.decode(frame)
            hello = messages.decode_client_message(frame) if head.tag == "hello" else None
        except (msgspec.MsgspecError, MessageError) as error:
            logger.warning("a message of an API server was refused: %s", error)
            return
        if link is None:  # a client that is new says Hello again; the others were notified
            return
        if isinstance(hello, ClientHello):
            self._greet(hello, link)
        elif head.tag == "bye":
            self._forget(head.client)
        elif head.client in self._outbox.clients:
            link.send(Frame(self._rank, head.client, frame))

    def _greet(self, hello: ClientHello, link: Link) -> None:
        client = hello.client
        if not is_client_name(client):
            logger.warning("an API server with an impossible name was refused")
            return
        if client not in self._outbox.clients:
            self._outbox.connect(client)
            if hasattr(os, "pidfd_open"):
                try:
                    self._processes[client] = os.pidfd_open(hello.pid)
                except OSError:  # it has ended already
                    self._outbox.disconnect(client)
                    return
                self._loop.add_reader(self._processes[client], self._forget, client)
        link.send(Greet(self._rank, client))

    def _forget(self, client: str, last_words: str | None = None, *, tell_host: bool = True) -> None:
        """A client has left, or receives these last words, because the engine has ended."""
        if (descriptor := self._processes.pop(client, None)) is not None:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        if last_words is None:
            self._outbox.disconnect(client)
        else:
            self._outbox.send_last(client, messages.encode(Dead(last_words)))
        link: Link | None = self._link()
        if tell_host and link is not None:
            link.send(Leave(self._rank, client))


def remote_engines(
    config: EngineConfig, directory: Path, *, index: int, started: StartedReplicas | None, roles: Roles | None
) -> RemoteEngines | None:
    """The replicas of other hosts, if there are any. See RemoteEngines."""
    if config.parallel.num_replicas == 1 or config.parallel.nnodes == 1:
        return None
    return RemoteEngines(config, directory, index=index, started=started, roles=roles)


def names_of(replicas: range) -> str:
    return f"replica{'s' * (len(replicas) > 1)} {', '.join(map(str, replicas))}"


def _are(replicas: range) -> str:
    return f"{names_of(replicas)} {'are' if len(replicas) > 1 else 'is'}"

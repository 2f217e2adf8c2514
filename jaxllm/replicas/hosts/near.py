"""Host 0's side of replicas on other hosts: stands in for their engine processes, and carries the API servers' messages to them."""

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
from jaxllm.engine.messages import Hello as FrontHello
from jaxllm.engine.sockets import ENGINE_SOCKET, Outbox, is_client_name
from jaxllm.errors import ConfigError, EngineDeadError
from jaxllm.framing import WireError
from jaxllm.hosts.identity import difference
from jaxllm.hosts.listening import Started, listen
from jaxllm.log import logger
from jaxllm.replicas.devices import ranks_here
from jaxllm.replicas.hosts import wire
from jaxllm.replicas.hosts.identity import identity
from jaxllm.replicas.hosts.inbox import Inbox
from jaxllm.replicas.hosts.wire import (
    Challenge,
    End,
    Ended,
    Failed,
    Frame,
    Greet,
    Hello,
    Leave,
    Link,
    Refused,
    Stopping,
    Welcome,
)
from jaxllm.replicas.processes import MAX_RESTARTS, RESTART_WINDOW_SECONDS

MAX_STRANGERS = 64
"""Connections above one a host that may wait to say hello. Beyond, the oldest is closed: hosts say hello at once."""
_POLL_SECONDS, _TELL_SECONDS = 0.5, 10.0
_LAST_SECONDS = 1.0
"""The longest wait for the last messages to other hosts to be sent."""


class _UnprovenError(ConfigError):
    """A host has not proven that it has the token."""


class _Head(msgspec.Struct, array_like=True):
    """Beginning of every message of an API server."""

    tag: str
    client: str


_head = msgspec.msgpack.Decoder(_Head)


@dataclass
class _Host:
    """Another host that is connected."""

    number: int
    name: str
    link: Link
    replicas: range
    is_stopping: bool = False
    """Whether it is to end, and lets its requests end before."""

    def __str__(self) -> str:
        return f"host {self.number} ({self.name}, {self.link.peer})"


class StartedReplicas(Started, Protocol):
    """Starter of the other hosts, which can restart them."""

    def start_again(self, rank: int) -> None:
        """Start a host that was lost."""


class ReplicasElsewhere:
    """The replicas of other hosts. Everything runs in an event loop, but for the constructor.

    `directory` gets one for the sockets of each replica; `index`: the number of this process's clients, after the API servers';
    `started`: what started the other hosts, if that was not done by hand.
    Raises ConfigError if host 0 cannot listen at its address.
    """

    def __init__(self, config: EngineConfig, directory: Path, *, index: int, started: StartedReplicas | None = None):
        self._options, self._index, self._started = config.parallel, index, started
        self._restarts: list[float] = []
        """When hosts were started again."""
        self._found = identity(config)
        self._listening = listen(config.parallel)
        here = ranks_here(config.parallel)
        self.directories = {rank: directory / str(rank) for rank in range(config.parallel.num_replicas) if rank not in here}
        """Directories of the sockets of each of them."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._hosts: dict[int, _Host] = {}
        self._strangers: dict[Link, None] = {}
        """Connections that have not said hello yet, the oldest first."""
        self._refused = ""
        """Why a host without the token was refused last."""
        self._stand_ins: dict[int, _StandIn] = {}
        self._has_started = False
        """Whether all replicas served once: until then a host that is missing or lost fails the start."""
        self._fault: asyncio.Future[str]
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Wait for the other hosts from now on."""
        self._fault = asyncio.get_running_loop().create_future()
        for rank, directory in self.directories.items():
            directory.mkdir()
            host = rank // (self._options.num_replicas // self._options.nnodes)
            stand_in = self._stand_ins[rank] = _StandIn(rank, directory, self._context, lambda host=host: self._link_to(host))
            self._tasks.add(asyncio.create_task(stand_in.run()))
        self._server = await asyncio.start_server(self._accept, sock=self._listening)
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
        for task in self._tasks:
            task.cancel()
        (self._listening if self._server is None else self._server).close()
        self._context.destroy(linger=0)

    # Hosts

    def _link_to(self, number: int) -> Link | None:
        host = self._hosts.get(number)
        return None if host is None else host.link

    async def _watch_start(self) -> None:
        """Say which hosts are missing, and fail the start if they do not come in time."""
        options = self._options
        deadline, next_told = time.monotonic() + options.distributed_timeout_seconds, time.monotonic() + _TELL_SECONDS
        logger.info(
            "host 0 of %d waits for the others at %s, port %d", options.nnodes, options.master_addr, options.master_port
        )
        while missing := [number for number in range(1, options.nnodes) if number not in self._hosts]:
            if self._has_started or self._fault.done():
                return
            if (left := deadline - time.monotonic()) <= 0:
                self._fail_start(
                    f"these hosts did not connect to {options.master_addr}, port {options.master_port}, within "
                    f"{options.distributed_timeout_seconds} s (--distributed-timeout-seconds): {', '.join(map(str, missing))}; start "
                    f"each with the same options and its --node-rank, and see that it reaches this address{self._refused}"
                )
                return
            if self._started is not None and (fault := self._started.fault()) is not None:
                self._fail_start(fault)
                return
            if time.monotonic() > next_told:
                next_told += _TELL_SECONDS
                logger.info("host 0 still waits for: %s", ", ".join(map(str, missing)))
            await asyncio.sleep(min(left, _POLL_SECONDS))

    def _fail_start(self, reason: str) -> None:
        if not self._has_started and not self._fault.done():
            self._fault.set_result(reason)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer, wire.of_others)
        try:
            host = await self._welcome(link)
        except WireError as error:
            logger.warning("a connection from %s is no host's: %s", link.peer, error)
            await link.close()
            return
        except ConfigError as error:
            logger.error("%s", error)
            link.send(Refused(str(error)))
            await link.close(within_seconds=_LAST_SECONDS)
            if isinstance(error, _UnprovenError):  # it must not end the start of hosts that have the token
                self._refused = f"; {error}"
            else:
                self._fail_start(str(error))
            return
        self._hosts[host.number] = host
        logger.info("%s is there, with %s", host, names_of(host.replicas))
        link.begin()
        try:
            reason = f"{host} ended: {await self._listen_to(host)}"
        except WireError as error:
            reason = f"{host} is lost: {error}"
        except Exception:
            logger.exception("what %s sent could not be carried", host)
            reason = f"{host} is dropped: what it sent could not be carried; the log says more"
        if self._hosts.get(host.number) is host:  # else this host ends
            del self._hosts[host.number]
            level = logging.INFO if host.is_stopping else logging.ERROR
            logger.log(level, "%s; until it is started again, %s down", reason, _are(host.replicas))
            for rank in host.replicas:
                self._stand_ins[rank].end_all(reason)
            self._fail_start(reason)
            await self._start_again(host)
        await link.close()

    async def _start_again(self, host: _Host) -> None:
        """Restart a lost host, if there is a launcher, unless that happens too often."""
        if self._started is None or not self._has_started:
            return
        self._restarts = [at for at in self._restarts if at > time.monotonic() - RESTART_WINDOW_SECONDS]
        if len(self._restarts) < MAX_RESTARTS:
            self._restarts.append(time.monotonic())
            await asyncio.to_thread(self._started.start_again, host.number)
        else:
            logger.error("hosts were lost %d times within %g s; %s stays down", MAX_RESTARTS + 1, RESTART_WINDOW_SECONDS, host)

    async def _welcome(self, link: Link) -> _Host:
        """The host at the other end. Raises WireError if it is none, ConfigError if it may not take part."""
        options = self._options
        nonce = wire.new_nonce()
        link.send(Challenge(nonce))
        self._strangers[link] = None
        if len(self._strangers) > options.nnodes + MAX_STRANGERS:
            next(iter(self._strangers)).abort()
        try:
            hello = await link.first()
        finally:
            del self._strangers[link]
        if not isinstance(hello, Hello) or not hello.name.isprintable():
            raise WireError("it did not say hello")
        share = options.num_replicas // options.nnodes
        host = _Host(hello.rank, hello.name, link, range(hello.rank * share, (hello.rank + 1) * share))
        if not wire.is_proven(hello.proof, "host", nonce):
            raise (_UnprovenError if wire.token() else ConfigError)(
                f"{host} has another token than host 0, or one of them has none; set the same JAXLLM_HOSTS_TOKEN on all hosts"
            )
        if hello.protocol != wire.PROTOCOL:
            raise ConfigError(
                f"{host} speaks version {hello.protocol} of the hosts' protocol, host 0 version {wire.PROTOCOL}; install the same jaxllm"
            )
        if (differs := difference(["host 0", f"host {hello.rank}"], [self._found, hello.identity])) is not None:
            raise ConfigError(
                f"{host} differs from host 0: {differs}; start all hosts with the same versions, options and model"
            )
        if not 1 <= hello.rank < options.nnodes:
            raise ConfigError(f"{host} has node_rank {hello.rank}, there are 1 to {options.nnodes - 1}")
        if (other := self._hosts.get(hello.rank)) is not None:
            raise ConfigError(f"two hosts have node_rank {hello.rank}: {other} and {host}; give each its own")
        link.send(Welcome(wire.proof("host 0", hello.nonce)))
        return host

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
            stand_in = self._stand_ins[message.replica]
            if isinstance(message, Frame):
                stand_in.deliver(message.client, message.data)
            else:
                stand_in.end(message.clients, message.reason)


class _StandIn:
    """The sockets of an engine process that runs on another host, as its clients on this one see them."""

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
            hello = messages.decode_front_message(frame) if head.tag == "hello" else None
        except (msgspec.MsgspecError, MessageError) as error:
            logger.warning("a message of an API server was refused: %s", error)
            return
        if link is None:  # a client that is new says Hello again; the others were notified
            return
        if isinstance(hello, FrontHello):
            self._greet(hello, link)
        elif head.tag == "bye":
            self._forget(head.client)
        elif head.client in self._outbox.clients:
            link.send_frame(self._rank, head.client, frame)

    def _greet(self, hello: FrontHello, link: Link) -> None:
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


def replicas_elsewhere(
    config: EngineConfig, directory: Path, *, index: int, started: StartedReplicas | None
) -> ReplicasElsewhere | None:
    """The replicas of other hosts, if there are any. See ReplicasElsewhere."""
    if config.parallel.num_replicas == 1 or config.parallel.nnodes == 1:
        return None
    return ReplicasElsewhere(config, directory, index=index, started=started)


def of_one_host(config: EngineConfig) -> EngineConfig:
    """The options of each engine process: one of several replicas lies whole on a host."""
    if config.parallel.num_replicas == 1:
        return config
    return config.replace(nnodes=1, node_rank=0, distributed_executor_backend=None)


def names_of(replicas: range) -> str:
    return f"replica{'s' * (len(replicas) > 1)} {', '.join(map(str, replicas))}"


def _are(replicas: range) -> str:
    return f"{names_of(replicas)} {'are' if len(replicas) > 1 else 'is'}"

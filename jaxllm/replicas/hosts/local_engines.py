"""Sockets of remote API servers on a host above 0, and the messages between them and its engine processes."""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import zmq

from jaxllm.engine import messages
from jaxllm.engine.messages import Bye, Fault
from jaxllm.engine.messages import Hello as ClientHello
from jaxllm.engine.messages import Refused as RequestRefused
from jaxllm.engine.sockets import ENGINE_SOCKET, MAX_QUEUED_MESSAGES, is_client_name, socket_address
from jaxllm.framing import WireError
from jaxllm.replicas.hosts.inbox import Inbox
from jaxllm.replicas.hosts.link import Link
from jaxllm.replicas.hosts.wire import End, Ended, Frame, Greet, Leave


class LocalEngines:
    """Carries messages between host 0 and the engine processes whose sockets are in `directories`, by replica."""

    def __init__(self, link: Link, directories: Mapping[int, Path]):
        self._link = link
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._engines = {rank: _Engine(rank, directory, self._context, link) for rank, directory in directories.items()}

    async def run(self) -> str:
        """Until host 0 ends. Returns its reason, empty if it was shut down. Raises WireError if it is lost."""
        while True:
            message = await self._link.receive()
            if isinstance(message, End):
                return message.reason
            if not isinstance(message, (Greet, Leave, Frame)) or message.replica not in self._engines:
                raise WireError("it sent what this host did not expect")
            engine = self._engines[message.replica]
            if isinstance(message, Frame):
                engine.send(message.client, message.data)
            elif isinstance(message, Greet):
                engine.greet(message.client)
            else:
                engine.leave(message.client)

    def engine_ended(self, rank: int, reason: str) -> None:
        """An engine process has ended: send its last messages, and notify its clients."""
        clients = self._engines[rank].end()
        self._link.send(Ended(rank, clients, reason))

    async def close(self) -> None:
        tasks = [task for engine in self._engines.values() for task in engine.close()]
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=0)


class _Engine:
    """The sockets to an engine process of this host, as the API servers have them."""

    def __init__(self, rank: int, directory: Path, context: "zmq.Context[zmq.Socket[bytes]]", link: Link):
        self._rank, self._directory, self._context, self._link = rank, directory, context, link
        self._inboxes: dict[str, Inbox] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._outbox = self._connect()

    def _connect(self) -> "zmq.Socket[bytes]":
        outbox = self._context.socket(zmq.PUSH)
        outbox.sndhwm = 10 * MAX_QUEUED_MESSAGES
        outbox.immediate = True  # no queue for a process that does not listen yet
        outbox.connect(socket_address(self._directory, ENGINE_SOCKET))
        return outbox

    def greet(self, client: str) -> None:
        """Listen under an API server's name, and have the engine answer there."""
        if client not in self._inboxes:
            if not is_client_name(client):
                raise WireError("it sent an impossible name of an API server")
            self._inboxes[client] = Inbox(self._context, self._directory, client)
            self._tasks[client] = asyncio.create_task(self._carry(client, self._inboxes[client]))
        self._put(messages.encode(ClientHello(client, os.getpid())))  # this process ends with the connection

    def send(self, client: str, frame: bytes) -> None:
        """Give the engine a message of an API server."""
        if client in self._inboxes and not self._put(frame) and (sender := messages.sender_of_add(frame)) is not None:
            refusal = RequestRefused(sender[1], Fault("engine", "the engine process does not fetch its messages"))
            self._link.send(Frame(self._rank, client, messages.encode(refusal)))

    def leave(self, client: str) -> None:
        """An API server has left."""
        if self._inboxes.pop(client, None) is not None:
            self._tasks.pop(client).cancel()
            self._put(messages.encode(Bye(client)))

    def end(self) -> list[str]:
        """The engine process has ended: send its last messages to the API servers, and forget all of them. Returns their names."""
        for client, inbox in self._inboxes.items():
            while frames := inbox.frames_now():
                for frame in frames:
                    self._link.send(Frame(self._rank, client, frame))
        clients = list(self._inboxes)
        self.close()
        self._outbox = self._connect()  # with an empty queue
        return clients

    def close(self) -> "list[asyncio.Task[None]]":
        """Close the sockets. Returns the tasks that then end."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        self._tasks.clear()
        self._inboxes.clear()
        self._outbox.close(linger=0)
        return tasks

    def _put(self, frame: bytes) -> bool:
        """Whether the engine process will get it."""
        try:
            self._outbox.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    async def _carry(self, client: str, inbox: Inbox) -> None:
        try:
            while True:
                for frame in await inbox.frames():
                    self._link.send(Frame(self._rank, client, frame))
                await self._link.drained()
        finally:
            inbox.close()

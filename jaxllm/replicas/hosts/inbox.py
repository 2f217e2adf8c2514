"""A socket that receives messages of processes of this host, in an event loop."""

import asyncio
from pathlib import Path

import zmq

from jaxllm.engine import messages
from jaxllm.engine.sockets import MAX_QUEUED_MESSAGES, socket_address

_MAX_FRAMES = 64


class Inbox:
    """A PULL socket of this name in a directory."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", directory: Path, name: str):
        self._path = directory / name
        self._socket = context.socket(zmq.PULL)
        self._socket.rcvhwm = MAX_QUEUED_MESSAGES
        self._socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_BYTES)
        self._socket.bind(socket_address(directory, name))
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop = asyncio.get_running_loop()

    def frames_now(self) -> list[bytes]:
        """Some of the messages that are there."""
        frames: list[bytes] = []
        try:
            while len(frames) < _MAX_FRAMES:
                frames.append(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            pass
        return frames

    async def frames(self) -> list[bytes]:
        """The next messages: one, and more if they are there. One task may wait."""
        while not (frames := self.frames_now()):
            # The descriptor stays readable until the socket is read: it is watched only while nothing is there.
            is_readable: asyncio.Future[None] = self._loop.create_future()
            self._loop.add_reader(self._fd, _complete, is_readable)
            try:
                await is_readable
            finally:
                self._loop.remove_reader(self._fd)
        return frames

    def close(self) -> None:
        """Close it, when no task waits for it any more."""
        self._socket.close(linger=0)
        self._path.unlink(missing_ok=True)


def _complete(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)

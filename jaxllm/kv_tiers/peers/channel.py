"""One end of a connection between two engines: messages, and bytes of contents between them. For one thread at a time."""

import contextlib
import os
import select
import socket
import time
from typing import Any

from jaxllm.framing import Accepted, ClosedError, Incoming, Message, WireError, frame


class Channel:
    """All waits are limited. Methods raise ClosedError if the other end has closed it, and another WireError if it took too long."""

    def __init__(self, stream: socket.socket, accepted: Accepted):
        self._socket, self._incoming = stream, Incoming(accepted)
        if stream.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):  # the first use says that it is closed
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def is_local(self) -> bool:
        """Whether descriptors can be passed."""
        return self._socket.family == socket.AF_UNIX

    @property
    def user_id(self) -> int:
        """The user of the other end, which is on the same host."""
        found = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int.from_bytes(found[4:8], "little")

    @property
    def is_left(self) -> bool:
        """Whether the other end has closed it. Reads nothing: another thread may use it meanwhile."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def accept(self, accepted: Accepted) -> None:
        """Expect these messages from now on."""
        self._incoming.accepted = accepted

    def send(self, message: Message, seconds: float, content: "memoryview | None" = None) -> None:
        """Send a message, and the bytes of a content behind it, within so many seconds."""
        try:
            self._socket.settimeout(seconds)
            data = frame(message, self._incoming.accepted.max_bytes)
            self._socket.sendall(data, 0 if content is None else socket.MSG_MORE)
            if content is not None:
                self._socket.sendall(content)
        except OSError as error:
            raise _fault(error) from error

    def receive(self, seconds: float) -> Any:
        """The next message, which must be whole within so many seconds. Raises WireError."""
        deadline = time.monotonic() + seconds
        try:
            while True:
                self._limit(deadline)
                message = self._incoming.take(self._socket.recv(self._incoming.num_wanted))
                if message is not None:
                    return message
        except OSError as error:
            raise _fault(error) from error

    def receive_into(self, content: memoryview, seconds: float) -> None:
        """Bytes of a content, all within so many seconds."""
        deadline, start = time.monotonic() + seconds, 0
        try:
            while start < len(content):
                self._limit(deadline)
                count = self._socket.recv_into(content[start:])
                if not count:
                    raise ClosedError("the connection was closed")
                start += count
        except OSError as error:
            raise _fault(error) from error

    def send_descriptor(self, descriptor: int, seconds: float) -> None:
        """Send a descriptor of a file with a byte, to a process of the same host."""
        try:
            self._socket.settimeout(seconds)
            socket.send_fds(self._socket, [b"\0"], [descriptor])
        except OSError as error:
            raise _fault(error) from error

    def receive_descriptor(self, seconds: float) -> int:
        """The descriptor that comes with the next byte; the caller closes it. Raises WireError."""
        try:
            self._socket.settimeout(seconds)
            found, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        except OSError as error:
            raise _fault(error) from error
        if not found or len(descriptors) != 1:
            for descriptor in descriptors:
                os.close(descriptor)
            raise WireError("no descriptor came")
        return descriptors[0]

    def interrupt(self) -> None:
        """End the connection under a thread that uses it, which then closes it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it. No other thread uses it."""
        self.interrupt()
        self._socket.close()

    def _limit(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise WireError("it did not send in time")
        self._socket.settimeout(left)


def _fault(error: OSError) -> WireError:
    if isinstance(error, TimeoutError):
        return WireError("it did not send or receive in time")
    return ClosedError(f"the connection is closed ({error})")

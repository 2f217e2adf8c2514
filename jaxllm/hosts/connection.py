"""One end of a connection between hosts, for threads. `replicas.hosts.link` has the one for an event loop. Does not import JAX."""

import contextlib
import select
import socket
import threading
import time
from typing import Any

from jaxllm.framing import BEAT_SECONDS, Accepted, Beat, ClosedError, Incoming, Message, frame

_POLL_SECONDS = 0.25


class Connection:
    """Any thread may send; one receives. Raises WireError if the other end has closed already."""

    def __init__(self, stream: socket.socket, accepted: Accepted):
        self._socket, self._incoming = stream, Incoming(accepted)
        self._sending = threading.Lock()
        self._seconds: float | None = None
        try:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the kernel holds back no short messages
            self.peer = str(stream.getpeername()[0])
            """The address of the other end."""
        except OSError as error:
            raise ClosedError(f"the connection is closed ({error})") from error

    def accept(self, accepted: Accepted) -> None:
        """Expect these messages from now on. Both ends change to another protocol after the same message."""
        self._incoming.accepted = accepted

    def limit(self, seconds: float | None) -> None:
        """How long to wait for each part of a message, also for one that another thread waits for."""
        self._seconds = seconds
        self._socket.settimeout(seconds)

    def send_beats(self) -> None:
        """Send heartbeats from now on, until the connection is closed."""
        threading.Thread(target=self._send_beats, name=f"beat-{self.peer}", daemon=True).start()

    def _send_beats(self) -> None:
        with contextlib.suppress(ClosedError):
            while True:
                self.send(Beat())
                time.sleep(BEAT_SECONDS)

    def send(self, message: Message) -> None:
        """Raises WireError if the other end has closed, or the message is too long."""
        self.send_frame(frame(message, self._incoming.accepted.max_bytes))

    def send_frame(self, data: bytearray) -> None:
        """Send what `framing.frame` returned."""
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError as error:
            raise ClosedError(f"the connection is closed ({error})") from error

    def receive(self, within_seconds: float | None = None) -> Any:
        """Wait for the next message but for heartbeats. Raises WireError if there is none any more, it is malformed, or not whole within
        these seconds."""
        deadline = None if within_seconds is None else time.monotonic() + within_seconds
        try:
            while True:
                self._wait(deadline)
                message = self._incoming.take(self._socket.recv(self._incoming.num_wanted))
                if message is not None and not isinstance(message, Beat):
                    return message
        except OSError as error:
            raise ClosedError(f"the connection is closed ({error})") from error

    def _wait(self, deadline: float | None) -> None:
        """Wait until there is something to read."""
        poll, began = select.poll(), time.monotonic()
        poll.register(self._socket, select.POLLIN)
        while deadline is None or (now := time.monotonic()) < deadline:
            if poll.poll(1000 * (_POLL_SECONDS if deadline is None else min(_POLL_SECONDS, deadline - now))):
                return
            if deadline is None and self._seconds is not None and time.monotonic() - began > self._seconds:
                raise ClosedError(f"nothing was heard for {self._seconds:g} s")
        raise ClosedError("no whole message came in time")

    @property
    def stream(self) -> socket.socket:
        """The socket. Between two messages another object may take it over."""
        return self._socket

    def close(self) -> None:
        """Close it, also under a thread that sends or receives."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

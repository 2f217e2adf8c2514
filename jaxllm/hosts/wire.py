"""Messages between the hosts of an engine, and the connection that carries them. Does not import JAX.

A follower sends `Hello`, `Facts`, `Done`, `Result`, `Failed` and `Beat`; host 0 sends `Welcome`, `Refused`, `AllFacts`, the calls and
`Beat`.
The network between the hosts must be trusted: nothing is encrypted, and whoever reaches the port of host 0 may take a host's place.
"""

import contextlib
import select
import socket
import threading
import time
from typing import Any

import msgspec

from jaxllm import framing
from jaxllm.device_ops import AnyDeviceOp
from jaxllm.engine.messages import Fault
from jaxllm.framing import ClosedError
from jaxllm.framing import Message as _Message
from jaxllm.scheduler_output import SchedulerOutput

PROTOCOL = 4
MAX_MESSAGE_BYTES = 64 << 20
"""A longer message ends its connection. The plan of a step with long new prompts is the longest."""
PIECE_BYTES = 4 << 20
"""Staged data is sent in pieces of this size, so that steps and heartbeats need not wait for a whole one."""
_PART_BYTES = 1 << 20
_POLL_SECONDS = 0.25


# From a follower


class Hello(_Message, tag="hello"):
    """The first message. `identity`: all that must be the same on every host, by a name for error messages."""

    protocol: int
    rank: int
    num_hosts: int
    name: str
    identity: dict[str, str]


class Facts(_Message, tag="facts"):
    """Facts of this host in a phase of the start. Answered by AllFacts once every host has sent its own."""

    phase: str
    facts: dict[str, Any]


class Done(_Message, tag="done"):
    """A numbered call has been run, or failed."""

    number: int
    fault: Fault | None = None


class Result(_Message, tag="result"):
    """Results of this host's data-parallel ranks for the next step that was drawn. Long ones come in pieces."""

    data: bytes
    is_last: bool


class Failed(_Message, tag="failed"):
    """This host cannot go on."""

    fault: Fault


# From host 0


class Welcome(_Message, tag="welcome"):
    """All hosts are there. `coordinator_port`: where `jax.distributed` listens on host 0."""

    coordinator_port: int


class Refused(_Message, tag="refused"):
    """This host may not take part."""

    reason: str


class AllFacts(_Message, tag="all_facts"):
    """The facts of all hosts in a phase of the start, in the order of their ranks."""

    phase: str
    facts: list[dict[str, Any]]


class Dispatch(_Message, tag="dispatch"):
    """Run a step."""

    plan: SchedulerOutput


class DispatchRanks(_Message, tag="dispatch_ranks"):
    """Run a step that has these parts, one for each data-parallel rank. Answered by Result once it is drawn."""

    ranks: list[SchedulerOutput]
    step_id: int
    ops: tuple[AnyDeviceOp, ...]


class Draw(_Message, tag="draw"):
    """Sample the latest step under its first masks; those of the other requests allow every token. mask: int32[R, V / 32], row by row."""

    num_rows: int
    mask: bytes


class Drawn(_Message, tag="drawn"):
    """The tokens that the next step drew, in the order of its requests. Of a pipeline, whose first stage lies on another host."""

    tokens: list[int]


class Piece(_Message, tag="piece"):
    """A part of what is staged under a handle, `size` bytes in all, from the byte `start` on. The last one is answered by Done."""

    number: int
    handle: int
    size: int
    start: int
    data: bytes


class Do(_Message, tag="do"):
    """Call a method of the runner, one of `follower.CALLS`. Answered by Done."""

    number: int
    method: str
    arguments: list[str] = []


class End(_Message, tag="end"):
    """The engine ends: with a reason after a failure, with none if it is shut down."""

    reason: str = ""


# From either side


class Beat(_Message, tag="beat"):
    """Sent every BEAT_SECONDS."""


FromFollower = Hello | Facts | Done | Result | Failed | Beat
_Call = Dispatch | DispatchRanks | Draw | Drawn | Piece | Do
FromHost0 = Welcome | Refused | AllFacts | _Call | End | Beat

of_follower: Any = msgspec.msgpack.Decoder(FromFollower)  # type: ignore[arg-type]
of_host_0: Any = msgspec.msgpack.Decoder(FromHost0)  # type: ignore[arg-type]


def framed(message: Any) -> bytes:
    """A message as it is sent. Raises WireError if it is too long."""
    return framing.frame(message, MAX_MESSAGE_BYTES)


class Connection:
    """One end of a connection. Any thread may send; one receives. Raises WireError if the other end has closed already."""

    def __init__(self, stream: socket.socket, decoder: Any):
        self._socket, self._decoder = stream, decoder
        self._sending = threading.Lock()
        self._seconds: float | None = None
        try:
            framing.send_at_once(stream)
            self.peer = str(stream.getpeername()[0])
            """The address of the other end."""
        except OSError as error:
            raise ClosedError(f"the connection is closed ({error})") from error

    def limit(self, seconds: float | None) -> None:
        """How long to wait for each part of a message, also for one that another thread waits for."""
        self._seconds = seconds
        self._socket.settimeout(seconds)

    def send(self, message: Any) -> None:
        """Raises WireError if the other end has closed."""
        self.send_frame(framed(message))

    def send_frame(self, frame: bytes) -> None:
        """Send what `framed` returned."""
        try:
            with self._sending:
                self._socket.sendall(frame)
        except OSError as error:
            raise ClosedError(f"the connection is closed ({error})") from error

    def first(self, seconds: float) -> Any:
        """Wait for the first message, of an end that is not known yet. Raises WireError, also if it is not whole within these seconds."""
        return self._receive(framing.FIRST_BYTES, time.monotonic() + seconds)

    def receive(self) -> Any:
        """Wait for the next message. Raises WireError if there is none any more or it is malformed."""
        return self._receive(MAX_MESSAGE_BYTES)

    def _receive(self, max_bytes: int, deadline: float | None = None) -> Any:
        try:
            size = framing.size_of(self._read(framing.HEADER_BYTES, deadline), max_bytes)
            body = self._read(size, deadline)
        except OSError as error:
            raise ClosedError(f"the connection is closed ({error})") from error
        return framing.decoded(self._decoder, body)

    def _read(self, size: int, deadline: float | None) -> bytearray:
        found = bytearray()  # grows with what comes, not with what was announced
        while len(found) < size:
            self._wait(deadline)
            part = self._socket.recv(min(size - len(found), _PART_BYTES))
            if not part:
                raise ClosedError("the connection was closed")
            found += part
        return found

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

    def close(self) -> None:
        """Close it, also under a thread that sends or receives."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

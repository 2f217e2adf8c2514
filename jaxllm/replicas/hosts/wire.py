"""Messages between hosts that have replicas each, and the connection that carries them.

Host 0 begins with `Challenge`; the other host answers `Hello` and gets `Welcome` or `Refused`. Then host 0 sends `Greet`, `Leave`,
`Frame`, `Beat` and `End`, the other `Frame`, `Ended`, `Stopping`, `Failed` and `Beat`. Nothing is encrypted. If both hosts have a token,
each proves to the other that it knows it, without sending it.
"""

import asyncio
import contextlib
import hashlib
import hmac
import os
import secrets
from typing import Any

import msgspec

from jaxllm import env, framing
from jaxllm.engine.messages import MAX_MESSAGE_BYTES
from jaxllm.framing import ClosedError, WireError
from jaxllm.framing import Message as _Message
from jaxllm.hosts.listening import BEAT_SECONDS, SILENCE_SECONDS

PROTOCOL = 2
PIECE_BYTES = 1 << 20
"""Longer frames are sent in pieces, between which heartbeats fit."""
MAX_PIECE_BYTES = 4 << 20
FIRST_SECONDS = 5.0
"""The longest wait for each of the first messages."""


class Challenge(_Message, tag="challenge"):
    """The first message of host 0. `nonce` goes into the proof of the other host."""

    nonce: bytes


class Hello(_Message, tag="hello"):
    """The answer. `identity`: all that must be the same on every host, by a name for error messages."""

    protocol: int
    rank: int
    name: str
    nonce: bytes
    proof: bytes
    identity: dict[str, str]


class Welcome(_Message, tag="welcome"):
    """This host takes part."""

    proof: bytes


class Refused(_Message, tag="refused"):
    """This host may not take part."""

    reason: str


class Greet(_Message, tag="greet"):
    """An API server opens a connection to a replica. Repeated until the replica's engine has answered it."""

    replica: int
    client: str


class Leave(_Message, tag="leave"):
    """An API server closes its connection to a replica."""

    replica: int
    client: str


class Frame(_Message, tag="frame"):
    """A message between an API server and a replica's engine, or a piece of it; more pieces of it follow unless it is the last."""

    replica: int
    client: str
    data: bytes
    is_last: bool = True


class Ended(_Message, tag="ended"):
    """A replica's engine process has ended, and with it the requests of these API servers."""

    replica: int
    clients: list[str]
    reason: str


class Stopping(_Message, tag="stopping"):
    """This host ends once the requests of its replicas have, or their time is over."""


class Failed(_Message, tag="failed"):
    """This host ends."""

    reason: str


class Beat(_Message, tag="beat"):
    """Sent every BEAT_SECONDS."""


class End(_Message, tag="end"):
    """Host 0 ends: with a reason after a failure, with none if it is shut down."""

    reason: str = ""


of_others: Any = msgspec.msgpack.Decoder(Hello | Frame | Ended | Stopping | Failed | Beat)  # type: ignore[arg-type]
of_host_0: Any = msgspec.msgpack.Decoder(Challenge | Welcome | Refused | Greet | Leave | Frame | Beat | End)  # type: ignore[arg-type]


class Link:
    """One end of a connection, in an event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: Any):
        self._reader, self._writer, self._decoder = reader, writer, decoder
        self._pieces: dict[tuple[int, str], bytearray] = {}
        self._heard = asyncio.get_running_loop().time()
        self._fault: str | None = None
        self._beats: asyncio.Task[None] | None = None
        self.peer = str((writer.get_extra_info("peername") or ["an end that is gone"])[0])
        """The address of the other end."""
        with contextlib.suppress(OSError):  # the peer has closed it already, as the first message will show
            framing.send_at_once(writer.get_extra_info("socket"))

    def begin(self) -> None:
        """Send heartbeats from now on, and expect those of the other end: without, `receive` raises after SILENCE_SECONDS."""
        self._heard = asyncio.get_running_loop().time()
        self._beats = asyncio.create_task(self._beat())

    def send(self, message: Any) -> None:
        """Send a message, soon. Nothing happens if the other end has closed: `receive` raises."""
        if not self._writer.is_closing():
            self._writer.write(framing.frame(message, MAX_PIECE_BYTES))

    def send_frame(self, replica: int, client: str, data: bytes) -> None:
        """Send a Frame, in pieces."""
        for start in range(0, len(data), PIECE_BYTES):
            end = start + PIECE_BYTES
            self.send(Frame(replica, client, data[start:end], end >= len(data)))

    async def drained(self) -> None:
        """Wait until most of the send buffer is written, or the other end has closed."""
        try:
            await self._writer.drain()
        except (ConnectionError, OSError):
            return

    async def receive(self) -> Any:
        """The next message but for heartbeats; a Frame whole. Raises WireError if there is none any more or it is malformed."""
        while True:
            message = await self._receive()
            if isinstance(message, Beat):
                continue
            if isinstance(message, Frame) and (not message.is_last or (message.replica, message.client) in self._pieces):
                pieces = self._pieces.setdefault((message.replica, message.client), bytearray())
                pieces += message.data
                if len(pieces) > MAX_MESSAGE_BYTES:
                    raise WireError(f"a message is longer than {MAX_MESSAGE_BYTES} bytes")
                if not message.is_last:
                    continue
                message.data = bytes(self._pieces.pop((message.replica, message.client)))
            return message

    async def first(self) -> Any:
        """A message of an end that is not known yet. Raises WireError, also if it is not whole within FIRST_SECONDS."""
        try:
            async with asyncio.timeout(FIRST_SECONDS):
                return await self._receive(framing.FIRST_BYTES)
        except TimeoutError:
            raise WireError(f"no whole message came within {FIRST_SECONDS:g} s") from None

    async def _receive(self, max_bytes: int = MAX_PIECE_BYTES) -> Any:
        try:
            size = framing.size_of(await self._reader.readexactly(framing.HEADER_BYTES), max_bytes)
            body = await self._reader.readexactly(size)
        except (EOFError, OSError) as error:
            raise ClosedError(self._fault or "the connection was closed") from error
        self._heard = asyncio.get_running_loop().time()
        return framing.decoded(self._decoder, body)

    async def _beat(self) -> None:
        while True:
            self.send(Beat())
            await asyncio.sleep(BEAT_SECONDS)
            silence = asyncio.get_running_loop().time() - self._heard
            if silence > SILENCE_SECONDS:
                self._fault = f"it was silent for {silence:.0f} s"
                self.abort()
                return

    def abort(self) -> None:
        """Close it at once: `receive` raises ClosedError."""
        self._writer.transport.abort()

    async def close(self, *, within_seconds: float = 0.0) -> None:
        """Close it, after sending what is queued if that takes no longer than so many seconds."""
        if self._beats is not None:
            self._beats.cancel()
        if within_seconds:
            self._writer.close()
            try:
                async with asyncio.timeout(within_seconds):
                    await self._writer.wait_closed()
            except (TimeoutError, OSError):
                pass
        self.abort()


def token() -> bytes:
    """The token of this host; empty if it has none."""
    return os.environ.get(env.HOSTS_TOKEN, "").encode()


def new_nonce() -> bytes:
    return secrets.token_bytes(16)


def proof(of: str, nonce: bytes) -> bytes:
    """Proof for the other end, which chose the nonce, that this one knows the token; `of` keeps it from being sent back to its sender."""
    return hmac.new(token(), of.encode() + b"\0" + nonce, hashlib.sha256).digest()


def is_proven(found: bytes, of: str, nonce: bytes) -> bool:
    """Whether the other end has this host's token: none is one too."""
    return hmac.compare_digest(found, proof(of, nonce))

"""Framing of all protocols between hosts: messages in msgpack, never pickles, each after its length. Does not import JAX."""

import socket
import struct
from typing import Any

import msgspec

from jaxllm.errors import JaxLLMError

_LENGTH = struct.Struct(">I")
HEADER_BYTES = _LENGTH.size
FIRST_BYTES = 64 << 10
"""The most that a message may have which comes before the other end has shown who it is."""
_encoder = msgspec.msgpack.Encoder(enc_hook=lambda value: value.item())  # numpy's numbers


class WireError(JaxLLMError):
    """A connection between hosts is closed, or what came through it is no message."""


class ClosedError(WireError):
    """The connection is closed."""


class Message(msgspec.Struct, array_like=True):
    """A message of a protocol. Fields are positional."""


def frame(message: Message, max_bytes: int) -> bytes:
    """A message as it is sent. Raises WireError if it is longer than the other end allows."""
    body = _encoder.encode(message)
    if len(body) > max_bytes:
        raise WireError(f"a {type(message).__name__} of {len(body)} bytes is too long for other hosts (at most {max_bytes})")
    return _LENGTH.pack(len(body)) + body


def size_of(header: "bytes | bytearray", max_bytes: int) -> int:
    """The bytes of the message that follows a header of HEADER_BYTES. Raises WireError if they are more than this end allows."""
    size: int = _LENGTH.unpack(header)[0]
    if size > max_bytes:
        raise WireError(f"a message of {size} bytes was announced, at most {max_bytes} are allowed")
    return size


def decoded(decoder: Any, body: "bytes | bytearray") -> Any:
    """The message that a msgspec decoder finds. Raises WireError if there is none."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError, OverflowError) as error:
        raise WireError(f"not a message of this protocol ({type(error).__name__}: {str(error)[:200]})") from error


def send_at_once(stream: socket.socket) -> None:
    """Have the kernel hold back no short messages."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

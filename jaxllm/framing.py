"""Framing of all messages between hosts and engines: msgpack, never pickles, each after its length. Does not import JAX."""

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from jaxllm.errors import JaxLLMError

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 7.0
"""A host that sends nothing for so long is lost."""
_LENGTH = struct.Struct(">I")
_PART_BYTES = 1 << 20
_encoder = msgspec.msgpack.Encoder(enc_hook=lambda value: value.item())  # numpy's numbers


class WireError(JaxLLMError):
    """A connection between hosts is closed, or what came through it is no message."""


class ClosedError(WireError):
    """The connection is closed."""


class Message(msgspec.Struct, array_like=True):
    """A message of a protocol. Fields are positional."""


class Beat(Message, tag="beat"):
    """Sent every BEAT_SECONDS by both ends."""


@dataclass(frozen=True)
class Accepted:
    """Messages that an end accepts: their types, and the longest."""

    types: Any
    max_bytes: int

    @cached_property
    def decoder(self) -> Any:
        return msgspec.msgpack.Decoder(self.types)


def frame(message: Message, max_bytes: int) -> bytearray:
    """A message as it is sent. Raises WireError if it is longer than the other end allows."""
    found = bytearray(_LENGTH.size)
    _encoder.encode_into(message, found, _LENGTH.size)
    size = len(found) - _LENGTH.size
    if size > max_bytes:
        raise WireError(f"a {type(message).__name__} of {size} bytes is too long for other hosts (at most {max_bytes})")
    _LENGTH.pack_into(found, 0, size)
    return found


class Incoming:
    """Messages that arrive in parts. Memory grows with what came, not with what was announced."""

    def __init__(self, accepted: Accepted):
        self.accepted = accepted
        """May change between two messages: no byte of the next is read before."""
        self._found = bytearray()
        self._size: int | None = None
        """Bytes of the message that arrives; None until its length is there."""

    @property
    def num_wanted(self) -> int:
        """The most bytes that the next part may have."""
        return min((_LENGTH.size if self._size is None else self._size) - len(self._found), _PART_BYTES)

    def take(self, part: bytes) -> Any:
        """The message that a part completes; None before. No part is empty. Raises WireError if it is too long or malformed."""
        if not part:
            raise ClosedError("the connection was closed")
        self._found += part
        if self._size is None and len(self._found) == _LENGTH.size:
            (self._size,) = _LENGTH.unpack(self._found)
            self._found.clear()
            if self._size > self.accepted.max_bytes:
                raise WireError(f"a message of {self._size} bytes was announced, at most {self.accepted.max_bytes} are allowed")
        if self._size is None or len(self._found) < self._size:
            return None
        body, self._found, self._size = self._found, bytearray(), None
        return decoded(self.accepted.decoder, body)


def decoded(decoder: Any, body: "bytes | bytearray | msgspec.Raw") -> Any:
    """The message that a msgspec decoder finds. Raises WireError if there is none."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError, OverflowError) as error:
        raise WireError(f"not a message of this protocol ({type(error).__name__}: {str(error)[:200]})") from error

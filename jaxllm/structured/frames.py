"""Messages over a pipe: JSON after its length in four bytes."""

import json
import struct
from typing import IO, Any

MAX_BYTES = 256 << 20


def pack(message: dict[str, Any]) -> bytes:
    """A message as bytes."""
    body = json.dumps(message).encode()
    return struct.pack("<I", len(body)) + body


def write(pipe: IO[bytes], message: dict[str, Any]) -> None:
    """Send a message. Raises OSError if nobody reads any more."""
    pipe.write(pack(message))
    pipe.flush()


def read(pipe: IO[bytes]) -> dict[str, Any] | None:
    """The next message; None when there are no more."""
    head = _read_exactly(pipe, 4)
    if head is None:
        return None
    (size,) = struct.unpack("<I", head)
    if size > MAX_BYTES:
        raise ValueError(f"a message of {size} bytes")
    body = _read_exactly(pipe, size)
    return None if body is None else json.loads(body)


def _read_exactly(pipe: IO[bytes], size: int) -> bytes | None:
    found = bytearray()
    while len(found) < size:
        news = pipe.read(size - len(found))  # of an unbuffered pipe: what there is
        if not news:
            return None
        found += news
    return bytes(found)

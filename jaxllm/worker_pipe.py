"""A worker process at the other end of a pipe: how it is started, and messages, each after its length in four bytes."""

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import IO

MAX_BYTES = 256 << 20


def start_worker(module: str, *, stderr: int) -> "subprocess.Popen[bytes]":
    """Run a module of the project as a process that reads messages from its input and writes answers to its output.

    `stderr` is one of subprocess's constants.
    """
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, "PYTHONPATH": paths},
        start_new_session=True,  # a Ctrl-C in the terminal is not for it
    )


def write(pipe: IO[bytes], body: bytes) -> None:
    """Send a message. Raises OSError if the reader has ended."""
    pipe.write(struct.pack("<I", len(body)) + body)
    pipe.flush()


def read(pipe: IO[bytes]) -> bytes | None:
    """The next message; None when there are no more. Raises ValueError for one of more than MAX_BYTES."""
    head = _read_exactly(pipe, 4)
    if head is None:
        return None
    (size,) = struct.unpack("<I", head)
    if size > MAX_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return _read_exactly(pipe, size)


def is_whole(frame: bytes | bytearray) -> bool:
    """Whether these bytes are one message with its length, and nothing is missing."""
    return len(frame) >= 4 and len(frame) == 4 + struct.unpack_from("<I", frame)[0]


def _read_exactly(pipe: IO[bytes], size: int) -> bytes | None:
    found = bytearray()
    while len(found) < size:
        piece = pipe.read(size - len(found))  # an unbuffered pipe returns the bytes that it has
        if not piece:
            return None
        found += piece
    return bytes(found)

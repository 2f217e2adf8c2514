"""Reads files that others may have written: regular files alone, up to a size, and JSON of bounded depth and number of values.

A FIFO would block its reader, a device may never end, and a few bytes of JSON can cost a hundred times their size in memory.
"""

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from jaxllm.errors import ConfigError, JaxLLMError

MAX_JSON_BYTES = 16 * 2**20
MAX_JSON_DEPTH = 64
_BYTES_PER_VALUE = 16
"""A JSON file of n bytes at most may hold n / 16 values: most real files have 40 bytes a value, and a value takes 50 to 250 in memory."""
_QUOTE = ord('"')
_JSON_PARTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?+|[\[{\]},]', re.DOTALL)


def read_text(path: str | Path, what: str = "") -> str:
    """The text of a file that the user names, which may be a pipe. Raises ConfigError, which says `what` file it is."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {what}{' ' * bool(what)}{path}: {getattr(error, 'strerror', None) or error}") from None


@contextmanager
def open_regular(path: str | Path) -> Iterator[BinaryIO]:
    """A regular file, open for reading; links are followed. Never waits. Raises OSError if it is anything else, or cannot be opened."""
    # O_NONBLOCK: opening a FIFO without a writer would wait. It has no effect on regular files.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"it is {_kind(mode)}, must be a regular file", str(path))
    with os.fdopen(descriptor, "rb") as stream:
        yield stream


def read_bounded(path: str | Path, max_bytes: int, error: type[JaxLLMError] = ConfigError) -> bytes:
    """The content of a regular file. Raises `error` if it is missing, no regular file, or larger than max_bytes."""
    try:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            content = b"" if size > max_bytes else stream.read(size + 1)  # which takes the memory at once
            if len(content) > size:  # it has grown
                content += stream.read(max_bytes + 1 - len(content))
    except (OSError, ValueError) as failure:  # ValueError: a null byte in the path
        raise error(f"cannot read {path}: {getattr(failure, 'strerror', None) or failure}") from None
    if (size := max(size, len(content))) > max_bytes:
        raise error(f"cannot read {path}: it has {size} bytes, at most {max_bytes} are read of such a file")
    return content


def read_json(path: str | Path, max_bytes: int = MAX_JSON_BYTES, error: type[JaxLLMError] = ConfigError) -> Any:
    """The value in a JSON file.

    Raises `error` if the file cannot be read, is larger than max_bytes, is not JSON, nests deeper than MAX_JSON_DEPTH or has more
    than max_bytes / 16 values.
    """
    content = read_bounded(path, max_bytes, error)
    if excess := _excess(content, max_bytes // _BYTES_PER_VALUE):
        raise error(f"cannot read {path}: {excess}")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as failure:
        raise error(f"{path} is not JSON: {failure}") from None


def _excess(content: bytes, max_values: int) -> str:
    """Which limit a JSON text exceeds; empty if none. Its memory does not grow with the text."""
    depth = num_values = 0
    for part in _JSON_PARTS.finditer(content):
        first = content[part.start()]
        if first == _QUOTE:
            continue
        depth += (first in b"[{") - (first in b"]}")
        num_values += first in b"[{,"  # a list of n values has n - 1 commas
        if depth > MAX_JSON_DEPTH:
            return f"its JSON nests deeper than {MAX_JSON_DEPTH} levels, which is the limit"
        if num_values > max_values:
            return f"its JSON has more than {max_values} values, which is the limit"
    return ""


def _kind(mode: int) -> str:
    names = {stat.S_ISDIR: "a directory", stat.S_ISFIFO: "a FIFO", stat.S_ISSOCK: "a socket"}
    return next((name for test, name in names.items() if test(mode)), "a device")

"""Messages to and from the process in which forms are tried out, as JSON."""

import json
from typing import IO, Any

from jaxllm import worker_pipe


def write(pipe: IO[bytes], message: dict[str, Any]) -> None:
    """Send a message. Raises OSError if the reader has ended."""
    worker_pipe.write(pipe, json.dumps(message).encode())


def read(pipe: IO[bytes]) -> dict[str, Any] | None:
    """The next message; None when there are no more."""
    body = worker_pipe.read(pipe)
    return None if body is None else json.loads(body)

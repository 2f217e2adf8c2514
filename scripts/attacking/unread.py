"""Streams of completions as their client sees them, also one that does not read."""

import contextlib
import json
import socket
import time

from scripts.attacking import wire
from scripts.attacking.target import Attacked


class Stream:
    """A stream of so many tokens, open during the `with` block; nothing is read unless asked for."""

    def __init__(self, server: Attacked, num_tokens: int, key: str = "", *, buffer_bytes: int = 0, **fields: object):
        body = {**wire.PLAIN, "max_tokens": num_tokens, "stream": True, **fields}
        self._data = wire.head_and_body(server, "POST", wire.COMPLETIONS, json.dumps(body).encode(), wire.bearer(key))
        self._socket = socket.socket()
        if buffer_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self._socket.settimeout(30)
        self._address = ("127.0.0.1", server.port)
        self.received = b""
        self.is_closed = False

    def __enter__(self) -> "Stream":
        self._socket.connect(self._address)
        self._socket.sendall(self._data)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    @property
    def is_whole(self) -> bool:
        return b"data: [DONE]" in self.received and b'"error"' not in self.received

    def read_all(self, seconds: float) -> None:
        """Read to the end, for so long at most."""
        until = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            while (left := until - time.monotonic()) > 0:
                self._socket.settimeout(left)
                piece = self._socket.recv(1 << 16)
                if not piece:
                    self.is_closed = True
                    return
                self.received += piece

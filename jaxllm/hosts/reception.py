"""The port of host 0 while it waits for the other hosts: its connections, and their Hellos."""

import contextlib
import queue
import socket
import threading
import time
from types import TracebackType

from jaxllm.framing import WireError
from jaxllm.hosts import wire
from jaxllm.hosts.wire import Connection, Hello
from jaxllm.log import logger

HELLO_SECONDS = 5.0
"""The longest that a whole Hello may take."""
MAX_STRANGERS = 64
"""Connections above one a host that may wait to say hello. Beyond them, the oldest is closed: a host says hello at once."""
_POLL_SECONDS = 0.25


class Reception:
    """Accepts connections in a thread until the block ends, and waits for the Hello of each in a separate thread."""

    def __init__(self, listening: socket.socket, num_hosts: int, *, hello_seconds: float = HELLO_SECONDS):
        self.hellos: queue.SimpleQueue[tuple[Connection, Hello]] = queue.SimpleQueue()
        """Connections that have said hello."""
        self._listening, self._hello_seconds = listening, hello_seconds
        self._max_waiting = num_hosts + MAX_STRANGERS
        self._waiting: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, name="accept-hosts", daemon=True)

    def __enter__(self) -> "Reception":
        self._listening.settimeout(_POLL_SECONDS)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            self._is_closed = True
            strangers = list(self._waiting)
        for stream in (self._listening, *strangers):
            _shut_down(stream)  # wakes the thread that waits for it
        self._thread.join()
        with contextlib.suppress(queue.Empty):
            while True:
                self.hellos.get_nowait()[0].close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                stream, address = self._listening.accept()
            except TimeoutError:
                continue
            except OSError as error:  # there are too many open files, say
                if not self._is_closed:
                    logger.warning("a connection could not be accepted: %s", error)
                    time.sleep(_POLL_SECONDS)
                continue
            with self._lock:
                self._waiting[stream] = None
                oldest = next(iter(self._waiting)) if len(self._waiting) > self._max_waiting else None
            if oldest is not None:
                _shut_down(oldest)
            threading.Thread(target=self._greet, args=(stream, str(address[0])), name="greet-host", daemon=True).start()

    def _greet(self, stream: socket.socket, peer: str) -> None:
        try:
            connection = Connection(stream, wire.of_follower)
            hello = connection.first(self._hello_seconds)
            if not isinstance(hello, Hello) or not hello.name.isprintable():
                raise WireError("it did not say hello")
        except WireError as error:
            if not self._is_closed:
                logger.warning("a connection from %s is no host's: %s", peer, error)
            hello = None
        with self._lock:
            del self._waiting[stream]
            if hello is None or self._is_closed:
                stream.close()
            else:
                self.hellos.put((connection, hello))


def _shut_down(stream: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other end has done it
        stream.shutdown(socket.SHUT_RDWR)

"""Sends batches to subscribers in a separate thread, and the latest again on request."""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from jaxllm.errors import ConfigError
from jaxllm.kv_events.messages import Batch
from jaxllm.log import logger, warn_once
from jaxllm.options.kv_events import KVEventsConfig, endpoint_of_rank, listens_at

END = (-1).to_bytes(8, "big", signed=True)
"""Number of the message that ends an answer."""
_PAUSE_SECONDS = 1.0
"""After a batch that could not be sent."""
_CLOSE_SECONDS = 2.0
_REUSE_SECONDS = 1.0
"""Time until an address must be free: a thread of ZeroMQ closes the sockets of an engine that has ended."""
_MAX_REQUEST_BYTES = 1024
"""A client that sends more is disconnected."""


class Publisher:
    """A PUB socket, to which messages of three frames go: topic, number (8 bytes, big-endian), payload. And a ROUTER socket, if there is a
    replay_endpoint: a request for all from a number on (an empty frame and these 8 bytes) is answered with those that are still kept, each
    behind an empty frame, and one with the number -1.

    Only `put`, `has_room` and `has_lost` are called after `start`, all by one thread, and then `close`.
    """

    def __init__(self, config: KVEventsConfig, rank: int):
        """Raises ConfigError if an address cannot be used."""
        self._max_queue_size, self._topic = config.max_queue_size, config.topic.encode()
        self._queue: deque[Batch] = deque()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next_number = 0
        self._has_lost = self._is_closing = False
        self._skips = False
        """Whether changes are not sent until a batch has everything, as those before them were lost."""
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._pub = context.socket(zmq.PUB)
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._pub.set_hwm(config.hwm)
            own = endpoint_of_rank(config.endpoint, rank)
            self.endpoint = _open(self._pub, "endpoint", own, listens=listens_at(own))
            self.replay_endpoint = None
            if config.replay_endpoint is not None:
                self._replay = context.socket(zmq.ROUTER)
                self._replay.maxmsgsize = _MAX_REQUEST_BYTES
                # Room for a whole answer. What goes to a client that reads none is dropped from there on.
                self._replay.sndhwm = 2 * (config.buffer_steps + 1)
                wanted = endpoint_of_rank(config.replay_endpoint, rank)
                self.replay_endpoint = _open(self._replay, "replay_endpoint", wanted, listens=True)
        except BaseException:
            self.close()
            raise
        again = f", and again at {self.replay_endpoint}" if self.replay_endpoint else ""
        logger.info("events about the prefix cache are published at %s%s", self.endpoint, again)

    def start(self, encode: Callable[[Batch], bytes]) -> None:
        """Begin to send. encode: makes payloads."""
        self._thread = threading.Thread(target=self._run, args=(encode,), name="jaxllm-kv-events", daemon=True)
        self._thread.start()

    def has_room(self) -> bool:
        """See Sink, as for the next two."""
        return len(self._queue) < self._max_queue_size

    def put(self, batch: Batch) -> bool:
        if self._is_closing or not self.has_room():
            return False
        self._queue.append(batch)
        self._wake()
        return True

    def has_lost(self) -> bool:
        if not self._has_lost:
            return False
        self._has_lost = False
        return True

    def close(self) -> None:
        """Send what is queued, as far as that takes little time, and close the sockets."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._thread is None:
            self._close_sockets()
        else:
            self._wake()
            self._thread.join(_CLOSE_SECONDS)
            if self._thread.is_alive():
                return
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it wakes anyway
            os.write(self._wake_write, b"\0")

    # In the thread

    def _run(self, encode: Callable[[Batch], bytes]) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while not self._is_closing or self._queue:
                ready = dict(poller.poll())
                if self._wake_read in ready:
                    os.read(self._wake_read, 1 << 16)
                for _ in range(len(self._queue)):
                    self._send(self._queue.popleft(), encode)
                if self._replay is not None and self._replay in ready:
                    self._answer(self._replay)
        finally:
            self._close_sockets()

    def _send(self, batch: Batch, encode: Callable[[Batch], bytes]) -> None:
        if self._skips and not batch.is_whole:
            return
        try:
            payload = encode(batch)
            self._pub.send_multipart((self._topic, self._next_number.to_bytes(8, "big"), payload))
        except Exception:
            logger.exception("events about the prefix cache could not be sent; subscribers are told of everything again")
            if not self._is_closing:
                time.sleep(_PAUSE_SECONDS)
            self._skips = self._has_lost = True
            return
        self._skips = False
        self._kept.append((self._next_number, payload))
        self._next_number += 1

    def _answer(self, socket: "zmq.Socket[bytes]") -> None:
        frames = socket.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            warn_once(
                "a request for events about the prefix cache is not an empty frame and a number of 8 bytes; it gets no answer"
            )
            return
        client, first = frames[0], int.from_bytes(frames[2], "big")
        with contextlib.suppress(zmq.ZMQError):  # the client has disconnected
            for number, payload in self._kept:
                if number >= first:
                    socket.send_multipart((client, b"", self._topic, number.to_bytes(8, "big"), payload), zmq.NOBLOCK)
            socket.send_multipart((client, b"", b"", END, b""), zmq.NOBLOCK)

    def _close_sockets(self) -> None:
        for socket in (self._pub, self._replay):
            if socket is not None:
                socket.close(linger=int(1000 * _CLOSE_SECONDS))


def _open(socket: "zmq.Socket[bytes]", key: str, endpoint: str, *, listens: bool) -> str:
    """Bind or connect. Returns the address. Raises ConfigError."""
    if "::" in endpoint or "[" in endpoint:
        socket.ipv6 = True
    deadline = time.monotonic() + _REUSE_SECONDS
    while True:
        try:
            (socket.bind if listens else socket.connect)(endpoint)
            return socket.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                reason = f"which cannot be {'listened at' if listens else 'connected to'} ({error.strerror}); choose another"
            elif time.monotonic() < deadline:
                time.sleep(_REUSE_SECONDS / 20)
                continue
            else:
                reason = "which another process uses, or another engine of this one; choose another, or end that process"
            raise ConfigError(f"kv_events_config.{key} is {endpoint!r}, {reason}") from error

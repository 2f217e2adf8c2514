"""Sends results of other hosts' data-parallel ranks to host 0: in the order of its calls, without delaying heartbeats."""

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from jaxllm.engine import messages
from jaxllm.engine.executor import PendingStep
from jaxllm.hosts.wire import PIECE_BYTES, Result
from jaxllm.scheduler_output import ModelRunnerOutput

_encoder = msgspec.msgpack.Encoder(enc_hook=messages.encode_other)
step_of: Callable[[bytes], ModelRunnerOutput] = msgspec.msgpack.Decoder(
    ModelRunnerOutput, dec_hook=messages.decode_other
).decode
"""The result of a step that a host sent."""


class ExpectedResults:
    """On host 0: what one other host has still to send."""

    def __init__(self) -> None:
        self._expected: deque[Future[bytes]] = deque()
        self._pieces: list[bytes] = []
        """Pieces of the first expected result."""

    def expect(self) -> "Future[bytes]":
        """The result of the next call that has one. Call it before the host can answer."""
        future: Future[bytes] = Future()
        self._expected.append(future)
        return future

    def take(self, piece: Result) -> None:
        """Take a message of the host."""
        self._pieces.append(piece.data)
        if piece.is_last:
            data, self._pieces = b"".join(self._pieces), []
            self._expected.popleft().set_result(data)


class SentResults:
    """On another host: a thread that reads results and sends them, so that launches need not wait for devices."""

    def __init__(self, send: Callable[[Any], None], fail: Callable[[Exception], None]):
        """fail: called in the thread with the error of a step, after which nothing more is sent."""
        self._send, self._fail = send, fail
        self._queue: queue.SimpleQueue[tuple[PendingStep, Future[None]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="send-results", daemon=True).start()

    def send(self, pending: PendingStep) -> "Future[None]":
        """Send a result once the devices have computed it, after those before. Returns at once."""
        sent: Future[None] = Future()
        self._queue.put((pending, sent))
        return sent

    def _run(self) -> None:
        while True:
            pending, sent = self._queue.get()
            try:
                data = _encoder.encode(pending.result())
                for start in range(0, len(data), PIECE_BYTES):
                    self._send(Result(data[start : start + PIECE_BYTES], start + PIECE_BYTES >= len(data)))
            except Exception as error:
                sent.set_exception(error)
                self._fail(error)
                return
            sent.set_result(None)

"""An API server's end of the sockets to the engine process, in an asyncio event loop.

All outputs of a step arrive as one message and wake the loop once. Does not import JAX.
"""

import asyncio
import contextlib
import dataclasses
import math
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from jaxllm.engine import messages
from jaxllm.engine.messages import (
    Abort,
    Add,
    Bye,
    Call,
    Continue,
    Dead,
    Drain,
    Draining,
    EndLease,
    EngineMessage,
    Failed,
    Hello,
    Load,
    Meet,
    MessageError,
    NoMore,
    Outputs,
    Ready,
    Refused,
    Reply,
    Status,
    Update,
    WantMetrics,
)
from jaxllm.engine.sockets import ENGINE_SOCKET, FROZEN_SECONDS, MAX_QUEUED_MESSAGES, socket_address
from jaxllm.errors import EngineDeadError, EngineError
from jaxllm.kv_transfer import KVTransfer
from jaxllm.log import logger
from jaxllm.progress import Progress
from jaxllm.request import EngineCoreRequest, PromptItem
from jaxllm.scheduler_stats import SchedulerStats

HELLO_SECONDS = 0.25
SILENCE_SECONDS = 330.0
"""Without a heartbeat for so long, the engine process counts as hung. Heartbeats arrive four times a second."""
STALL_SECONDS = 10.0
"""Without one for so long, it seems to hang, but may go on."""
BYE_MILLISECONDS = 200
"""The longest wait, when a client closes, until its last messages are sent."""
LAST_WORDS_SECONDS = 0.2
"""The longest that the last messages of a process that could not start take to arrive."""
_MAX_MESSAGES_A_WAKE = 64
_NO_LOAD = SchedulerStats(0, 0, 0.0, 0, 0, 0, 0, 0)


class EngineClient:
    """Connects to the engine process whose sockets are in `directory`. Everything runs in the event loop that made the client.

    The engine counts as dead when the process `engine_pid` ends (None: one that is still to be started). `on_outputs` and the like are
    called with the messages that arrive; `on_dead` is the last call.
    """

    def __init__(
        self,
        directory: str | Path,
        engine_pid: int | None,
        *,
        index: int = 0,
        silence_seconds: float = SILENCE_SECONDS,
        stall_seconds: float = STALL_SECONDS,
    ):
        self.name = f"client-{index}-{secrets.token_hex(8)}"
        self.on_outputs: Callable[[Outputs], None] = lambda message: None
        self.on_refused: Callable[[Refused], None] = lambda message: None
        self.on_failed: Callable[[Failed], None] = lambda message: None
        self.on_want_metrics: Callable[[int], None] = lambda number: None
        self.on_update: Callable[[Update], None] = lambda message: None
        self.on_draining: Callable[[], None] = self.let_go
        """Leads to `let_go`, soon or once the requests at the engine have ended. No more are added."""
        self.on_dead: Callable[[EngineDeadError], None] = lambda error: None
        self.on_stall: Callable[[str | None], None] = lambda reason: None
        """Called when the engine begins to seem to hang, with the reason, and with None when it goes on."""
        self.status: Status | None = None
        """The latest heartbeat."""
        self.load: Load | None = None
        self.dead_error: EngineDeadError | None = None
        self.is_draining = False
        """Whether the engine is to get no more requests, and ends once those that it has have ended."""
        self._silence_seconds = silence_seconds
        self._stall_seconds = stall_seconds or math.inf
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        self._heard: float | None = None
        """When the latest message arrived, or until when this process itself did not run."""
        self._ticked = math.inf
        self._was_stalled = False
        self._latest_id, self._latest_items = "", tuple[PromptItem, ...]()  # of the latest request that was sent with its items
        self._process: int | None = None
        self._closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._path = Path(directory) / self.name
        self._context.linger = 0  # for its sockets: an unclosed client must not wait for a dead peer
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.rcvhwm = MAX_QUEUED_MESSAGES
        self._inbox.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_BYTES)
        self._inbox.bind(socket_address(directory, self.name))
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.sndhwm = 10 * MAX_QUEUED_MESSAGES
        self._outbox.immediate = engine_pid is None  # no queue of Hellos for a process that does not listen yet
        self._outbox.connect(socket_address(directory, ENGINE_SOCKET))
        self._inbox_fd = int(self._inbox.getsockopt(zmq.FD))
        self._loop.add_reader(self._inbox_fd, self._fetch)
        self._timer = self._loop.call_soon(self._tick)
        if engine_pid is not None:
            self._loop.call_soon(self._watch_process, engine_pid)

    async def ready(self) -> Ready:
        """Wait until the engine serves. Raises EngineDeadError."""
        return await asyncio.shield(self._ready)

    @property
    def is_ready(self) -> bool:
        """Whether the engine has reported that it serves."""
        return self._ready.done() and self._ready.exception() is None

    @property
    def stats(self) -> SchedulerStats:
        """As of the latest message; zeros before the first."""
        return _NO_LOAD if self.load is None else self.load.stats

    @property
    def tick_seconds(self) -> float:
        """How long ago the engine's loop last began a step or a call, or was known to wait for work."""
        status = self.status
        return self.silent_seconds + (0.0 if status is None else status.age_seconds)

    @property
    def stalled_seconds(self) -> float:
        """`tick_seconds` if the last status was "running", otherwise the seconds since the last message."""
        status = self.status
        return self.tick_seconds if status is not None and status.state == "running" else self.silent_seconds

    @property
    def stall(self) -> str | None:
        """Why the engine seems to hang; None if it does not. It may go on by itself, unlike one with a `dead_error`."""
        if self.silent_seconds > self._stall_seconds:
            return f"no sign of life from the engine process for {self.silent_seconds:.0f} s"
        if self.status is not None and self.status.is_stalled:
            return f"the engine has been in one step for {self.tick_seconds:.0f} s"
        return None

    @property
    def long_work(self) -> str:
        """Work that legitimately delays the engine's next step, such as a compilation; empty if there is none."""
        status = self.status
        if status is None or status.state not in ("compiling", "calling"):
            return ""
        ready, total = self.stats.awaited_programs
        what = status.phase or f"compiling program {ready + 1} of {total}"
        return f"{what}, for {self.tick_seconds:.0f} s"

    @property
    def silent_seconds(self) -> float:
        """Seconds without a message."""
        return 0.0 if self._heard is None else time.monotonic() - self._heard

    @property
    def num_compiled_after_warmup(self) -> int:
        return 0 if self.load is None else self.load.num_compiled_after_warmup

    @property
    def sleep_level(self) -> int:
        return 0 if self.load is None else self.load.sleep_level

    def add(self, request: EngineCoreRequest) -> None:
        """Queue a request. Raises EngineDeadError or EngineError. Images that the one before has too, another answer to the same prompt
        that was added in the same turn of the event loop, are not sent again."""
        if request.items and request.items is self._latest_items:
            self._send(Add(self.name, dataclasses.replace(request, items=()), self._latest_id))
            return
        self._send(Add(self.name, request))
        self._latest_id, self._latest_items = request.request_id, request.items
        if request.items:
            self._loop.call_soon(self._forget_items)  # others free them once the answer begins

    def _forget_items(self) -> None:
        self._latest_items = ()

    def abort(self, request_ids: list[str]) -> None:
        self._send(Abort(self.name, request_ids))

    def continue_request(self, request_id: str, output_token_ids: Sequence[int]) -> None:
        """See SteppedCore. Raises EngineDeadError or EngineError."""
        self._send(Continue(self.name, request_id, list(output_token_ids)))

    def end_lease(self, transfer: KVTransfer) -> None:
        """See Core. Raises EngineDeadError or EngineError."""
        self._send(EndLease(self.name, transfer))

    def meet(self, transfer: KVTransfer) -> None:
        """Tell a decode engine the `prefill_address` of another. Raises EngineDeadError or EngineError."""
        self._send(Meet(self.name, transfer))

    @property
    def prefill_address(self) -> KVTransfer | None:
        """See `messages.Ready`."""
        return self._ready.result().prefill_address if self.is_ready else None

    def drain(self) -> None:
        """Have the engine process end once all its clients have let it go."""
        self._send(Drain(self.name))

    def let_go(self) -> None:
        """Tell an engine that drains that nothing more is sent to it or awaited from it."""
        self._send(NoMore(self.name))

    def call(self, call: Any) -> "asyncio.Future[Any]":
        """Send one of the calls of `messages` and return its result."""
        self._num_calls += 1
        self._send(Call(self.name, self._num_calls, call))
        future = self._replies[self._num_calls] = self._loop.create_future()
        return future

    def close(self) -> None:
        """Close the sockets. May be called again, and after the loop is closed."""
        if self._closed:
            return
        self._closed = True
        linger = 0 if self.dead_error is not None else BYE_MILLISECONDS
        with contextlib.suppress(EngineError):
            self._send(Bye(self.name))
        self._timer.cancel()
        with contextlib.suppress(RuntimeError):
            self._loop.remove_reader(self._inbox_fd)
            if self._process is not None:
                self._loop.remove_reader(self._process)
        if self._process is not None:
            os.close(self._process)
        self._die(EngineDeadError("the engine was shut down"))
        self._context.destroy(linger=linger)
        self._path.unlink(missing_ok=True)

    def _send(self, message: Any) -> None:
        if self.dead_error is not None:
            raise EngineDeadError(str(self.dead_error)) from self.dead_error
        try:
            self._outbox.send(messages.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineError("the engine process does not fetch its messages") from None

    def _tick(self) -> None:
        """Send Hello until the engine serves, because another process may take over while it loads; check the heartbeat."""
        if not self._ready.done():
            with contextlib.suppress(EngineError):
                self._send(Hello(self.name, os.getpid()))
        if self._heard is None:
            self._timer = self._loop.call_later(HELLO_SECONDS, self._tick)
            return
        self._fetch()  # messages may have arrived while this loop was busy
        now = time.monotonic()
        if now - self._ticked > FROZEN_SECONDS:
            self._heard = now  # this process did not run, so the engine may not have run either
        self._ticked = now
        if self.silent_seconds > self._silence_seconds:
            self._die(EngineDeadError(f"the engine process has given no sign of life for {self.silent_seconds:.0f} s"))
        elif not self._closed:
            if ((stall := self.stall) is not None) != self._was_stalled:
                self._was_stalled = stall is not None
                self.on_stall(stall)
            self._timer = self._loop.call_later(1.0 if self._ready.done() else HELLO_SECONDS, self._tick)

    def _fetch(self) -> None:
        for _ in range(_MAX_MESSAGES_A_WAKE):
            if self._closed:
                return
            try:
                frame = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard = time.monotonic()
            try:
                message = messages.decode_engine_message(frame)
            except MessageError as error:
                logger.warning("a message of the engine process was refused: %s", error)
                continue
            try:
                self._take(message)
            except Exception:  # the socket signals new messages only, so go on with those already queued
                logger.exception("a message of the engine process could not be taken")
        self._loop.call_soon(self._fetch)  # the socket signals new messages only, so fetch the rest without a signal

    def _take(self, message: EngineMessage) -> None:
        if isinstance(message, Outputs):
            self.load = message.load or self.load
            self.on_outputs(message)
        elif isinstance(message, Status):
            self.status = message
            self.load = message.load or self.load
        elif isinstance(message, Reply):
            self.load = message.load or self.load
            future = self._replies.pop(message.number, None)
            if future is None or future.done():
                return
            if message.fault is None:
                future.set_result(message.result)
            else:
                future.set_exception(messages.error_of(message.fault))
        elif isinstance(message, Ready):
            if self._process is None and message.pid:
                self._watch_process(message.pid)
            if not self._ready.done():
                self._ready.set_result(message)
        elif isinstance(message, Update):
            self.load = message.load
            self.on_update(message)
        elif isinstance(message, Refused):
            self.on_refused(message)
        elif isinstance(message, Failed):
            self.on_failed(message)
        elif isinstance(message, WantMetrics):
            self.on_want_metrics(message.number)
        elif isinstance(message, Draining):
            self.is_draining = True
            self.on_draining()
        elif isinstance(message, Dead):
            self._die(EngineDeadError(message.message))

    def _watch_process(self, pid: int) -> None:
        """Have the kernel report the end of the engine process."""
        if self._closed or not hasattr(os, "pidfd_open"):
            return
        try:
            self._process = os.pidfd_open(pid)
        except ProcessLookupError:
            self._process_ended()
            return
        except OSError:  # not supported by this kernel: the missing heartbeat shows it later
            return
        self._loop.add_reader(self._process, self._process_ended)

    def _process_ended(self) -> None:
        if self._process is not None:
            self._loop.remove_reader(self._process)
        if self._ready.done():
            self._end_with_process()
        else:  # why it could not start may still be on its way
            self._loop.call_later(LAST_WORDS_SECONDS, self._end_with_process)

    def _end_with_process(self) -> None:
        self._fetch()  # its last messages
        self._die(EngineDeadError("the engine process has ended; its log may say why"))

    def _die(self, error: EngineDeadError) -> None:
        if self.dead_error is not None:
            return
        self.dead_error = error
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # marks the error as retrieved if no caller awaits it
        replies, self._replies = self._replies, {}
        for future in replies.values():
            if not future.done():
                future.set_exception(EngineDeadError(str(error)))
        self.on_dead(error)


async def show_loading(client: EngineClient, progress: Progress) -> None:
    """Report what an engine loads, until cancelled."""
    phase, done = None, 0
    while True:
        if (status := client.status) is not None and status.state == "loading" and status.unit:
            if status.phase != phase:
                phase, done = status.phase, 0
                progress.start(status.phase, status.total, status.unit)
            if status.done > done:
                progress.advance(status.done - done)
                done = status.done
        await asyncio.sleep(0.1)

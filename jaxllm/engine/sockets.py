"""The engine process's end of the sockets, and the thread that receives, sends heartbeats and detects a hang. No JAX import.

Every API server binds a PULL socket under its own name, and the engine process binds one for all API servers, in a directory
that only their user can enter. The thread queues their messages for the step loop, which reads them between two steps. The step
loop sends outputs itself, so that they wait for no other thread. Each thread has its own sockets, because a socket belongs to
one thread.
"""

import contextlib
import faulthandler
import math
import os
import queue
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
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
    EndLease,
    Fault,
    Hello,
    Load,
    Meet,
    MessageError,
    NoMore,
    Refused,
    State,
    Status,
)
from jaxllm.log import logger
from jaxllm.progress import Progress

ENGINE_SOCKET = "engine"
MAX_QUEUED_MESSAGES = 2000
"""Limit of queued messages, one per step, that an API server has not fetched. Beyond it, its requests are ended."""
BEAT_SECONDS = 0.25
LONG_CALLS = frozenset({"sleep", "wake_up", "start_profile", "stop_profile"})
"""Calls that move or read all weights, or write a trace. They have the time that a compilation has."""
CPU_PATIENCE = 6.0
"""On a CPU a step of a large model may take this many times longer than elsewhere before it counts as stalled."""
FROZEN_SECONDS = 5.0
"""A gap between two beats that shows that this process did not run, for example because it was stopped."""
EXIT_FAILED = 1
EXIT_HUNG = 70
_CLIENT_NAME = re.compile(r"[a-z]{1,12}-[0-9]{1,6}-[0-9a-f]{16}")


def socket_address(directory: str | Path, name: str) -> str:
    """The address of a socket in the directory."""
    return f"ipc://{directory}/{name}"


@dataclass(frozen=True)
class Gone:
    """An API server has left, or its process has ended."""

    client: str


@dataclass(frozen=True)
class Stop:
    """A command to end the engine process."""


Command = Hello | Add | Abort | Continue | EndLease | Meet | Call | Drain | NoMore | Gone | Stop | Callable[[], object]


@dataclass
class Pulse:
    """The state of the step loop, which writes it; the thread reads it. Plain fields, because a stale read is harmless."""

    is_loaded: bool = False
    work_began: float | None = None
    """When the current step or call began; None while the loop waits for work."""
    long_call: str = ""
    """The current one of LONG_CALLS."""
    patience: float = 1.0
    """Factor of the time after which a step counts as stalled."""
    awaited_programs: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """Programs that the step waits for: how many are ready, and the total."""
    load: Load | None = None
    progress: "PhaseProgress" = field(default_factory=lambda: PhaseProgress())

    def begin(self, call: str = "") -> None:
        """The loop ticks: a step begins, or a call of this name."""
        self.long_call = call if call in LONG_CALLS else ""
        self.work_began = time.monotonic()

    def rest(self) -> None:
        """The loop waits for work."""
        self.work_began = None

    def state(self) -> State:
        if not self.is_loaded:
            return "loading"
        if self.work_began is None:
            return "idle"
        if self.long_call:
            return "calling"
        return "compiling" if self.awaited_programs()[1] else "running"

    def load_now(self) -> Load | None:
        """The load before the current step, and the programs that this step waits for."""
        load, awaited = self.load, self.awaited_programs()
        if load is None or not awaited[1]:
            return load
        return msgspec.structs.replace(load, stats=replace(load.stats, awaited_programs=awaited))


class PhaseProgress(Progress):
    """Progress of loading, for the heartbeat."""

    def __init__(self) -> None:
        self.phase, self.done, self.total, self.unit = "starting", 0, None, ""  # type: tuple[str, int, int | None, str]
        self.began = time.monotonic()
        self._lock = threading.Lock()

    def start(self, task: str, total: int | None, unit: str) -> None:
        with self._lock:
            self.phase, self.done, self.total, self.unit, self.began = task, 0, total, unit, time.monotonic()

    def advance(self, count: int = 1) -> None:
        with self._lock:
            self.done += count


def is_client_name(name: str) -> bool:
    """Whether an API server may have this name, which becomes a file's name."""
    return _CLIENT_NAME.fullmatch(name) is not None


class Outbox:
    """Sockets to the API servers. Used by one thread only."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", directory: str):
        self._context, self._directory = context, directory
        self._sockets: dict[str, zmq.Socket[bytes]] = {}

    @property
    def clients(self) -> list[str]:
        return list(self._sockets)

    def connect(self, client: str) -> None:
        """Open a socket to an API server. Messages wait until it listens. Without more sockets, it receives nothing."""
        if client not in self._sockets:
            try:
                socket = self._context.socket(zmq.PUSH)
            except zmq.ZMQError as error:
                logger.error("no socket can be opened to another API server: %s", error)
                return
            socket.sndhwm = MAX_QUEUED_MESSAGES
            socket.linger = 1000
            socket.connect(socket_address(self._directory, client))
            self._sockets[client] = socket

    def send(self, client: str, frame: bytes) -> bool:
        """Send a frame. Returns False if the API server has left or its queue is full."""
        try:
            self._sockets[client].send(frame, zmq.NOBLOCK)
        except (KeyError, zmq.Again):
            return False
        return True

    def send_last(self, client: str, frame: bytes) -> None:
        """Send a frame and close the socket, once it was sent or after a second."""
        self.send(client, frame)
        if (socket := self._sockets.pop(client, None)) is not None:
            socket.close()

    def disconnect(self, client: str) -> None:
        if (socket := self._sockets.pop(client, None)) is not None:
            socket.close(linger=0)

    def close(self) -> None:
        """Close the sockets after sending queued messages, for up to a second."""
        for socket in self._sockets.values():
            socket.close()
        self._sockets.clear()


class Listener:
    """The receiving thread. `stdin_fd`: a pipe whose end means that the parent has ended."""

    def __init__(
        self,
        directory: str,
        pulse: Pulse,
        *,
        step_timeout_seconds: float,
        compile_timeout_seconds: float,
        stall_timeout_seconds: float,
        parent_fd: int | None = None,
    ):
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.directory = directory
        self._pulse = pulse
        self._step_timeout = step_timeout_seconds
        self._compile_timeout = compile_timeout_seconds
        self._stall_timeout = stall_timeout_seconds
        self._parent_fd = parent_fd
        self._quiet_since = 0.0
        """Until then the loop was known not to hang."""
        self._last_beat = math.inf
        self._processes: dict[int, str] = {}
        """API server by the descriptor that becomes readable when its process ends."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)
        self._inbox = self.context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_BYTES)
        self._inbox.bind(socket_address(directory, ENGINE_SOCKET))
        self._outbox = Outbox(self.context, directory)
        self._poller = zmq.Poller()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after sending its queued messages."""
        self._stopping = True
        self._thread.join()

    # In the thread

    def _run(self) -> None:
        self._poller.register(self._inbox, zmq.POLLIN)
        if self._parent_fd is not None:
            self._poller.register(self._parent_fd, zmq.POLLIN)
        next_beat = 0.0
        try:
            while not self._stopping:
                pause = max(0.0, next_beat - time.monotonic())
                for source, _ in self._poller.poll(int(pause * 1000) + 1):
                    self._notice(source)
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + BEAT_SECONDS
                    self._beat()
        except BaseException:
            logger.exception("the engine's listener failed")
            os._exit(EXIT_FAILED)  # no API server could reach the engine any more, not even to end it
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._inbox.close(linger=0)
            self._outbox.close()

    def _notice(self, source: object) -> None:
        if source is self._inbox:
            with contextlib.suppress(zmq.Again):
                while True:
                    self._take(self._inbox.recv(zmq.NOBLOCK, copy=False).buffer)  # a request's images may be megabytes
        elif source == self._parent_fd and self._parent_fd is not None:
            if not os.read(self._parent_fd, 1):
                logger.warning("the process that started the engine is gone; the engine ends")
                shutil.rmtree(self.directory, ignore_errors=True)  # the parent can no longer remove it
                os._exit(EXIT_FAILED)  # no API server outlives it either
        elif isinstance(source, int) and source in self._processes:
            self._forget(self._processes[source], source)

    def _take(self, frame: memoryview) -> None:
        try:
            message = messages.decode_client_message(frame)
        except MessageError as error:
            logger.warning("a message of an API server was refused: %s", error)
            if (sender := messages.sender_of_add(frame)) is not None:
                client, request_id = sender
                refusal = Refused(request_id, Fault("engine", "the engine could not read the request; its log has more"))
                self._outbox.send(client, messages.encode(refusal))
            return
        if isinstance(message, Bye):
            descriptors = [descriptor for descriptor, client in self._processes.items() if client == message.client]
            self._forget(message.client, next(iter(descriptors), None))
            return
        if isinstance(message, Hello) and not is_client_name(message.client):
            logger.warning("an API server with an impossible name was refused")
            return
        if isinstance(message, Hello) and message.client not in self._outbox.clients and not self._greet(message):
            return
        self.commands.put(message)

    def _greet(self, hello: Hello) -> bool:
        """Returns False if the API server has ended already."""
        self._outbox.connect(hello.client)
        if hasattr(os, "pidfd_open"):
            try:
                descriptor = os.pidfd_open(hello.pid)
            except OSError:  # it has ended already
                self._forget(hello.client, None)
                self._remove_socket(hello.client)
                return False
            self._processes[descriptor] = hello.client
            self._poller.register(descriptor, zmq.POLLIN)
        return True

    def _forget(self, client: str, descriptor: int | None) -> None:
        if descriptor is not None:
            self._poller.unregister(descriptor)
            os.close(descriptor)
            del self._processes[descriptor]
            self._remove_socket(client)
        self._outbox.disconnect(client)
        self.commands.put(Gone(client))

    def _remove_socket(self, client: str) -> None:
        """The file that an API server leaves that was killed."""
        with contextlib.suppress(OSError):
            os.unlink(Path(self.directory, client))

    def _beat(self) -> None:
        pulse, now = self._pulse, time.monotonic()
        state, began, progress = pulse.state(), pulse.work_began, pulse.progress
        if state == "loading":
            status = Status(state, now - progress.began, progress.phase, progress.done, progress.total, progress.unit)
        else:
            age = 0.0 if began is None else now - began
            is_stalled = state == "running" and 0 < self._stall_timeout * pulse.patience < age
            status = Status(state, age, pulse.long_call, load=pulse.load_now(), is_stalled=is_stalled)
            self._watch(state, began, now)
        frame = messages.encode(status)
        for client in self._outbox.clients:
            self._outbox.send(client, frame)

    def _watch(self, state: State, began: float | None, now: float) -> None:
        """End the process if a step takes too long, with the stacks of all threads in the log."""
        if not self._step_timeout:
            return
        # If this thread hangs too, because something holds the interpreter, C code dumps the stacks and exits.
        faulthandler.dump_traceback_later(self._step_timeout + 10, exit=True, file=sys.stderr)
        if began is not None and state in ("compiling", "calling") and now - began > self._compile_timeout:
            what = self._pulse.long_call or "a step that waits for a program"
            self._die(
                f"{what} has not ended for {now - began:.0f} s, more than --compile-timeout {self._compile_timeout:.0f} s"
            )
        was_frozen, self._last_beat = now - self._last_beat > FROZEN_SECONDS, now
        if began is None or state != "running" or was_frozen:
            self._quiet_since = now
        elif now - max(began, self._quiet_since) > self._step_timeout:
            self._die(f"a step has not ended for {now - began:.0f} s, more than --step-timeout {self._step_timeout:.0f} s")

    def _die(self, reason: str) -> None:
        logger.error("%s; the engine ends. What its threads were doing:", reason)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        frame = messages.encode(Dead(f"the engine hangs: {reason}"))
        for client in self._outbox.clients:
            self._outbox.send(client, frame)
        self._outbox.close()
        time.sleep(0.5)  # the sockets' own thread sends it
        os._exit(EXIT_HUNG)

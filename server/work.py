"""Runs what a request needs before the engine gets it: parsing, checking, rendering, tokenizing. Large requests take turns.

Work is a generator. It yields after each short piece, so that the work of another client may go on, and that of a client that
has left ends there. It may yield a call to wait for, such as the rendering of a template in another process, whose result it
receives.
"""

import asyncio
import contextlib
import contextvars
import itertools
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")
Work = Generator[Callable[[], Any] | None, Any, Result]

LARGE_BYTES = 64 << 10
"""Body size from which work takes some milliseconds."""
NUM_THREADS = 2
"""Threads for large requests, and as many that wait for other processes."""
TURN_SECONDS = 0.02
"""A turn ends with the piece during which it has lasted so long."""
CLASS_SECONDS = 0.25
"""A client's requests go first that have taken less than this, then less than twice this, and so on."""


class Origin(NamedTuple):
    """Client and size of the request that is being answered."""

    client: str
    num_bytes: int
    """Bytes of its body."""


_SMALL = Origin("", 0)
ORIGIN: contextvars.ContextVar[Origin] = contextvars.ContextVar("origin", default=_SMALL)
"""Set for requests of at least LARGE_BYTES."""


def in_one_piece(function: Callable[..., Result], *arguments: Any) -> Work[Result]:
    """A short call as work."""
    return function(*arguments)
    yield  # makes it a generator


def finish(work: Work[Result]) -> Result:
    """The result of work that is done here and now."""
    call = None
    try:
        while True:
            call = work.send(None if call is None else call())
    except StopIteration as end:
        return end.value


class WorkPool:
    """Does work in threads, that of large requests in turns."""

    def __init__(self, num_threads: int = NUM_THREADS):
        self._pieces = _Line("jaxllm-work", num_threads, self._advance)
        self._calls = _Line("jaxllm-wait", num_threads, self._call)

    async def run(self, work: Work[Result], *, num_bytes: int | None = None, threads: Executor | None = None) -> Result:
        """The result of work. `num_bytes`: where its size is not that of the body. `threads`: those of small requests."""
        origin = ORIGIN.get()
        if (origin.num_bytes if num_bytes is None else num_bytes) >= LARGE_BYTES:
            return await self._in_turns(work, origin.client)
        in_context = contextvars.copy_context().run
        return await asyncio.get_running_loop().run_in_executor(threads, in_context, finish, work)

    async def unless_small(self, work: Work[Result], *, num_bytes: int | None = None) -> Result:
        """Run work that is so short for a small request that it is done at once."""
        if (ORIGIN.get().num_bytes if num_bytes is None else num_bytes) < LARGE_BYTES:
            return finish(work)
        return await self.run(work, num_bytes=num_bytes)

    async def _in_turns(self, work: Work[Result], client: str) -> Result:
        job = _Job(client, work, asyncio.get_running_loop())
        self._pieces.put(job)
        try:
            return await job.result
        finally:
            job.is_wanted = False

    def _advance(self, job: "_Job") -> "_Line | None":
        """Do pieces of a job for a turn. Returns where it goes on."""
        until = time.perf_counter() + TURN_SECONDS
        try:
            while job.is_wanted:
                job.call, job.sent = job.context.run(job.work.send, job.sent), None
                if job.call is not None:
                    return self._calls
                if time.perf_counter() >= until:
                    return self._pieces
            job.work.close()
        except StopIteration as end:
            job.end(end.value)
        except BaseException as error:
            job.end(error, is_error=True)
        return None

    def _call(self, job: "_Job") -> "_Line | None":
        """Wait for what a job waits for."""
        assert job.call is not None
        try:
            job.sent = job.call() if job.is_wanted else None
        except BaseException as error:
            job.end(error, is_error=True)
            return None
        return self._pieces

    def close(self) -> None:
        """End the threads."""
        self._pieces.close()
        self._calls.close()


_numbers = itertools.count()


@dataclass(eq=False)
class _Job:
    """Work of a large request."""

    client: str
    work: Work[Any]
    loop: asyncio.AbstractEventLoop
    number: int = field(default_factory=lambda: next(_numbers))
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    seconds: float = 0.0
    """That it has taken in this line."""
    is_wanted: bool = True
    """Whether somebody waits for the result."""
    call: Callable[[], Any] | None = None
    sent: Any = None

    def __post_init__(self) -> None:
        self.result: asyncio.Future[Any] = self.loop.create_future()

    def end(self, value: Any, *, is_error: bool = False) -> None:
        """Hand over the result, from any thread."""

        def tell() -> None:
            if not self.result.done():
                (self.result.set_exception if is_error else self.result.set_result)(value)

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(tell)


@dataclass
class _Client:
    """One whose jobs are in a line."""

    seconds: float
    """That its jobs have taken, counted from where the others were when it came."""
    jobs: list[_Job] = field(default_factory=list)
    num_running: int = 0


class _Line:
    """Threads that take turns at jobs: the next job is one of the client whose jobs have taken least time."""

    def __init__(self, name: str, num_threads: int, serve: "Callable[[_Job], _Line | None]"):
        self._name, self._num_threads, self._serve = name, num_threads, serve
        self._clients: dict[str, _Client] = {}
        self._change = threading.Condition()
        self._has_begun = self._is_closed = False

    def put(self, job: _Job) -> None:
        """Add a job, or put it back after a turn."""
        with self._change:
            client = self._clients.get(job.client)
            if client is None:
                least = min((other.seconds for other in self._clients.values()), default=0.0)
                client = self._clients[job.client] = _Client(least)
            client.jobs.append(job)
            if not self._has_begun:
                self._has_begun = True
                for _ in range(self._num_threads):
                    threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._change.notify()

    def close(self) -> None:
        """End the threads after their turns."""
        with self._change:
            self._is_closed = True
            self._change.notify_all()

    def _run(self) -> None:
        while (job := self._take()) is not None:
            began = time.perf_counter()
            then = self._serve(job)
            seconds = time.perf_counter() - began
            job.seconds = job.seconds + seconds if then is self else 0.0
            with self._change:
                client = self._clients[job.client]
                client.seconds += seconds
                client.num_running -= 1
                if then is self:
                    client.jobs.append(job)
                elif not client.jobs and not client.num_running:
                    del self._clients[job.client]
            if then is not None and then is not self:
                then.put(job)
            del job  # or it would stay in memory until the next

    def _take(self) -> _Job | None:
        """The next job, once there is one; None: the line is closed."""
        with self._change:
            while not self._is_closed:
                ready = [client for client in self._clients.values() if client.jobs]
                if ready:
                    client = min(ready, key=lambda client: client.seconds)
                    job = min(client.jobs, key=lambda job: (job.seconds // CLASS_SECONDS, job.number))
                    client.jobs.remove(job)
                    client.num_running += 1
                    return job
                self._change.wait()
        return None

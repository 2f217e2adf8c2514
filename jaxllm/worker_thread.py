"""A thread that runs calls in order, so that the caller goes on meanwhile."""

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")
_Calls = queue.SimpleQueue["tuple[Callable[[], Any], Future[Any]] | None"]


class WorkerThread:
    """One thread that runs calls in the order given. The error of a failed call is raised where its result is read.

    The interpreter's exit waits for the threads of a ThreadPoolExecutor, for ever if one waits for a device that waits for a lost host. It
    does not wait for this one: call `shutdown` first, where a call may still run.
    """

    def __init__(self, name: str) -> None:
        self._calls: _Calls = queue.SimpleQueue()
        self._last: Future[Any] | None = None
        self._thread = threading.Thread(target=_run, args=(self._calls,), name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._calls.put, None)
        self._end.atexit = False

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Make a call after all earlier ones. Returns at once. Raises RuntimeError after shutdown."""
        if not self._end.alive:
            raise RuntimeError(f"the thread {self._thread.name} has been shut down")
        future: Future[T] = Future()
        self._calls.put((call, future))
        self._last = future
        return future

    @property
    def name(self) -> str:
        """For people."""
        return self._thread.name

    @property
    def is_alive(self) -> bool:
        """Whether it runs calls."""
        return self._thread.is_alive()

    def drain(self) -> None:
        """Wait until every call made before this one has run, including failed ones, or the thread has ended."""
        last = self._last
        while last is not None and not last.done() and self.is_alive:
            wait([last], 1.0)

    def shutdown(self) -> None:
        """Drain and end the thread. May be called again."""
        self._end()
        self._thread.join()

    def abandon(self) -> None:
        """End the thread after the call that it makes now; cancel the others. Returns at once."""
        with contextlib.suppress(queue.Empty):
            while (item := self._calls.get_nowait()) is not None:
                item[1].cancel()
        self._end()
        self._calls.put(None)  # the one of `_end` may have been taken just now


def _run(calls: _Calls) -> None:
    while (item := calls.get()) is not None:
        call, future = item
        future.set_running_or_notify_cancel()
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
            del result
        del item, call, future  # else they live until the next call

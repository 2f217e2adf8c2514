"""Runs the launches of small steps in a thread, so that the host plans the next step meanwhile."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")


class Launcher:
    """One thread that runs calls in the order given. The error of a failed call is raised where its result is read."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="launch")
        self._last: Future[object] | None = None

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Make a call after all earlier ones. Returns at once."""
        future = self._thread.submit(call)
        self._last = future  # type: ignore[assignment]
        return future

    def drain(self) -> None:
        """Wait until every call has run, including failed ones."""
        if self._last is not None:
            wait([self._last])

    def shutdown(self) -> None:
        """Drain and end the thread. May be called again."""
        self._thread.shutdown()

"""Threads next to the step loop: one reads adapters, the other sends them to the device. Does not import JAX."""

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Literal, TypeVar

Result = TypeVar("Result")
Lane = Literal["read", "stage"]

_JOIN_SECONDS = 10.0
"""How long `shutdown` waits for a job that is running. A disk that hangs does not keep the process alive."""


class Lanes:
    """One thread per kind of job, started by its first: an adapter in host memory does not wait for a slow disk."""

    def __init__(self) -> None:
        self._queues: dict[Lane, queue.PriorityQueue[tuple[int, int, Any]]] = {}
        self._threads: dict[Lane, threading.Thread] = {}
        self._numbers = itertools.count()

    def submit(self, lane: Lane, job: Callable[[], Result], *, urgent: bool = True) -> "Future[Result]":
        """Run a job, after earlier ones of its kind; urgent ones first. A future that is cancelled before is not run."""
        future: Future[Result] = Future()
        if lane not in self._queues:
            self._queues[lane] = queue.PriorityQueue()
            self._threads[lane] = threading.Thread(target=self._work, args=(lane,), name=f"adapters-{lane}", daemon=True)
            self._threads[lane].start()
        self._queues[lane].put((0 if urgent else 1, next(self._numbers), (future, job)))
        return future

    def wait(self, jobs: "Sequence[Future[Any]]", seconds: float) -> None:
        """Wait until one of these jobs is done, at most for this time."""
        wait(jobs, seconds, return_when="FIRST_COMPLETED")

    def shutdown(self) -> None:
        """End the threads; jobs that have not begun are cancelled. May be called again."""
        for lane, thread in self._threads.items():
            waiting = self._queues[lane]
            while True:
                try:
                    _, _, work = waiting.get_nowait()
                except queue.Empty:
                    break
                if work is not None:
                    work[0].cancel()
            waiting.put((0, next(self._numbers), None))
            thread.join(_JOIN_SECONDS)
        self._threads = {}
        self._queues = {}

    def _work(self, lane: Lane) -> None:
        waiting = self._queues[lane]
        while (work := waiting.get()[2]) is not None:
            future, job = work
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
            del work, future, job  # they hold an adapter's weights

"""Threads of stores that read and write contents, each with its own buffer, so that a call that never returns holds up no other."""

import mmap
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Protocol

from jaxllm.errors import OutOfMemoryError
from jaxllm.log import logger

MAX_LOST = 8
"""Threads without an answer at a time: with more, no task is taken."""


class Task(Protocol):
    """A task of a thread, in three parts."""

    def prepare(self, buffer: memoryview) -> None:
        """The part before, which never waits for a disk."""

    def run(self, buffer: memoryview) -> None:
        """The part that may: it touches nothing but files and the buffer."""

    def complete(self) -> None:
        """The part behind, which never waits for one. Left out if the task was given up."""

    def end(self, error: Exception | None, seconds: float) -> None:
        """It is over, in any thread. error: why it failed; TimeoutError: it was given up; CancelledError: it never began."""


class _Worker:
    """A thread, with the task whose `run` it is in."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.task: Task | None = None
        self.began = 0.0


def pair(read: "Callable[[], Workers]", write: "Callable[[], Workers]") -> "tuple[Workers, Workers]":
    """Make the threads of a store that read and those that write. If there is no memory for these, the others end."""
    readers = read()
    try:
        return readers, write()
    except OutOfMemoryError:
        readers.close(0.0)
        raise


class Workers:
    """Runs tasks in order, as many at once as there are threads."""

    def __init__(self, name: str, num_threads: int, buffer_bytes: int, max_seconds: float):
        """buffer_bytes: of each thread. max_seconds: until a task is given up. Raises OutOfMemoryError."""
        self._name, self.num_threads, self._buffer_bytes, self._max_seconds = name, num_threads, buffer_bytes, max_seconds
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        """Without those whose task was given up."""
        self._num_lost = 0
        self._is_closed = False
        try:
            for _ in range(num_threads):
                self._start()
        except (OSError, RuntimeError) as error:
            self.close(0.0)
            raise OutOfMemoryError(
                f"the system has no memory or no threads for {num_threads} threads {name}, each with {buffer_bytes} bytes ({error}); raise "
                "the process's limits (ulimit -v, ulimit -u), or end other programs"
            ) from error

    def _start(self) -> None:
        """Start a thread. Raises OSError or RuntimeError if the system has no memory or thread for it."""
        worker, buffer = _Worker(), memoryview(mmap.mmap(-1, self._buffer_bytes))  # whose address is that of a page
        worker.thread = threading.Thread(target=self._work, args=(worker, buffer), name=self._name, daemon=True)
        self._workers.append(worker)
        try:
            worker.thread.start()
        except RuntimeError:
            self._workers.remove(worker)
            raise

    def _replace(self) -> None:
        """Start a thread in place of one without an answer, unless there can be no more."""
        try:
            self._start()
        except (OSError, RuntimeError) as error:
            logger.warning("%s goes on with %d threads: %s", self._name, len(self._workers), error)

    def submit(self, task: Task) -> None:
        """Have a thread do a task. Returns at once."""
        self._tasks.put(task)

    @property
    def is_stuck(self) -> bool:
        """Whether no task is taken, because so many threads have no answer, or there is none."""
        return self._is_closed or self._num_lost > MAX_LOST or not self._workers

    def give_up(self, max_seconds: float | None = None) -> None:
        """Give up the tasks that take too long; other threads do what follows."""
        limit, now = self._max_seconds if max_seconds is None else max_seconds, time.monotonic()
        late: list[tuple[Task, float]] = []
        with self._lock:
            for worker in list(self._workers):
                if worker.task is not None and now - worker.began >= limit:
                    late.append((worker.task, now - worker.began))
                    worker.task = None
                    self._workers.remove(worker)
                    self._num_lost += 1
                    if self._num_lost <= MAX_LOST and not self._is_closed:
                        self._replace()
        for task, seconds in late:
            task.end(TimeoutError(f"no answer in {seconds:.1f} s"), seconds)
        if self.is_stuck and not self._is_closed:
            self._drop_waiting()

    def _drop_waiting(self) -> None:
        try:
            while (task := self._tasks.get_nowait()) is not None:
                task.end(CancelledError(), 0.0)
        except queue.Empty:
            return

    def _work(self, worker: _Worker, buffer: memoryview) -> None:
        while (task := self._tasks.get()) is not None:
            if not self._do(worker, task, buffer):
                return
            del task

    def _do(self, worker: _Worker, task: Task, buffer: memoryview) -> bool:
        """Returns whether the thread goes on."""
        start, error = time.monotonic(), None
        try:
            task.prepare(buffer)
            with self._lock:
                worker.task, worker.began = task, time.monotonic()
            try:
                task.run(buffer)
            finally:
                was_given_up = self._take_back(worker)
            if not was_given_up:
                task.complete()
        except Exception as found:
            error = found
        if worker not in self._workers:
            return False
        task.end(error, time.monotonic() - start)
        return True

    def _take_back(self, worker: _Worker) -> bool:
        """A task's part that may wait is over. Returns whether it was given up."""
        with self._lock:
            was_given_up, worker.task = worker.task is None, None
            if was_given_up:
                self._num_lost -= 1
                if not self._is_closed and len(self._workers) < self.num_threads:
                    self._replace()
            return was_given_up

    def close(self, seconds: float) -> None:
        """End the threads. Tasks that wait end with an error, and after so many seconds those under way. No task touches anything but its
        buffer afterwards."""
        with self._lock:
            self._is_closed = True
            workers = list(self._workers)
        self._drop_waiting()
        for _ in workers:
            self._tasks.put(None)
        deadline = time.monotonic() + seconds
        for worker in workers:
            assert worker.thread is not None
            worker.thread.join(max(0.0, deadline - time.monotonic()))
        self.give_up(0.0)
        for worker in list(self._workers):
            assert worker.thread is not None
            worker.thread.join()

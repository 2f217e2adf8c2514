"""Watches the programs that follow in the background after a start."""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxllm.log import logger

if TYPE_CHECKING:
    from jaxllm.engine.executor import ExecutorPrograms


class BackgroundPrograms:
    """Tells when all programs are ready, and has each new one run once between two steps, so that no request waits for its first runs."""

    def __init__(self, programs: "ExecutorPrograms", run_new: Callable[[], object], *, began: float):
        """run_new: runs one new program, in the step loop's thread. began: when the engine's start began, of `time.perf_counter`."""
        self._programs, self._run_new, self._began = programs, run_new, began
        self._lock = threading.Lock()
        self.is_complete = False
        """Whether all programs that the start queued were made."""
        self.post: Callable[[Callable[[], object]], None] | None = None
        """Has the step loop run a call between two steps; None: nothing runs while there are no requests."""

    def watch(self) -> None:
        """Begin, once the start has queued its programs."""
        self.is_complete = not self._programs.num_queued
        self._programs.listen(self._note)
        if not self.is_complete:
            self._tell_if_complete()  # the last may have been made meanwhile

    def _note(self) -> None:
        if self.post is not None:
            self.post(self._run_new)
        self._tell_if_complete()

    def _tell_if_complete(self) -> None:
        with self._lock:
            if self.is_complete or self._programs.num_queued:
                return
            self.is_complete = True
        num_programs = self._programs.num_compiled + self._programs.num_loaded
        logger.info("all %d programs are ready, %.1f s after the start began", num_programs, time.perf_counter() - self._began)

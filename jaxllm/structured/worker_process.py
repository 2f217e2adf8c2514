"""The parent's end of the process that compiles structured outputs on trial: starts it, writes to it, reads its answers."""

import contextlib
import queue
import subprocess
import threading
from collections.abc import Callable
from typing import Any

from jaxllm.log import logger
from jaxllm.structured import frames
from jaxllm.structured.token_table import Vocabulary
from jaxllm.worker_pipe import start_worker

_END_SECONDS = 2.0


class WorkerProcess:
    """One such process. `on_answer` and, once, `on_end` are called in a separate thread."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        deadline_seconds: float,
        on_answer: Callable[[dict[str, Any]], None],
        on_end: Callable[["WorkerProcess"], None],
    ):
        self._process = start_worker("jaxllm.structured.worker", stderr=subprocess.PIPE)
        self._outbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        fields = {name: getattr(vocabulary, name) for name in vocabulary.__dataclass_fields__}
        self._outbox.put({"vocabulary": fields, "deadline_seconds": deadline_seconds})
        self._on_answer, self._on_end = on_answer, on_end
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._write, self._log_complaints)]
        self._threads.append(threading.Thread(target=self._listen, name="grammar-answers", daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        return self._process.returncode

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message to the process. Returns at once. If the process has ended, `on_end` is called."""
        self._outbox.put(message)

    def end(self) -> None:
        """End the process and the threads. May be called again, but by none of these threads."""
        self._outbox.put(None)  # its input is closed, which ends it and its children
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(_END_SECONDS)

    def _write(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(OSError), pipe:
            while (message := self._outbox.get()) is not None:
                frames.write(pipe, message)

    def _listen(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None
        with contextlib.suppress(OSError, ValueError), pipe:
            while (message := frames.read(pipe)) is not None:
                self._on_answer(message)
        self._outbox.put(None)
        self._process.wait()
        self._on_end(self)

    def _log_complaints(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as pipe:
            for line in pipe:
                logger.debug("grammar compiler: %s", line.decode(errors="replace").rstrip()[:500])

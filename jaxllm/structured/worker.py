"""The process that compiles structured outputs on trial. It forks a child for each, to isolate it and limit its time.

Reads {"vocabulary", "deadline_seconds"} and then {"id", "params"} from its input, and answers {"id", "grammar", "num_bytes"}
or {"id", "error"}, with {"is_passing": True} if a retry may succeed. Has one thread, which
forking needs. Does not import JAX.
"""

import io
import math
import os
import selectors
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from llguidance import LLTokenizer

from jaxllm.errors import GrammarError, InvalidRequestError
from jaxllm.structured import frames, trial
from jaxllm.structured.token_table import Vocabulary
from jaxllm.structured_outputs import StructuredOutputsParams
from jaxllm.worker_pipe import is_whole

BUSY_FRACTION, CROWDED_FRACTION, CROWD = 0.2, 0.05, 16
"""Fractions of a trial's CPU time limit that apply while others wait without a free place, and while CROWD of them wait."""
STARVED_FACTOR = 6
"""Wall-clock limit of a trial, as a multiple of the deadline, because the machine may be busy with other work."""
MAX_CHILDREN = 4
EXTRA_BYTES = 1 << 30
"""Memory that one trial may take."""
NICENESS = 10
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class _Child:
    job_id: int
    pid: int
    pipe: int
    started: float
    received: bytearray


class Worker:
    """Runs trials in children, at most MAX_CHILDREN at a time, in the order in which they came."""

    def __init__(self) -> None:
        # Unbuffered, so that what waits in the pipe is what is left to read.
        self._input, self._output = io.FileIO(sys.stdin.fileno(), closefd=False), sys.stdout.buffer
        first = frames.read(self._input)
        if first is None:
            raise SystemExit
        self._deadline_seconds = first["deadline_seconds"]
        fields = first["vocabulary"]
        self._vocabulary = Vocabulary(
            fields["tokenizer_json"],
            fields["num_tokens"],
            fields["num_columns"],
            tuple(fields["eos_token_ids"]),
            tuple((text, token) for text, token in fields["added_tokens"]),
        )
        self._fault: str | None = None
        """The reason why no structured output can be compiled for this model; None if there is none."""
        try:
            self._table = self._vocabulary.table
        except Exception as error:
            sys.stderr.write(f"the tokenizer cannot be read: {error!r:.500}\n")
            self._fault = "cannot be used with this model: its kind of tokenizer is not supported"
        self._waiting: deque[dict[str, Any]] = deque()
        self._children: dict[int, _Child] = {}
        """By the pipe that they answer through."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._input, selectors.EVENT_READ)

    def run(self) -> None:
        """Until the input ends."""
        while True:
            for key, _ in self._selector.select(self._seconds_to_next_deadline()):
                if key.fileobj is self._input:
                    job = frames.read(self._input)
                    if job is None:
                        self._end_all()
                        return
                    if self._fault is None:
                        self._waiting.append(job)
                    else:
                        frames.write(self._output, {"id": job["id"], "error": self._fault})
                else:
                    self._hear(self._children[key.fd])
            self._end_late()
            while self._waiting and len(self._children) < MAX_CHILDREN:
                self._start(self._waiting.popleft())

    def _start(self, job: dict[str, Any]) -> None:
        receiving, sending = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(receiving)
            try:
                answer = _answer(job, self._vocabulary, self._table, self._deadline_seconds)
                with os.fdopen(sending, "wb") as pipe:
                    frames.write(pipe, answer)
            finally:
                os._exit(0)
        os.close(sending)
        os.set_blocking(receiving, False)
        self._children[receiving] = _Child(job["id"], pid, receiving, time.monotonic(), bytearray())
        self._selector.register(receiving, selectors.EVENT_READ)

    def _hear(self, child: _Child) -> None:
        try:
            part = os.read(child.pipe, 1 << 16)
        except BlockingIOError:
            return
        if part:
            child.received += part
            return
        status = self._forget(child, is_over=True)
        if is_whole(child.received):
            self._output.write(bytes(child.received))
            self._output.flush()
        elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV:
            self._refuse(child, "is nested too deeply")
        elif os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
            self._refuse(child, f"takes more than {self._deadline_seconds:g} s to compile; ask for something simpler")
        else:
            self._refuse(child, f"takes more than {EXTRA_BYTES >> 20} MiB to compile; ask for something simpler")

    def _end_late(self) -> None:
        is_busy = bool(self._waiting) and len(self._children) == MAX_CHILDREN
        cpu_limit, limit = self._cpu_seconds_each(is_busy), STARVED_FACTOR * self._deadline_seconds
        for child in list(self._children.values()):
            seconds = _cpu_seconds(child.pid)
            if seconds > cpu_limit:
                told = f"takes more than {cpu_limit:g} s to compile{' while others wait' * is_busy}"
            elif time.monotonic() - child.started > limit:
                told = f"was not compiled within {limit:g} s, of which the busy machine spent {seconds:.2g} s on it"
            else:
                continue
            is_passing = is_busy or seconds <= cpu_limit
            self._forget(child)
            self._refuse(
                child, f"{told}; {'try again later, or ' * is_passing}ask for something simpler", is_passing=is_passing
            )

    def _cpu_seconds_each(self, is_busy: bool) -> float:
        if not is_busy:
            return self._deadline_seconds
        return self._deadline_seconds * (CROWDED_FRACTION if len(self._waiting) >= CROWD else BUSY_FRACTION)

    def _seconds_to_next_deadline(self) -> float | None:
        if not self._children:
            return None
        cpu_limit = self._cpu_seconds_each(bool(self._waiting))
        latest = min(child.started for child in self._children.values()) + STARVED_FACTOR * self._deadline_seconds
        left = [latest - time.monotonic(), *(cpu_limit - _cpu_seconds(child.pid) for child in self._children.values())]
        return max(0.0, min(left)) + 0.01

    def _forget(self, child: _Child, *, is_over: bool = False) -> int:
        """End a child, unless it ends by itself now. Returns its exit status."""
        self._selector.unregister(child.pipe)
        os.close(child.pipe)
        del self._children[child.pipe]
        if not is_over:
            os.kill(child.pid, signal.SIGKILL)
        return os.waitpid(child.pid, 0)[1]

    def _refuse(self, child: _Child, message: str, *, is_passing: bool = False) -> None:
        frames.write(self._output, {"id": child.job_id, "error": message, "is_passing": is_passing})

    def _end_all(self) -> None:
        for child in list(self._children.values()):
            self._forget(child)


def _cpu_seconds(pid: int) -> float:
    """CPU time of a child that has not been waited for yet, in seconds."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS  # utime and stime, of all its threads


def _answer(job: dict[str, Any], vocabulary: Vocabulary, table: LLTokenizer, deadline_seconds: float) -> dict[str, Any]:
    """The result of a trial in a child."""
    os.nice(NICENESS)
    trial.limit_resources(math.ceil(deadline_seconds), EXTRA_BYTES)
    params = StructuredOutputsParams(**job["params"])
    try:
        return {"id": job["id"], **trial.try_out(params, vocabulary, table)}
    except GrammarError as error:
        message = str(error)
        if params.kind == "json" and not message.startswith("at #"):
            pointer = trial.pointer_of_fault(params, vocabulary, table)
            message = f"{f'at {pointer}: ' if pointer else ''}{message}"
        return {"id": job["id"], "error": message}
    except InvalidRequestError as error:
        return {"id": job["id"], "error": str(error)}
    except MemoryError:
        return {"id": job["id"], "error": f"takes more than {EXTRA_BYTES >> 20} MiB to compile; ask for something simpler"}
    except Exception as error:  # a bug here or in llguidance: reported without details
        sys.stderr.write(f"a structured output could not be compiled on trial: {error!r:.500}\n")
        return {"id": job["id"], "error": f"cannot be compiled ({type(error).__name__})"}


def main() -> None:
    """Serve until the input ends. Ignores Ctrl-C, which the parent handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Worker().run()


if __name__ == "__main__":
    main()

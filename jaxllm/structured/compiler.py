"""GrammarCompiler: compiles structured outputs on trial in a separate process, and caches the results. Does not import JAX."""

import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from jaxllm.at_exit import shut_down_at_exit
from jaxllm.errors import InvalidRequestError, OverloadedError
from jaxllm.log import logger
from jaxllm.request import Grammar
from jaxllm.structured.token_table import Vocabulary
from jaxllm.structured.worker_process import WorkerProcess
from jaxllm.structured_outputs import PARAM, StructuredOutputsParams

DEADLINE_SECONDS = 5.0
"""CPU time that compiling one form may take, with its first masks."""
MAX_CACHE_BYTES = 64 << 20
"""Memory limit of the cache of results, including refusals."""
MAX_WAITING = 256
"""Maximum number of forms that wait for an answer."""
RETRY_AFTER_SECONDS = 2
MAX_TRIES = 2
"""Number of processes that a form is sent to, if they end without an answer."""


@dataclass(frozen=True)
class _Answer:
    grammar: Grammar | None
    refusal: str | None
    is_passing: bool = False
    """Refused because the machine was busy: a retry may succeed."""

    @property
    def num_bytes(self) -> int:
        return 500 + len(self.refusal or "") + (len(self.grammar.text) if self.grammar else 0)


@dataclass
class _Job:
    id: int
    params: StructuredOutputsParams
    future: "Future[Grammar]"
    num_tries: int = 0


class GrammarCompiler:
    """Converts structured outputs to grammars that passed a trial. The process starts with the first one, or with `start`.

    May be called from any thread.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, deadline_seconds: float = DEADLINE_SECONDS, max_cache_bytes: int = MAX_CACHE_BYTES
    ):
        self._vocabulary = vocabulary
        self._deadline_seconds = deadline_seconds
        self._max_cache_bytes = max_cache_bytes
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None
        self._jobs: dict[int, _Job] = {}
        """Jobs without an answer."""
        self._by_params: dict[StructuredOutputsParams, _Job] = {}
        self._answers: OrderedDict[StructuredOutputsParams, _Answer] = OrderedDict()
        self._num_cached_bytes = 0
        self._next_id = 0
        self._is_shut_down = False
        self.num_processes = 0
        """Started so far."""
        shut_down_at_exit(self)

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Wait for the grammar of a form. Raises InvalidRequestError, or OverloadedError if a retry may succeed."""
        return self.submit(params).result()

    def submit(self, params: StructuredOutputsParams) -> "Future[Grammar]":
        """A future of the grammar, or of the error that `compile` raises."""
        form = replace(params, start_after_token_ids=None)
        future: Future[Grammar] = Future()
        with self._lock:
            answer = self._answers.get(form)
            if answer is not None:
                self._answers.move_to_end(form)
            elif self._is_shut_down:
                future.set_exception(InvalidRequestError(f"{PARAM}: the engine was shut down", PARAM))
            elif (job := self._by_params.get(form)) is not None:
                _follow(job.future, future, params)
            elif len(self._jobs) >= MAX_WAITING:
                future.set_exception(
                    OverloadedError(
                        f"{PARAM}: {MAX_WAITING} structured outputs wait to be compiled; try again later", RETRY_AFTER_SECONDS
                    )
                )
            else:
                self._next_id += 1
                job = _Job(self._next_id, form, Future())
                self._jobs[job.id] = self._by_params[form] = job
                _follow(job.future, future, params)
                self._send(job)
        if answer is not None:
            _settle(future, answer, params)
        return future

    def start(self) -> None:
        """Start the process now, so that the first form need not wait for it. Returns at once."""
        with self._lock:
            self._running_process()

    def shutdown(self) -> None:
        """End the process and refuse the waiting forms. May be called again."""
        with self._lock:
            self._is_shut_down = True
            process, self._process = self._process, None
            jobs, self._jobs = list(self._jobs.values()), {}
            self._by_params.clear()
        if process is not None:
            process.end()
        for job in jobs:
            job.future.set_exception(InvalidRequestError(f"{PARAM}: the engine was shut down", PARAM))

    @property
    def num_cached_bytes(self) -> int:
        return self._num_cached_bytes

    # The process

    def _running_process(self) -> WorkerProcess:
        if self._process is None:
            self._process = WorkerProcess(self._vocabulary, self._deadline_seconds, self._take_answer, self._replace)
            self.num_processes += 1
        return self._process

    def _send(self, job: _Job) -> None:
        job.num_tries += 1
        self._running_process().send({"id": job.id, "params": _fields(job.params)})

    def _take_answer(self, message: dict[str, Any]) -> None:
        with self._lock:
            job = self._jobs.pop(message["id"], None)
            if job is None:
                return
            self._by_params.pop(job.params, None)
            answer = _answer(message)
            if not answer.is_passing:
                self._remember(job.params, answer)
        _settle(job.future, answer, job.params)

    def _replace(self, process: WorkerProcess) -> None:
        """Send the unanswered forms of a process that has ended to a new one."""
        lost: list[_Job] = []
        with self._lock:
            if self._process is not process:
                return  # shut down
            self._process = None
            logger.warning("the process that compiles grammars ended (status %s)", process.exit_status)
            for job in list(self._jobs.values()):
                if job.num_tries < MAX_TRIES:
                    self._send(job)
                else:
                    del self._jobs[job.id]
                    self._by_params.pop(job.params, None)
                    lost.append(job)
        for job in lost:
            job.future.set_exception(InvalidRequestError(f"{PARAM}.{job.params.kind} cannot be compiled", PARAM))

    def _remember(self, form: StructuredOutputsParams, answer: _Answer) -> None:
        self._answers[form] = answer
        self._num_cached_bytes += _num_bytes(form, answer)
        while self._num_cached_bytes > self._max_cache_bytes:
            oldest, forgotten = self._answers.popitem(last=False)
            self._num_cached_bytes -= _num_bytes(oldest, forgotten)


def _fields(form: StructuredOutputsParams) -> dict[str, Any]:
    return {name: value for name in form.__dataclass_fields__ if (value := getattr(form, name)) is not None}


def _num_bytes(form: StructuredOutputsParams, answer: _Answer) -> int:
    value = getattr(form, form.kind)
    size = sum(map(len, value)) + 60 * len(value) if isinstance(value, tuple) else len(str(value))
    return size + answer.num_bytes


def _answer(message: dict[str, Any]) -> _Answer:
    if (error := message.get("error")) is not None:
        return _Answer(None, error, message.get("is_passing", False))
    return _Answer(Grammar(message["grammar"], num_bytes=message["num_bytes"]), None)


def _settle(future: "Future[Grammar]", answer: _Answer, params: StructuredOutputsParams) -> None:
    if answer.grammar is not None:
        future.set_result(replace(answer.grammar, start_after_token_ids=params.start_after_token_ids))
    else:
        message = f"{PARAM}.{params.kind} {answer.refusal}"
        future.set_exception(
            OverloadedError(message, RETRY_AFTER_SECONDS) if answer.is_passing else InvalidRequestError(message, PARAM)
        )


def _follow(first: "Future[Grammar]", second: "Future[Grammar]", params: StructuredOutputsParams) -> None:
    """Complete the second future like the first."""

    def pass_on(done: "Future[Grammar]") -> None:
        if not second.set_running_or_notify_cancel():
            return
        error = done.exception()
        if error is None:
            second.set_result(replace(done.result(), start_after_token_ids=params.start_after_token_ids))
        elif isinstance(error, OverloadedError):
            second.set_exception(OverloadedError(str(error), error.retry_after_seconds))
        else:
            second.set_exception(InvalidRequestError(str(error), PARAM))

    first.add_done_callback(pass_on)

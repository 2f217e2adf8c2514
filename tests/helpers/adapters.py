"""An engine without a model whose adapters are numbers, in virtual time: loading takes a known time, and nothing sleeps."""

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.engine import loop
from jaxllm.engine.op_queue import OpQueue
from jaxllm.errors import AdapterError, JaxLLMError
from jaxllm.lora.manager import LoRAManager
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import ErrorKind, FinishReason, Request, RequestStatus
from jaxllm.scheduler.errors import LostError
from jaxllm.scheduler_stats import SchedulerStats
from tests.helpers.fake_runner import FakeEngine, FakeRunner, oracle_tokens
from tests.helpers.scheduling import make_request, make_scheduler

VOCAB = 97


@dataclass
class Clock:
    """Virtual time, in seconds."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class VirtualThreads:
    """Worker threads in virtual time: each job takes the time known for its thread, one after the other."""

    def __init__(self, clock: Clock, seconds: dict[str, float]):
        """seconds: by the last part of a thread's name."""
        self.clock, self.seconds = clock, seconds
        self.threads: list[VirtualThread] = []

    def new(self, name: str) -> "VirtualThread":
        self.threads.append(VirtualThread(self.clock, self.seconds[name.rpartition("-")[2]]))
        return self.threads[-1]

    def wait(self, jobs: Sequence[Future[Any]], seconds: float, return_when: str = FIRST_COMPLETED) -> None:
        """As `concurrent.futures.wait`."""
        limit = self.clock.now + seconds
        while (end := min(thread.end for thread in self.threads)) <= limit and not any(job.done() for job in jobs):
            self.clock.now = max(self.clock.now, end)
            self.work()
        if not any(job.done() for job in jobs):
            self.clock.now = limit

    def work(self) -> None:
        """Finish the jobs that are done by now."""
        for thread in self.threads:
            thread.work()


class VirtualThread:
    """A WorkerThread in virtual time."""

    def __init__(self, clock: Clock, seconds: float):
        self._clock, self._seconds = clock, seconds
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.end = math.inf
        """When the current job is done."""

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        if not self._jobs:
            self.end = self._clock.now + self._seconds
        self._jobs.append((Future(), call))
        return self._jobs[-1][0]

    def work(self) -> None:
        """Finish the jobs that are done by now."""
        while self.end <= self._clock.now:
            future, call = self._jobs.popleft()
            self.end = self.end + self._seconds if self._jobs else math.inf
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)


@dataclass
class Number:
    """The files of an adapter: a number, in a file of a directory or known by the path."""

    value: int
    directory: Path
    rank: int = 8

    def digest(self) -> str:
        return str(self.value)

    def tensor(self, name: str) -> np.ndarray:
        return np.array(self.value)


def read_number(path: str) -> Number:
    """A number in a directory, or the path itself as one."""
    if path.isdigit():
        return Number(int(path), Path("/nowhere"))
    try:
        return Number(int((Path(path) / "adapter_model.safetensors").read_text()), Path(path))
    except (OSError, ValueError) as error:
        raise AdapterError(f"{path}: {error}") from error


class NumberDevice:
    """The slots of a FakeRunner, and its executor."""

    num_bytes = 8

    def __init__(self, num_slots: int, runner: Callable[[], FakeRunner]):
        self.num_slots, self._runner = num_slots, runner

    def pack(self, read: Callable[[str], np.ndarray]) -> np.ndarray:
        return read("")

    def stage(self, handle: int, data: np.ndarray) -> None:
        self._runner().stage(handle, data)


class LateOps:
    """The operations of an engine that is made later."""

    def __init__(self, ops: Callable[[], OpQueue]):
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops(), name)


class AdapterEngine:
    """Scheduler, fake runner and adapters. Checks every output against that of its adapter alone."""

    def __init__(
        self,
        num_slots: int,
        *,
        max_host: int | None = None,
        depth: int = 1,
        seconds: dict[str, float] | None = None,
        step_seconds: float = 0.02,
        **options: Any,
    ):
        self.clock = Clock()
        seconds = seconds or {"read": 0.1, "stage": 0.01}
        self.threads = VirtualThreads(self.clock, {**seconds, "check": seconds["read"]})
        self.step_seconds = step_seconds
        device = NumberDevice(num_slots, lambda: self.engine.runner)
        self.adapters = LoRAManager(
            device,  # type: ignore[arg-type]
            device,
            LateOps(lambda: self.engine.ops),
            read_number,  # type: ignore[arg-type]
            max_host=max_host,
            new_thread=self.threads.new,  # type: ignore[arg-type]
            wait=self.threads.wait,
            clock=self.clock,
        )
        self.scheduler = make_scheduler(rooms=(self.adapters,), async_scheduling=depth > 1, **options)
        self.engine = FakeEngine(self.scheduler, vocab_size=VOCAB, depth=depth)
        self.engine.runner.slots = [0] * num_slots
        self.requests: dict[str, tuple[Request, int]] = {}
        """All requests by id, with the number of their adapter."""
        self.values: dict[int, int] = {}
        """The numbers in the files of adapters when they were added."""
        self.received: dict[str, list[int]] = {}
        self.errors: dict[str, str] = {}
        self.admitted_at: dict[str, float] = {}
        self._names = itertools.count()

    def add(self, name: str, path: str | Path, *, replace: bool = False) -> str:
        """Load an adapter while the engine is idle. Returns the error, if any."""
        number = self.start_adding(name, path, replace=replace)
        while (state := self.adapters.adapter_state(number)).state == "loading":
            self.tick()
        return state.error

    def start_adding(self, name: str, path: str | Path, *, replace: bool = False) -> int:
        """Begin to load an adapter. Returns its number for `adapter_state`."""
        number = self.adapters.add_adapter(name, str(path), replace)
        with contextlib.suppress(AdapterError):
            self.values.setdefault(number, read_number(str(path)).value)
        return number

    def ask(self, adapter: str | None, prompt: int | list[int] = 5, *, request_id: str | None = None, **params: Any) -> str:
        """Queue a request. Returns its id."""
        request_id = request_id or f"r{next(self._names)}"
        request = make_request(request_id, prompt, eos=(), adapter=adapter, arrival=self.clock.now, **params)
        self.adapters.bind(request)
        self.scheduler.add_request(request)
        self.adapters.admit(request)
        value = 0 if request.adapter is None else self.values[request.adapter.number]  # type: ignore[attr-defined]
        self.requests[request_id], self.received[request_id] = (request, value), []
        return request_id

    def tick(self, seconds: float | None = None) -> None:
        """Let time pass."""
        self.clock.now += self.step_seconds if seconds is None else seconds
        self.threads.work()

    def step(self) -> list[str]:
        """What EngineCore.step does, with the time that it takes. Returns the requests that it admitted."""
        num_plans = len(self.engine.plans)
        self._take(self.adapters.settle(self.scheduler))
        self.check()
        try:
            self.engine.dispatch()
        except LostError as error:
            self.start_over(error.request_ids, lost=True)
        admitted = [data.request_id for plan in self.engine.plans[num_plans:] for data in plan.new_requests]
        for request_id in admitted:
            self.admitted_at.setdefault(request_id, self.clock.now)
        if self.engine.in_flight:
            self.tick()
            self._take(self.engine.collect())
        else:
            if jobs := [job for job in self.adapters.jobs() if not job.done()]:
                self.threads.wait(jobs, loop.MAX_WAIT_SECONDS)
            self.tick(0.001)
        self.check()
        return admitted

    def start_over(self, failed: Sequence[str] = (), *, lost: bool = False) -> None:
        """Consequences of a failed step. lost: with the slots."""
        self.engine.start_over()
        if lost:
            self.engine.runner.slots = [0] * len(self.engine.runner.slots)
        self._take(self.scheduler.fail_requests(failed, ErrorKind.INTERNAL, "lost"))

    def abort(self, *request_ids: str) -> None:
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    @property
    def stats(self) -> SchedulerStats:
        stats = self.scheduler.stats()
        self.adapters.add_stats(stats)
        return stats

    def run(self, limit: int = 2000) -> None:
        """Step until every request has ended; nothing may be left behind."""
        for _ in range(limit):
            if not self.scheduler.has_requests():
                break
            self.step()
        assert not self.scheduler.has_requests(), "a request never ends"
        while self.engine.in_flight:
            assert self.engine.collect() == []
        self.check()
        self.adapters.check_integrity()
        on_way = int(self.adapters._staging is not None) + len(self.engine.ops)
        assert len(self.engine.runner.staged) <= on_way, "what was staged is used by nobody"
        pool = self.scheduler.cache_manager.pool
        assert pool.num_free_blocks == pool.num_usable_blocks

    def check(self) -> None:
        self.scheduler.check_integrity()
        self.adapters.check_integrity(self.scheduler.requests.values())
        assert all((request in request.adapter.running) == (request in self.scheduler.running) for request in self._adapted())  # type: ignore[union-attr]

    def _adapted(self) -> list[Request]:
        return [request for request in self.scheduler.requests.values() if request.adapter is not None]

    def _take(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            request, value = self.requests[output.request_id]
            self.received[output.request_id] += output.new_token_ids
            if output.finish_reason == FinishReason.ERROR:
                self.errors[output.request_id] = str(output.stop_reason)
            elif output.finish_reason is not None:
                limit = request.sampling_params.max_tokens
                assert limit is not None
                expected = oracle_tokens(request.spec.prompt_token_ids, limit, VOCAB, adapter=value)
                assert self.received[output.request_id] == expected, f"{output.request_id} was computed with another adapter"


def refused(call: Callable[[], object]) -> str:
    """The error of a call."""
    try:
        call()
    except JaxLLMError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it was not refused")

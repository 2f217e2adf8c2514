"""Replicas for programs without an event loop, e.g. `LLM(data_parallel_size=2)`: they look like one core that is stepped."""

import asyncio
import contextlib
import queue
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from jaxllm import env
from jaxllm.cache_events import CacheEvents
from jaxllm.config import EngineConfig
from jaxllm.core_interface import PauseCalls
from jaxllm.engine.client import EngineClient, show_loading
from jaxllm.engine.launch import socket_directory, start_engine
from jaxllm.engine.messages import EngineStart
from jaxllm.errors import ConfigError, EngineDeadError, EngineError, JaxLLMError, ReplicaLostError
from jaxllm.kv_transfer import KVTransfer
from jaxllm.metrics.metric import Metric
from jaxllm.outputs import EngineCoreOutput
from jaxllm.progress import SILENT, Progress
from jaxllm.replicas.core import Replicas
from jaxllm.replicas.devices import environments
from jaxllm.replicas.processes import end_seconds
from jaxllm.request import EngineCoreRequest, ErrorKind, FinishReason
from jaxllm.scheduler_stats import SchedulerStats
from jaxllm.start_times import StartTimes

STEP_SECONDS = 0.02
"""The longest that `step` waits for outputs."""


class LocalReplicas(PauseCalls):
    """Starts an engine process for each replica. An event loop in a separate thread talks to them.

    Requests wait here until a replica has room for them, so that all are busy until the end. `core_factory` is for tests. Raises
    ConfigError, EngineDeadError.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        processors: Sequence[Any] = (),
        *,
        core_factory: str | None = None,
    ):
        if unnamed := [processor for processor in processors if not isinstance(processor, str)]:
            raise ConfigError(
                f"logits_processors has {type(unnamed[0]).__name__} objects, which cannot be sent to the processes of "
                'data_parallel_size; name them as "module:Name"'
            )
        if processors:
            config = config.replace(logits_processors=(*(config.model.logits_processors or ()), *processors))
        self._outputs: queue.SimpleQueue[list[EngineCoreOutput]] = queue.SimpleQueue()
        self._unfinished: set[str] = set()
        """Requests whose last output the caller has not got."""
        self._waiting: deque[EngineCoreRequest] = deque()
        self._sent: dict[str, EngineCoreRequest] = {}
        """Requests at replicas."""
        self._answered: set[str] = set()
        """Requests that had outputs."""
        self._rerun: set[str] = set()
        """Requests that run for the second time. There is no third: a request that ends its replica would end them all."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._end_seconds = end_seconds(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="jaxllm-replicas", daemon=True)
        self._thread.start()
        self._stack = contextlib.ExitStack()
        try:
            self._start(config, progress or SILENT, core_factory)
        except BaseException:
            self.shutdown()
            raise

    def _start(self, config: EngineConfig, progress: Progress, core_factory: str | None) -> None:
        environment_of_each = environments(config.parallel)
        directory = self._stack.enter_context(socket_directory())
        for rank, environment in enumerate(environment_of_each):
            (directory / str(rank)).mkdir()
            start = EngineStart(
                config,
                str(directory / str(rank)),
                log_level=None if env.log_level() else "warning",
                core_factory=core_factory,
                replica=rank,
                num_replicas=len(environment_of_each),
            )
            self._processes.append(start_engine(start, environment))

        async def connect() -> Replicas:
            def client(rank: int, pid: int | None) -> EngineClient:
                return EngineClient(directory / str(rank), pid)

            policy, pids = config.parallel.data_parallel_routing, [process.pid for process in self._processes]
            self._replicas = Replicas(client, pids, policy=policy, retries=True)
            loading = asyncio.create_task(show_loading(self._replicas.clients[0], progress))
            try:
                await self._replicas.ready()
            finally:
                loading.cancel()
                progress.finish()
            self._replicas.start(self)
            return self._replicas

        replicas = asyncio.run_coroutine_threadsafe(connect(), self._loop).result()
        self._core = core = replicas.core
        self.config, self.model_config, self.max_model_len = core.config, core.model_config, core.max_model_len
        self.processor_arguments: Mapping[str, int] = core.processor_arguments
        self.kernels = core.kernels
        self.start_times = StartTimes()
        most = self.config.scheduler.max_num_seqs
        assert most is not None
        self._most_sent = len(self._processes) * (most + max(4, most // 8))
        """Requests at all replicas together: those that they run, and a few that wait there."""

    # A core that is stepped

    @property
    def num_compiled_after_warmup(self) -> int:
        return self._core.num_compiled_after_warmup

    @property
    def awaited_programs(self) -> tuple[int, int]:
        return self._core.stats().awaited_programs

    @property
    def sleep_level(self) -> int:
        return self._core.sleep_level

    def replica_of(self, request_id: str) -> int:
        return 0

    def stats(self) -> SchedulerStats:
        return self._core.stats()

    def loads(self) -> list[tuple[SchedulerStats, int]]:
        """The load of all replicas together: which one computes a request is decided after the caller has added it."""
        return [(self.stats(), self.num_compiled_after_warmup)]

    def add_request(self, request: EngineCoreRequest) -> None:
        if self._replicas.dead_error is not None:
            raise EngineDeadError(str(self._replicas.dead_error))
        self._unfinished.add(request.request_id)
        self._loop.call_soon_threadsafe(self._enqueue, request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._unfinished.difference_update(request_ids)
        self._loop.call_soon_threadsafe(self._abort, request_ids)

    prefill_address = None

    def meet(self, transfer: KVTransfer) -> None:
        """Replicas of one role fetch no blocks of others."""

    def continue_request(self, request_id: str, output_token_ids: Sequence[int]) -> None:
        """Replicas of one role draw the first tokens themselves."""

    def end_lease(self, transfer: KVTransfer) -> None:
        self._loop.call_soon_threadsafe(self._replicas.end_lease, transfer)

    def has_unfinished_requests(self) -> bool:
        return bool(self._unfinished)

    def step(self) -> list[EngineCoreOutput]:
        """The outputs that have arrived; waits a moment for the first."""
        outputs: list[EngineCoreOutput] = []
        with contextlib.suppress(queue.Empty):
            outputs += self._outputs.get(timeout=STEP_SECONDS)
            while True:
                outputs += self._outputs.get_nowait()
        self._unfinished.difference_update(output.request_id for output in outputs if output.finish_reason is not None)
        return outputs

    def run_between_steps(self, post: Callable[[Callable[[], object]], None]) -> None:
        """The loop of each replica runs what it needs."""

    def publish_cache_events(self) -> None:
        """Nobody chooses between this and another core."""

    def take_cache_events(self) -> CacheEvents | None:
        return None

    def cache_snapshot(self) -> CacheEvents:
        return CacheEvents()

    def call_core(self, name: str, *arguments: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(self._replicas.call(name, *arguments), self._loop).result()

    def shutdown(self) -> None:
        """End every request and all processes. May be called again."""
        if self._loop.is_closed():
            return
        replicas = getattr(self, "_replicas", None)  # missing if the start failed
        if replicas is not None:
            asyncio.run_coroutine_threadsafe(_shut_down(replicas), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(self._end_seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            process.stdin.close()
        self._stack.close()

    # In the loop's thread

    def _enqueue(self, request: EngineCoreRequest) -> None:
        self._waiting.append(request)
        self._feed()

    def _feed(self) -> None:
        """Send waiting requests, as many as the replicas have room for."""
        while self._waiting and len(self._sent) < self._most_sent:
            request = self._waiting.popleft()
            self._sent[request.request_id] = request
            try:
                self._replicas.add(request)
            except JaxLLMError as error:
                self._fail([request.request_id], error)

    def _abort(self, request_ids: Sequence[str]) -> None:
        gone = set(request_ids)
        self._waiting = deque(request for request in self._waiting if request.request_id not in gone)
        self._forget(gone)
        self._replicas.abort(request_ids)
        self._feed()

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._sent.pop(request_id, None)
            self._answered.discard(request_id)
            self._rerun.discard(request_id)

    def _fail(self, request_ids: Iterable[str], error: JaxLLMError) -> None:
        ids = [request_id for request_id in request_ids if request_id in self._sent]
        self._forget(ids)
        kind = ErrorKind.INTERNAL
        self._outputs.put([EngineCoreOutput(each, [], FinishReason.ERROR, str(error), error_kind=kind) for each in ids])

    # What the replicas report

    def take_outputs(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """See CoreListener, as for all that follow."""
        outputs = list(outputs)
        self._answered.update(output.request_id for output in outputs)
        self._forget(output.request_id for output in outputs if output.finish_reason is not None)
        self._outputs.put(outputs)
        self._feed()

    def take_move(self, request_id: str, replica: int, transfer: KVTransfer | None) -> None:
        pass  # nothing is counted by replica

    def take_refusal(self, request_id: str, error: JaxLLMError) -> None:
        self._fail([request_id], error)
        self._feed()

    def take_failure(self, error: EngineError, request_ids: Collection[str] | None = None) -> None:
        ids = [request_id for request_id in (self._sent if request_ids is None else request_ids) if request_id in self._sent]
        again = []
        if isinstance(error, ReplicaLostError) and self._replicas.dead_error is None:
            again = [self._sent[request_id] for request_id in ids if request_id not in self._answered | self._rerun]
        self._forget(request.request_id for request in again)
        self._rerun.update(request.request_id for request in again)
        self._waiting.extendleft(reversed(again))
        self._fail(ids, error)
        self._feed()

    def end(self) -> None:
        pass  # the caller has ended its requests

    def die(self, error: EngineDeadError) -> None:
        self.take_failure(error)

    def own_metrics(self) -> list[Metric]:
        return []


async def _shut_down(replicas: Replicas) -> None:
    replicas.shutdown()

"""An engine core in its own process, as an API server uses it: its calls and its reports. Does not import JAX."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.core_interface import Core
from jaxllm.engine import messages
from jaxllm.engine.async_core import CoreListener, ReplicaInfo, ReplicaState, check_alive
from jaxllm.engine.client import EngineClient
from jaxllm.engine.messages import Ready, Status
from jaxllm.errors import ConfigError, EngineDeadError, EngineError
from jaxllm.kv_transfer import KVTransfer
from jaxllm.log import logger
from jaxllm.mailbox import Letter, put_all
from jaxllm.metrics.metric import Metric
from jaxllm.request import EngineCoreRequest
from jaxllm.scheduler_stats import SchedulerStats
from jaxllm.served_model import ServedModel

SHARE_SECONDS = 1.0
"""Interval at which API servers exchange metrics, and the longest wait for those of the others."""


class RemoteCore:
    """The core in the engine process, for an API server's LLMEngine. It steps by itself; outputs go to `client.on_outputs`."""

    def __init__(self, client: EngineClient, ready: Ready):
        self.config: EngineConfig = ready.config
        self.model_config: ServedModel = ready.model_config
        self.max_model_len = ready.max_model_len
        self.processor_arguments: Mapping[str, int] = ready.processor_arguments
        self.kernels = ready.kernels
        self._client = client

    @property
    def num_compiled_after_warmup(self) -> int:
        return self._client.num_compiled_after_warmup

    @property
    def sleep_level(self) -> int:
        return self._client.sleep_level

    def stats(self) -> SchedulerStats:
        return self._client.stats

    def replica_of(self, request_id: str) -> int:
        return 0

    def loads(self) -> list[tuple[SchedulerStats, int]]:
        return [(self.stats(), self.num_compiled_after_warmup)]

    def add_request(self, request: EngineCoreRequest) -> None:
        self._client.add(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._client.abort(request_ids)

    def end_lease(self, transfer: KVTransfer) -> None:
        self._client.end_lease(transfer)

    def shutdown(self) -> None:
        self._client.close()


class ProcessCore:
    """The core in the engine process, in the event loop of its client: reports and commands run there."""

    core: Core
    """Once it is ready."""

    def __init__(self, client: EngineClient):
        self.namespace = client.name.rpartition("-")[2] + "-"
        self.is_stopping = False
        self._client = client
        self._listener: CoreListener | None = None

    async def ready(self) -> "ProcessCore":
        """Wait until the engine serves. Raises EngineDeadError."""
        self.core = RemoteCore(self._client, await self._client.ready())
        return self

    @property
    def status(self) -> Status | None:
        """The latest heartbeat."""
        return self._client.status

    @property
    def dead_error(self) -> EngineDeadError | None:
        return self._client.dead_error

    @property
    def metrics_of_others(self) -> list[Metric]:
        return [] if self._listener is None else self._exchange.metrics_of_others

    def start(self, listener: CoreListener) -> None:
        self._listener = listener
        self._exchange = MetricsExchange(self._client, listener.own_metrics)
        client = self._client
        client.on_outputs = lambda message: listener.take_outputs(message.outputs)
        client.on_refused = lambda message: listener.take_refusal(message.request_id, messages.error_of(message.fault))
        client.on_failed = lambda message: listener.take_failure(EngineError(message.message))
        client.on_dead = listener.die
        if client.dead_error is not None:  # just now
            listener.die(client.dead_error)

    def send(self, command: Callable[[], None]) -> None:
        check_alive(self)
        command()

    async def call(self, name: str, *arguments: Any) -> Any:
        return await self._client.call(messages.call_of(name, *arguments))

    def replicas(self) -> list[ReplicaInfo]:
        return [replica_info(0, "down" if self.dead_error is not None else "serving", self._client)]

    def hand_over(self, letters: list[Letter]) -> None:
        put_all(letters)

    async def refresh_metrics(self) -> None:
        """Query all API servers. The numbers of one that does not answer, and of all in a long step, stay as before."""
        await self._exchange.refresh()

    def shutdown(self) -> None:
        if self.is_stopping:
            return
        self.is_stopping = True
        if self._listener is not None:
            self._exchange.stop()
            self._listener.end()
        self._client.close()


def replica_info(rank: int, state: ReplicaState, client: EngineClient) -> ReplicaInfo:
    """State and statistics of a replica, from the client of its engine."""
    stall = client.stall if state == "serving" else None
    return ReplicaInfo(
        rank,
        state if stall is None else "stalled",
        client.stats,
        client.tick_seconds if client.is_ready and state != "down" else 0.0,
        client.long_work if stall is None else stall,
    )


class MetricsExchange:
    """Exchanges the metrics of an engine process's API servers, through that process, now and every SHARE_SECONDS."""

    def __init__(self, client: EngineClient, own_metrics: Callable[[], list[Metric]]):
        self.client, self._own_metrics = client, own_metrics
        self.metrics_of_others: list[Metric] = []
        self._asked = 0
        """Number of the latest WantMetrics."""
        self._must_share = asyncio.Event()
        """Set while another API server waits for the metrics of this one."""
        client.on_want_metrics = self._wake
        self._sharing = asyncio.create_task(self._share_often())

    async def refresh(self) -> None:
        """Fetch the metrics of all API servers, within SHARE_SECONDS."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHARE_SECONDS):
                await self._share(fresh=True)

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._sharing.cancel()

    async def _share(self, *, fresh: bool = False) -> None:
        self.metrics_of_others = await self.client.call(messages.ShareMetrics(self._own_metrics(), fresh, self._asked))

    def _wake(self, number: int) -> None:
        self._asked = number
        self._must_share.set()

    async def _share_often(self) -> None:
        while True:
            self._must_share.clear()
            try:
                await self._share()
            except EngineDeadError:
                return
            except (EngineError, ConfigError) as error:
                logger.debug("metrics were not shared: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SHARE_SECONDS):
                    await self._must_share.wait()

"""AsyncLLM over an engine process: everything of the front happens in one event loop, which a step's outputs wake once."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, cast

from jaxllm.async_llm import AsyncLLM
from jaxllm.at_exit import shut_down_at_exit
from jaxllm.engine import messages
from jaxllm.engine.client import EngineClient, RemoteCore
from jaxllm.engine.messages import Failed, Outputs, Refused
from jaxllm.errors import ConfigError, EngineDeadError, EngineError
from jaxllm.llm_engine import Core, LLMEngine, Texts
from jaxllm.log import logger
from jaxllm.mailbox import Letter, put_all
from jaxllm.metrics.merge import merged
from jaxllm.metrics.metric import Metric

SHARE_SECONDS = 1.0
"""Interval at which a front exchanges metrics with the engine process, and the longest wait for those of the others."""


class ConnectedLLM(AsyncLLM):
    """Made by `AsyncLLM.connect`, used in the event loop that it was made in."""

    @classmethod
    async def over(cls, client: EngineClient, texts: Texts | None = None) -> "ConnectedLLM":
        """Wait until the engine serves. Raises EngineDeadError."""
        ready = await client.ready()
        core = cast(Core, RemoteCore(client, ready))  # without what this class asks the client for itself
        namespace = client.name.rpartition("-")[2] + "-"
        engine = await asyncio.to_thread(LLMEngine, core=core, texts=texts, namespace=namespace)  # may read files
        return cls(client, engine)

    def __init__(self, client: EngineClient, engine: LLMEngine):
        self._client = client
        self._take_over(engine)
        self._metrics_of_others: list[Metric] = []
        client.on_outputs, client.on_refused = self._take_outputs, self._take_refusal
        client.on_failed, client.on_dead = self._take_failure, self._die
        client.on_want_metrics = self._wake_sharing
        self._asked = 0
        """Number of the latest WantMetrics."""
        if client.dead_error is not None:  # just now
            self._die(client.dead_error)
        self._must_share = asyncio.Event()
        """Set while another front waits for the metrics of this one."""
        self._sharing = asyncio.create_task(self._share_metrics())
        shut_down_at_exit(self)

    def shutdown(self) -> None:
        """End every request of this front (with finish_reason "abort") and leave the engine process."""
        if self._stopping:
            return
        self._stopping = True
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._sharing.cancel()
        self._deliver(self._engine.abort_all())
        self._client.close()

    # Metrics of all fronts

    async def get_metrics(self) -> list[Metric]:
        """All metrics now, those of the other fronts too; in a step that takes long, theirs of before it."""
        self._check_alive()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHARE_SECONDS):
                await self._share_now(fresh=True)
        return self._merged_metrics()

    def prometheus_registry(self) -> Any:
        """The metrics for a Prometheus exporter: this front's now, those of the other fronts a second ago."""
        from jaxllm.metrics.prometheus import registry

        return registry(self._merged_metrics)

    def _merged_metrics(self) -> list[Metric]:
        own = [*self._engine.get_metrics(), *self._added_metrics()]
        return merged([own, self._metrics_of_others])

    def _own_metrics(self) -> list[Metric]:
        """What only this front counts."""
        engine = [] if self._engine.metrics is None else self._engine.metrics.snapshot(of_engine=False)
        return [*engine, *self._added_metrics()]

    async def _share_now(self, *, fresh: bool = False) -> None:
        self._metrics_of_others = await self._client.call(messages.ShareMetrics(self._own_metrics(), fresh, self._asked))

    def _wake_sharing(self, number: int) -> None:
        self._asked = number
        self._must_share.set()

    async def _share_metrics(self) -> None:
        while True:
            self._must_share.clear()
            try:
                await self._share_now()
            except EngineDeadError:
                return
            except (EngineError, ConfigError) as error:
                logger.debug("metrics were not shared: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SHARE_SECONDS):
                    await self._must_share.wait()

    # What the core does between two steps

    async def call_core(self, name: str, *arguments: Any) -> Any:
        return await self._client.call(messages.call_of(name, *arguments))

    async def finish_compiling(self) -> None:
        await self.call_core("finish_compiling")

    # Where AsyncLLM would ask its thread

    def _send(self, command: Callable[[], None]) -> None:
        self._check_alive()
        command()

    async def _run(self, call: Callable[[], Any]) -> Any:
        self._check_alive()
        return call()

    def _hand_over(self, letters: list[Letter]) -> None:
        put_all(letters)

    # What the engine process says

    def _take_outputs(self, message: Outputs) -> None:
        self._deliver(self._engine.take(message.outputs))

    def _take_refusal(self, message: Refused) -> None:
        internal_id = self._engine.abort_refused(message.request_id)
        mailbox = None if internal_id is None else self._mailboxes.pop(internal_id, None)
        if mailbox is not None:
            put_all([(mailbox, messages.error_of(message.fault))])

    def _take_failure(self, message: Failed) -> None:
        error = EngineError(message.message)
        self._engine.abort_all()
        mailboxes, self._mailboxes = self._mailboxes, {}
        put_all([(mailbox, error) for mailbox in mailboxes.values()])

    def _die(self, error: EngineDeadError) -> None:
        self._dead = error
        self._engine.abort_all()
        mailboxes, self._mailboxes = self._mailboxes, {}
        put_all([(mailbox, error) for mailbox in mailboxes.values()])

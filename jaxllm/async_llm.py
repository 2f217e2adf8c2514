"""AsyncLLM: the engine for asyncio programs. The core steps by itself (`async_core`); callers await the outputs."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from jaxllm.at_exit import shut_down_at_exit
from jaxllm.beam_search import search_request, step_params
from jaxllm.config import EngineConfig
from jaxllm.core_interface import PauseCalls, PauseMode, SteppedCore
from jaxllm.engine.async_core import AsyncCore, ReplicaInfo, ReplicaState, ThreadCore, check_alive, run_in
from jaxllm.engine_args import FromOptions
from jaxllm.errors import EngineDeadError, EngineError, EngineStalledError, JaxLLMError, ReplicaLostError
from jaxllm.hub import short_name
from jaxllm.kv_transfer import KVTransfer
from jaxllm.llm_engine import make_core
from jaxllm.lora_calls import AsyncLoraCalls, loras_in_a_loop
from jaxllm.lora_request import LoRARequest
from jaxllm.mailbox import Letter, Mailbox
from jaxllm.media import ProcessedMedia
from jaxllm.metrics.merge import merged
from jaxllm.metrics.metric import Metric
from jaxllm.metrics.replica_states import replica_states
from jaxllm.outputs import EngineCoreOutput, PoolingRequestOutput, RequestMetrics, RequestOutput, raise_error
from jaxllm.pooling_params import PoolingParams
from jaxllm.progress import Progress
from jaxllm.request_options import NO_OPTIONS, RequestOptions, placement
from jaxllm.request_processor import RequestProcessor, Texts, load_texts
from jaxllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from jaxllm.scheduler_stats import SchedulerStats
from jaxllm.text.input_processor import ParentRequest, Prompt
from jaxllm.text.prompt_media import with_processed
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.unread_streams import UnreadStreams

if TYPE_CHECKING:
    from jaxllm.engine.client import EngineClient
    from jaxllm.sampling.processors import Processor

DRAIN_POLL_SECONDS = 0.02
"""Interval between checks whether the requests of an engine that pauses with mode "wait" have ended."""


class AsyncLLM(FromOptions, AsyncLoraCalls, PauseCalls):
    """An engine whose steps run in a thread of their own. Only that thread touches the engine core.

    Raises ConfigError, ModelLoadError or OutOfMemoryError.
    """

    request_ended: Callable[[ParentRequest, RequestMetrics | None, BaseException | None], None] | None = None
    """Called in the caller's task when a stream ends: its times (None without outputs) and the error that ended it, if any."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        progress: Progress | None = None,
        core: SteppedCore | None = None,
        logits_processors: "Sequence[Processor | str]" = (),
    ):
        core, texts = make_core(config, progress=progress, core=core, logits_processors=logits_processors)
        self._begin(ThreadCore(core), RequestProcessor(core, texts))

    def _begin(self, core: AsyncCore, processor: RequestProcessor) -> None:
        self._core, self._processor = core, processor
        self.config = processor.config
        self.model_config = processor.model_config
        self.max_model_len = processor.max_model_len
        self.kernels = processor.core.kernels
        self.input_processor = processor.input_processor
        self.loras = loras_in_a_loop(processor.config, self.call_core)
        self._mailboxes: dict[str, Mailbox] = {}
        """Mailboxes by internal id. Only accessed where the core runs commands, like `RequestProcessor`."""
        self._searches: dict[str, str] = {}
        """Internal id to the caller's id of each unfinished beam search. Searches aborted between two steps are removed."""
        self.unread_streams: UnreadStreams | None = None
        self._sources: list[Callable[[], Iterable[Metric]]] = []
        core.start(_Reports(self))
        shut_down_at_exit(self)

    @classmethod
    async def connect(cls, client: "EngineClient", texts: Texts | None = None) -> "AsyncLLM":
        """Make an AsyncLLM for callers in this event loop whose core runs in the engine process that `client` is connected to.

        Waits until the engine serves; then loads the texts unless they are given. Raises EngineDeadError.
        """
        from jaxllm.engine.process_core import ProcessCore

        return await cls.over(await ProcessCore(client).ready(), texts)

    @classmethod
    async def over(cls, core: AsyncCore, texts: Texts | None = None) -> "AsyncLLM":
        """Make an AsyncLLM over a core that runs; loads the texts unless they are given."""
        found = await asyncio.to_thread(load_texts, core.core.config) if texts is None else texts
        llm = cls.__new__(cls)
        llm._begin(core, RequestProcessor(core.core, found, namespace=core.namespace))
        return llm

    # For callers

    async def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | PoolingParams | BeamSearchParams | None,
        request_id: str,
        options: RequestOptions = NO_OPTIONS,
    ) -> ParentRequest:
        """Check and tokenize a prompt for `stream`. Reports every fault of the prompt here. The task's `placement` applies.

        Raises InvalidRequestError, or OverloadedError if the machine is too busy to check whether a grammar can be used.
        A request that exceeds its queue timeout or its timeout ends with the finish reason "error" and that `error_kind`.
        """
        check_alive(self._core)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        search = None
        if isinstance(params, BeamSearchParams):
            search, params = params, step_params(params, self.config.model.max_logprobs)
        grammar = None
        has_tokenizer = self.input_processor.tokenizer is not None
        if has_tokenizer and isinstance(params, SamplingParams) and params.structured_outputs is not None:
            grammar = await asyncio.wrap_future(self._processor.grammar_compiler.submit(params.structured_outputs))
        options = placement().applied_to(options)
        prompt = with_processed(prompt, await self.process_media(prompt))
        request = await asyncio.to_thread(self.input_processor.process, request_id, prompt, params, options, grammar=grammar)
        return request if search is None else replace(request, beam_search_params=search)

    async def process_media(self, prompt: Prompt) -> list[ProcessedMedia]:
        """The images of a prompt, prepared in threads of their own; they may stand in its `multi_modal_data` in place of those that came.

        Raises InvalidRequestError. Cancelling the task drops those that wait for a thread.
        """
        return await asyncio.gather(*map(asyncio.wrap_future, self.input_processor.media.submit(prompt)))

    async def stream(self, request: ParentRequest) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a prepared request as they arrive; merge those that a slow caller has not fetched yet.

        A beam search has one output, at its end. Cancelling the task or closing the generator aborts the request. Raises
        EngineError or EngineDeadError if the engine fails.
        """
        if request.beam_search_params is not None:
            yield await self._search(request)
            return
        mailbox = self._mailbox_of(request)
        self._send(lambda: self._admit(request, mailbox))
        metrics: RequestMetrics | None = None
        runs_again = False
        try:
            finished = False
            while not finished:
                try:
                    output = await mailbox.take()
                except ReplicaLostError as error:
                    if not error.may_retry or metrics is not None or runs_again:
                        raise
                    runs_again = True  # not a third time: a request that ends its replica would end them all
                    self._forget(mailbox)
                    mailbox = self._mailbox_of(request)
                    anywhere = [
                        replace(child, options=replace(child.options, data_parallel_rank=None)) for child in request.children
                    ]
                    self._send(partial(self._admit, replace(request, children=anywhere), mailbox))
                    continue
                if mailbox.is_held and self.unread_streams is not None:
                    self.unread_streams.release(mailbox)
                if metrics is None:
                    request.forget_payloads()  # its callers may hold it for as long as the answer takes
                finished, metrics = output.finished, output.metrics
                yield output
        finally:
            self._forget(mailbox)
            if not mailbox.is_done:
                self._abandon(request.internal_id)
            if self.request_ended is not None:
                self.request_ended(request, metrics, sys.exception())

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Load the adapter if need be, `prepare` and `stream`. Raises InvalidRequestError, AdapterError, EngineError or
        EngineDeadError.
        """
        adapter = await self.loras.use(lora_request)
        options = RequestOptions(
            priority=priority, adapter=adapter, data_parallel_rank=data_parallel_rank, session_id=session_id
        )
        request = await self.prepare(prompt, sampling_params, request_id, options)
        async with contextlib.aclosing(self.stream(request)) as outputs:
            async for output in outputs:
                yield output

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
    ) -> RequestOutput:
        """Find the likeliest answers by beam search, best first. Cancelling the task aborts the search.

        Raises InvalidRequestError, EngineError or EngineDeadError. An aborted search returns no answers.
        """
        adapter = await self.loras.use(lora_request)
        options = RequestOptions(priority=priority, adapter=adapter)
        output = await self._search(await self.prepare(prompt, params, request_id, options))
        raise_error(output)
        return output

    async def _search(self, request: ParentRequest) -> RequestOutput:
        """Run a beam search and return its only output."""
        output: RequestOutput | None = None
        self._searches[request.internal_id] = request.request_id
        try:
            output = await search_request(
                request,
                self._run_together,
                is_aborted=lambda: request.internal_id not in self._searches,
                eos_token_ids=self.input_processor.eos_token_ids,
                max_model_len=self.max_model_len,
                tokenizer=self.input_processor.tokenizer,
            )
            return output
        finally:
            self._searches.pop(request.internal_id, None)
            if self.request_ended is not None:
                self.request_ended(request, None if output is None else output.metrics, sys.exception())

    async def _run_together(self, requests: Sequence[ParentRequest]) -> list[RequestOutput]:
        """Start requests in the same step and return their last outputs. An error in one or cancellation aborts the others."""
        loop = asyncio.get_running_loop()
        mailboxes = [Mailbox(loop, RequestOutputKind.FINAL_ONLY) for _ in requests]

        def admit() -> None:
            for request, mailbox in zip(requests, mailboxes, strict=True):
                self._admit(request, mailbox)

        try:
            self._send(admit)
            return [await mailbox.take() for mailbox in mailboxes]
        finally:
            for request, mailbox in zip(requests, mailboxes, strict=True):
                if not mailbox.is_done:
                    self._abandon(request.internal_id)

    async def pool(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
    ) -> PoolingRequestOutput:
        """Compute the vector of a prompt, or the vectors of its tokens. Cancelling the task aborts the request.

        Raises InvalidRequestError, EngineError or EngineDeadError. An aborted request returns no vectors.
        """
        adapter = await self.loras.use(lora_request)
        options = RequestOptions(priority=priority, adapter=adapter)
        request = await self.prepare(prompt, pooling_params, request_id, options)
        return await self.pool_prepared(request)

    async def pool_prepared(self, request: ParentRequest) -> PoolingRequestOutput:
        """`pool` for a request that `prepare` made from PoolingParams."""
        output: Any = None
        async with contextlib.aclosing(self.stream(request)) as outputs:
            async for last in outputs:  # there is one
                output = last
        raise_error(output)
        return output

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests by the callers' ids. Their generators yield a last output with finish_reason "abort"."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self._searches = {internal_id: own for internal_id, own in self._searches.items() if own not in ids}
        await self._run(lambda: self._deliver(self._processor.abort_request_with_ids(ids)))

    async def abort_all(self) -> None:
        """End every request as `abort` does."""
        self._searches.clear()
        await self._run(lambda: self._deliver(self._processor.abort_all()))

    def end_lease(self, transfer: KVTransfer) -> None:
        """Free the blocks that a prefill engine keeps for a request that is not sent. Returns at once."""
        with contextlib.suppress(EngineError):  # the lease ends by itself, later
            self._send(lambda: self._processor.core.end_lease(transfer))

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ConfigError if there is none."""
        return self._processor.get_tokenizer()

    @property
    def chat_template(self) -> str | None:
        """The text of the chat template set by the options; None if they set none."""
        return self._processor.chat_template

    def get_default_sampling_params(self, *, chat: bool = False) -> SamplingParams:
        """SamplingParams with the values of the model's generation config. `chat`: with those of llama.cpp where it has none."""
        return self._processor.get_default_sampling_params(chat=chat)

    async def get_metrics(self) -> list[Metric]:
        """All current metrics, with those of other API servers."""
        check_alive(self._core)
        await self._core.refresh_metrics()
        return self._merged(await self._run(self._processor.get_metrics))

    async def load(self) -> SchedulerStats:
        """The numbers of running and waiting requests, and the usage of the cache; with an engine process those of the latest report,
        which comes when a request has come or ended, and every LOAD_SECONDS."""
        return await self._run(self._processor.core.stats)

    def prometheus_registry(self) -> Any:
        """The metrics for a Prometheus exporter, the load as `load` has it; each call makes a registry."""
        from jaxllm.metrics.prometheus import registry

        return registry(lambda: self._merged(self._processor.get_metrics()))

    def _merged(self, own: list[Metric]) -> list[Metric]:
        return merged([[*own, *self._states(), *self._added_metrics()], self._core.metrics_of_others])

    def _states(self) -> list[Metric]:
        replicas = [(replica.state, replica.tick_seconds) for replica in self.replicas()]
        return replica_states(short_name(self.config.model.model), replicas, get_args(ReplicaState))

    def _added_metrics(self) -> list[Metric]:
        return [metric for source in self._sources for metric in source()]

    def add_metrics(self, source: Callable[[], Iterable[Metric]]) -> None:
        """Include these counters and histograms, summed over all API servers, in `get_metrics` and the exporter."""
        self._sources.append(source)

    async def call_core(self, name: str, *arguments: Any) -> Any:
        return await self._core.call(name, *arguments)

    async def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Hold back new requests until `resume`. Unfinished ones are aborted ("abort"), awaited ("wait") or suspended ("keep").

        Discards cached prefixes (`clear_cache`), unless suspended requests may hold them. Raises InvalidRequestError for
        another mode.
        """
        await super().pause(mode)
        while await self.is_draining():
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        if clear_cache and mode != "keep":
            await self.reset_prefix_cache()

    async def check_integrity(self) -> None:
        def check() -> None:
            assert not self._mailboxes, f"{len(self._mailboxes)} mailboxes are left"

        await self._run(check)
        await super().check_integrity()

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine cannot serve."""
        check_alive(self._core)

    async def check_ready(self) -> None:
        """Raise EngineDeadError if the engine cannot serve, EngineStalledError if it seems to hang; of several replicas, all that serve."""
        check_alive(self._core)
        replicas = self.replicas()
        stalls = [replica.detail for replica in replicas if replica.state == "stalled"]
        if stalls and all(replica.state != "serving" for replica in replicas):
            raise EngineStalledError(stalls[0])

    @property
    def is_running(self) -> bool:
        """Whether the engine accepts requests."""
        return self._core.dead_error is None and not self._core.is_stopping

    def replicas(self) -> list[ReplicaInfo]:
        """The engines behind it, and whether they serve; several with data_parallel_size."""
        return self._core.replicas()

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The error that stopped the engine; None while it runs."""
        return self._core.dead_error

    def shutdown(self) -> None:
        """End every request (with finish_reason "abort") and free the device. The object cannot be used afterwards."""
        self._core.shutdown()
        self._processor.close()

    def __enter__(self) -> "AsyncLLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    # From callers to the core

    def _send(self, command: Callable[[], None]) -> None:
        self._core.send(command)

    async def _run(self, call: Callable[[], Any]) -> Any:
        """Run a call where the core runs commands and return its result."""
        return await run_in(self._core, call)

    def _abandon(self, internal_id: str) -> None:
        """Abort a request whose outputs are no longer read, without waiting."""

        def command() -> None:
            self._mailboxes.pop(internal_id, None)
            self._processor.abort_internal([internal_id])

        with contextlib.suppress(EngineDeadError):  # a dead engine holds nothing any more
            self._send(command)

    def hold_unread_streams(self) -> UnreadStreams:
        """From now on, hold requests in the engine while the callers of `stream` leave their outputs unfetched for long.

        For servers, whose callers wait for clients; a program that reads its streams one after the other would stop all but one.
        """
        self.unread_streams = UnreadStreams(self.call_core)
        return self.unread_streams

    def _mailbox_of(self, request: ParentRequest) -> Mailbox:
        mailbox = Mailbox(asyncio.get_running_loop(), request.params.output_kind)
        if self.unread_streams is not None:
            self.unread_streams.watch(mailbox, [child.request_id for child in request.children])
        return mailbox

    def _forget(self, mailbox: Mailbox) -> None:
        if self.unread_streams is not None:
            self.unread_streams.forget(mailbox)

    # Where the core runs commands

    def _admit(self, request: ParentRequest, mailbox: Mailbox) -> None:
        self._mailboxes[request.internal_id] = mailbox
        try:
            self._processor.add(request)
        except Exception as error:  # fails only this request, unless the engine is dead
            del self._mailboxes[request.internal_id]
            self._core.hand_over([(mailbox, error)])
            if isinstance(error, EngineDeadError):
                raise

    def _deliver(self, outputs: list[tuple[str, RequestOutput]]) -> None:
        letters: list[Letter] = []
        for internal_id, output in outputs:
            mailbox = self._mailboxes.get(internal_id)
            if mailbox is None:
                continue
            letters.append((mailbox, output))
            if output.finished:
                del self._mailboxes[internal_id]
        self._core.hand_over(letters)

    def _end(self, internal_ids: Iterable[str], error: JaxLLMError) -> None:
        """End requests with an error."""
        ids = list(internal_ids)
        self._processor.abort_internal(ids)
        mailboxes = [self._mailboxes.pop(internal_id, None) for internal_id in ids]
        self._core.hand_over([(mailbox, error) for mailbox in mailboxes if mailbox is not None])


class _Reports:
    """Passes the core's reports to an AsyncLLM."""

    def __init__(self, llm: AsyncLLM):
        self._llm, self._processor = llm, llm._processor

    def take_outputs(self, outputs: Iterable[EngineCoreOutput]) -> None:
        self._llm._deliver(self._processor.take(outputs))

    def take_move(self, request_id: str, replica: int, transfer: KVTransfer | None) -> None:
        self._processor.moved(request_id, replica, transfer)

    def take_refusal(self, request_id: str, error: JaxLLMError) -> None:
        if (internal_id := self._processor.internal_id_of(request_id)) is not None:
            self._llm._end([internal_id], error)

    def take_failure(self, error: EngineError, request_ids: Collection[str] | None = None) -> None:
        if request_ids is None:
            self._llm._end(self._processor.internal_ids(), error)
            return
        found = (self._processor.internal_id_of(request_id) for request_id in request_ids)
        self._llm._end({internal_id for internal_id in found if internal_id is not None}, error)

    def end(self) -> None:
        self._llm._deliver(self._processor.abort_all())

    def die(self, error: EngineDeadError) -> None:
        self.take_failure(error)

    def own_metrics(self) -> list[Metric]:
        return [*self._processor.snapshot(of_engine=False), *self._llm._added_metrics()]


AsyncLLMEngine = AsyncLLM
"""The name that scripts written for vLLM import."""

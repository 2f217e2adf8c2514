"""Several engine processes as one AsyncCore: a balancer chooses the process for each request, and control calls go to all."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from jaxllm.adapters import AdapterInfo, AdapterState
from jaxllm.core_interface import Core
from jaxllm.engine import messages
from jaxllm.engine.async_core import CoreListener, ReplicaInfo, ReplicaState, check_alive
from jaxllm.engine.client import EngineClient
from jaxllm.engine.messages import Failed, Load, Outputs, Ready, Refused, Status, Update
from jaxllm.engine.process_core import MetricsExchange, replica_info
from jaxllm.errors import AdapterError, EngineDeadError, EngineError, InvalidRequestError, JaxLLMError, ReplicaLostError
from jaxllm.kv_transfer import KVTransfer
from jaxllm.log import logger
from jaxllm.mailbox import Letter, put_all
from jaxllm.metrics.metric import Metric
from jaxllm.replicas.calls import COMBINE, UNDO
from jaxllm.request import EngineCoreRequest
from jaxllm.routing.balancer import Balancer, RoutingPolicy
from jaxllm.scheduler_stats import SchedulerStats, total

ADAPTER_POLL_SECONDS = 0.02
STALL_SECONDS, STALL_POLL_SECONDS = 5.0, 0.5
"""A replica that is silent or busy with one step for so long gets no requests while others take them, and how often that is looked at."""
JOIN_SECONDS = 120.0
"""The longest that a new process gets the state of the others before it serves without."""


class Replicas:
    """Engine processes with the same model. Everything runs in the event loop that made it.

    `connect(rank, pid)` makes a client of a replica's process; with pid None, of the one that will be started in its place. `retries`:
    requests of a replica that ends may run again on another, as far as nothing of them was passed on.
    """

    def __init__(
        self,
        connect: Callable[[int, int | None], EngineClient],
        pids: Sequence[int | None],
        *,
        policy: RoutingPolicy = "cache_aware",
        num_api_servers: int = 1,
        retries: bool = False,
    ):
        self._connect, self._policy, self._num_api_servers, self._retries = connect, policy, num_api_servers, retries
        self._states: list[ReplicaState] = ["loading"] * len(pids)
        self._early_updates: list[list[Update]] = [[] for _ in pids]
        """Cache events that a replica published before requests were sent to it."""
        self.clients = [self._new_client(rank, pid) for rank, pid in enumerate(pids)]
        self._awaited = [rank for rank, pid in enumerate(pids) if pid is not None]
        self._exchange: MetricsExchange | None = None
        self._exchanges_with = 0
        self._old_metrics: list[Metric] = []
        self._adapter_numbers: list[dict[int, int]] = []
        """For each `add_adapter` the number that each replica gave it."""
        self._known_adapters: set[str] = set()
        """Adapters whose blocks the balancer knows, or is about to know."""
        self._last_prompt: list[int] | None = None
        self._last_rank = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: CoreListener | None = None
        self.is_stopping = False

    async def ready(self) -> "Replicas":
        """Wait until the replicas serve whose processes run already, or if none does, until the first serves. Raises EngineDeadError if
        none of those can be started."""
        tasks = [asyncio.ensure_future(_settled(client)) for client in self.clients]
        try:
            if self._awaited:
                await asyncio.wait([tasks[rank] for rank in self._awaited])
            else:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        settled = [client for client in self.clients if client.is_ready] or [self.clients[rank] for rank in self._awaited]
        readies = [await client.ready() for client in settled]
        config, first = readies[0].config, readies[0]
        assert config.scheduler.max_num_seqs is not None
        self.balancer = Balancer(
            len(self.clients),
            block_size=config.block_tokens,
            max_num_seqs=config.scheduler.max_num_seqs,
            hash_algorithm=config.cache.prefix_caching_hash_algo,
            prefix_caching=bool(config.cache.enable_prefix_caching),
            policy=self._policy,
            num_api_servers=self._num_api_servers,
        )
        self.core: Core = ReplicatedCore(self, first, min(ready.max_model_len for ready in readies))
        for rank, client in enumerate(self.clients):
            if client.is_ready and client.dead_error is None:
                self._admit(rank)
                continue
            self._states[rank] = "down"
            if client.dead_error is not None:
                self._replace_client(rank)
            self._spawn(self._join(rank))
        return self

    @property
    def status(self) -> Status | None:
        """The latest heartbeat of a replica that still loads; if none does, of the first."""
        loading = [client for client in self.clients if not client.is_ready]
        return (loading or self.clients)[0].status

    # AsyncCore

    @property
    def namespace(self) -> str:
        return self.clients[0].name.rpartition("-")[2] + "-"

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the start failed; later, while no replica serves. They may be started again."""
        failed = (client.dead_error for client in self.clients if client.dead_error is not None)
        if "loading" in self._states or self._serving:
            return next(failed, None) if not self._serving else None
        return EngineDeadError("no replica of the engine serves now")

    @property
    def metrics_of_others(self) -> list[Metric]:
        return self._old_metrics if self._exchange is None else self._exchange.metrics_of_others

    def start(self, listener: CoreListener) -> None:
        self._listener = listener
        self._choose_exchange()
        self._spawn(self._watch_stalls())

    def send(self, command: Callable[[], None]) -> None:
        if self.is_stopping:
            check_alive(self)
        command()

    async def call(self, name: str, *arguments: Any) -> Any:
        """Call all replicas that serve. Returns one answer; if some of them raise, takes the call back on the others and raises the first
        error."""
        check_alive(self)
        if name == "adapter_state":
            return await self._adapter_state(*arguments)
        ranks = self._serving
        answers = await self._call_each(dict.fromkeys(ranks, arguments), name)
        if name == "add_adapter":
            self._adapter_numbers.append(answers)
            return len(self._adapter_numbers)
        if name == "remove_adapter":
            self._spawn(self._note_adapters())
        return COMBINE[name](list(answers.values()))

    def replicas(self) -> list[ReplicaInfo]:
        return [replica_info(rank, state, self.clients[rank]) for rank, state in enumerate(self._states)]

    def hand_over(self, letters: list[Letter]) -> None:
        put_all(letters)

    async def refresh_metrics(self) -> None:
        if self._exchange is not None:
            with contextlib.suppress(EngineError):
                await self._exchange.refresh()

    def shutdown(self) -> None:
        if self.is_stopping:
            return
        self.is_stopping = True
        for task in self._tasks:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                task.cancel()
        if self._exchange is not None:
            self._exchange.stop()
        if self._listener is not None:
            self._listener.end()
        for client in self.clients:
            client.close()

    # Requests

    def add(self, request: EngineCoreRequest) -> None:
        """Send a request to the replica that the balancer chooses."""
        rank = self.balancer.choose(request, self._wanted_rank(request))
        self._last_prompt, self._last_rank = request.prompt_token_ids, rank
        self._send_to(rank, request)

    def _send_to(self, rank: int, request: EngineCoreRequest) -> None:
        """Send a request to the replica that was chosen for it."""
        self._note_adapter(request.options.adapter)
        try:
            self.clients[rank].add(request)
        except BaseException:
            self.balancer.ended(request.request_id)
            raise

    def _note_adapter(self, adapter: str | None) -> None:
        if adapter is not None and adapter not in self._known_adapters:
            self._known_adapters.add(adapter)
            self._spawn(self._note_adapters())

    def replica_of(self, request_id: str) -> int | None:
        """The replica that computes an unfinished request."""
        return self.balancer.replica_of(request_id)

    def _wanted_rank(self, request: EngineCoreRequest) -> int | None:
        """The replica that the caller names, or for another answer to the latest prompt, which is in no cache yet, that of the first."""
        if request.options.data_parallel_rank is None and request.prompt_token_ids is self._last_prompt:
            return self._last_rank if self.balancer.has_seat(self._last_rank) else None
        return request.options.data_parallel_rank

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests."""
        by_rank: dict[int, list[str]] = {}
        for request_id in request_ids:
            if (rank := self.balancer.replica_of(request_id)) is not None:
                by_rank.setdefault(rank, []).append(request_id)
                self.balancer.ended(request_id)
        for rank, ids in by_rank.items():
            with contextlib.suppress(EngineError):  # a replica that has just ended holds nothing
                self.clients[rank].abort(ids)
            self._let_go(rank)

    def end_lease(self, transfer: KVTransfer) -> None:
        """See Core. Any replica can do it."""
        if self._serving:
            self._send_end_of_lease(self._serving[0], transfer)

    def _send_end_of_lease(self, rank: int, transfer: KVTransfer) -> None:
        with contextlib.suppress(EngineError):  # the lease ends by itself, later
            self.clients[rank].end_lease(transfer)

    # What replicas report

    def _new_client(self, rank: int, pid: int | None) -> EngineClient:
        client = self._connect(rank, pid)
        client.on_outputs, client.on_refused = partial(self._take_outputs, rank), partial(self._take_refusal, rank)
        client.on_failed, client.on_update = partial(self._take_failure, rank), partial(self._take_update, rank)
        client.on_draining, client.on_dead = partial(self._drain, rank), partial(self._lose, rank)
        return client

    def _take_outputs(self, rank: int, message: Outputs) -> None:
        for output in message.outputs:
            if output.finish_reason is not None:
                self.balancer.ended(output.request_id)
        if message.load is not None:
            self._note_load(rank, message.load)
        self._let_go(rank)
        if self._listener is not None:
            self._listener.take_outputs(message.outputs)

    def _take_refusal(self, rank: int, message: Refused) -> None:
        self.balancer.ended(message.request_id)
        self._let_go(rank)
        self._refuse(message.request_id, messages.error_of(message.fault))

    def _refuse(self, request_id: str, error: JaxLLMError) -> None:
        if self._listener is not None:
            self._listener.take_refusal(request_id, error)

    def _take_failure(self, rank: int, message: Failed) -> None:
        """A step of a replica failed: its requests have ended, and it goes on."""
        ids = self.balancer.requests_of(rank)
        for request_id in ids:
            self.balancer.ended(request_id)
        self._let_go(rank)
        self._fail(EngineError(message.message), ids)

    def _fail(self, error: EngineError, ids: Collection[str]) -> None:
        """Requests have ended with an error."""
        if self._listener is not None:
            self._listener.take_failure(error, ids)

    def _take_update(self, rank: int, message: Update) -> None:
        if self._states[rank] not in ("serving", "draining"):
            self._early_updates[rank].append(message)
            return
        self._note_load(rank, message.load)
        if message.cache is not None:
            self.balancer.note_events(rank, message.cache)

    def _note_load(self, rank: int, load: Load) -> None:
        self.balancer.note_load(rank, load.stats, load.received.get(self.clients[rank].name, 0))

    # Replicas end and are started again

    @property
    def _serving(self) -> list[int]:
        return [rank for rank, state in enumerate(self._states) if state == "serving"]

    def _drain(self, rank: int) -> None:
        """A replica is to end once its requests have: send it no more."""
        if self._states[rank] in ("serving", "joining"):
            self._states[rank] = "draining"
            self.balancer.set_draining(rank)
            self._choose_exchange()
            logger.info("replica %d is being stopped: it gets no more requests", rank)
        self._let_go(rank)

    def _let_go(self, rank: int) -> None:
        """Let a replica that is to end go, once it has no request of this API server."""
        if self.clients[rank].is_draining and not self.balancer.num_requests(rank):
            with contextlib.suppress(EngineError):  # it has ended
                self.clients[rank].let_go()

    def _lose(self, rank: int, error: EngineDeadError) -> None:
        """A replica has ended: so have its requests. Another process will take its place."""
        was, self._states[rank] = self._states[rank], "down"
        if self.is_stopping or was == "loading":  # a failed start ends all
            return
        lost = self.balancer.set_down(rank)
        level = logging.ERROR if lost or was != "draining" else logging.INFO
        logger.log(level, "replica %d has ended with %d requests: %s", rank, len(lost), error)
        text = f"the engine's replica {rank}, which computed the request, has ended; send it again"
        may_retry = self._retries or was == "draining"  # the requests are not to blame for that
        self._fail(ReplicaLostError(text, may_retry=may_retry), lost)
        self._replace_client(rank)
        self._choose_exchange()
        self._spawn(self._join(rank))

    def _replace_client(self, rank: int) -> None:
        """Connect to the process that takes the place of one that has ended."""
        self.clients[rank].close()
        self._early_updates[rank] = []
        self.clients[rank] = self._new_client(rank, None)

    async def _join(self, rank: int) -> None:
        """Wait for the process that takes a replica's place, give it the state of the others, and send requests to it."""
        with contextlib.suppress(EngineDeadError):  # `_lose` goes on from there
            await self.clients[rank].ready()
            self._states[rank] = "joining"
            await self._bring_up_to_date(rank)
            if not self.clients[rank].is_draining:
                self._admit(rank)
                logger.info("replica %d serves", rank)

    async def _bring_up_to_date(self, rank: int) -> None:
        """Give a new process the adapters of another, and have it sleep or pause as that one does."""
        if not self._serving:
            return
        try:
            async with asyncio.timeout(JOIN_SECONDS):
                await self._copy_state(rank)
        except TimeoutError:
            logger.error("replica %d did not take over the state of the others within %g s", rank, JOIN_SECONDS)

    async def _copy_state(self, rank: int) -> None:
        call, other = partial(self._call_one, rank), partial(self._call_one, self._serving[0])
        try:
            if self.core.config.lora.enable_lora:
                for info in await other("list_adapters"):
                    await self._load_adapter(rank, info)
            if await other("is_paused"):
                await call("pause")
            if self.clients[self._serving[0]].sleep_level > 0:
                await call("sleep", self.clients[self._serving[0]].sleep_level)
        except EngineDeadError:
            raise
        except JaxLLMError as error:
            logger.error("replica %d does not have the state of the others: %s", rank, error)

    async def _load_adapter(self, rank: int, info: AdapterInfo) -> None:
        """Have one replica load an adapter, and wait for it. Raises AdapterError."""
        number: int | None = None
        with contextlib.suppress(InvalidRequestError):  # another API server is faster
            number = await self._call_one(rank, "add_adapter", info.name, info.path)
        while info.name not in {each.name for each in await self._call_one(rank, "list_adapters")}:
            if number is not None:
                state: AdapterState = await self._call_one(rank, "adapter_state", number)
                if state.state == "failed":
                    raise AdapterError(state.error)
            await asyncio.sleep(ADAPTER_POLL_SECONDS)

    def _admit(self, rank: int) -> None:
        """Send requests to a replica from now on."""
        self.balancer.set_up(rank)
        self._states[rank] = "serving"
        updates, self._early_updates[rank] = self._early_updates[rank], []
        for message in updates:
            self._take_update(rank, message)
        self._choose_exchange()
        if self.core.config.lora.enable_lora:
            self._spawn(self._note_adapters())

    def _choose_exchange(self) -> None:
        """Exchange metrics with the other API servers through the first replica that serves."""
        if self._listener is None or self.is_stopping:
            return
        rank = next(iter(self._serving), None)
        if self._exchange is not None:
            if rank == self._exchanges_with and self._exchange.client is self.clients[rank]:
                return
            self._old_metrics = self._exchange.metrics_of_others
            self._exchange.stop()
            self._exchange = None
        if rank is not None:
            self._exchange = MetricsExchange(self.clients[rank], self._listener.own_metrics)
            self._exchange.metrics_of_others = self._old_metrics
            self._exchanges_with = rank

    async def _watch_stalls(self) -> None:
        while True:
            await asyncio.sleep(STALL_POLL_SECONDS)
            for rank in self._serving:
                self._watch(rank)

    def _watch(self, rank: int) -> None:
        client = self.clients[rank]
        self.balancer.set_stalled(rank, client.stalled_seconds > STALL_SECONDS or client.stall is not None)

    # Control calls

    async def _call_one(self, rank: int, name: str, *arguments: Any) -> Any:
        return await self.clients[rank].call(messages.call_of(name, *arguments))

    async def _call_each(self, arguments: dict[int, tuple[Any, ...]], name: str) -> dict[int, Any]:
        """Call replicas with their arguments. Returns the answers of those that still serve."""
        calls = [self._call_one(rank, name, *given) for rank, given in arguments.items()]
        found = dict(zip(arguments, await asyncio.gather(*calls, return_exceptions=True), strict=True))
        serving = self._serving
        errors = {rank: error for rank, error in found.items() if isinstance(error, BaseException) and rank in serving}
        answers = {rank: answer for rank, answer in found.items() if not isinstance(answer, BaseException)}
        if errors:
            if name in UNDO:
                for rank in answers:
                    with contextlib.suppress(JaxLLMError):
                        await self._call_one(rank, *UNDO[name](*arguments[rank]))
            rank, error = next(iter(errors.items()))
            if len(errors) < len(found):
                logger.error("%s worked on some replicas, and not on replica %d: %s", name, rank, error)
            raise error
        if not answers:
            check_alive(self)
            raise EngineDeadError("the replicas ended before they answered")
        return answers

    async def _adapter_state(self, number: int) -> Any:
        given = self._adapter_numbers[number - 1]
        serving = {rank: (given[rank],) for rank in self._serving if rank in given}
        answers = await self._call_each(serving, "adapter_state")
        state = COMBINE["adapter_state"](list(answers.values()))
        if state.state == "ready":
            await self._note_adapters()
        return state

    async def _note_adapters(self) -> None:
        """Tell the balancer the adapters of each replica."""
        for rank in self._serving:
            with contextlib.suppress(EngineError):
                infos = await self._call_one(rank, "list_adapters")
                self.balancer.set_adapters(rank, {info.name: info.cache_key for info in infos})
                self._known_adapters.update(info.name for info in infos)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _settled(client: EngineClient) -> None:
    """Wait until an engine serves or has ended."""
    with contextlib.suppress(EngineDeadError):
        await client.ready()


class ReplicatedCore:
    """The cores of all replicas as one core."""

    def __init__(self, replicas: Replicas, ready: Ready, max_model_len: int):
        self.config = ready.config
        if (num_replicas := len(replicas.clients)) != self.config.parallel.data_parallel_size:  # those of its host
            self.config = self.config.replace(data_parallel_size=num_replicas)
        self.model_config = ready.model_config
        self.max_model_len = max_model_len
        self.processor_arguments: Mapping[str, int] = ready.processor_arguments
        self.kernels = ready.kernels
        self._replicas = replicas

    @property
    def num_compiled_after_warmup(self) -> int:
        return sum(count for _, count in self.loads())

    @property
    def sleep_level(self) -> int:
        return max(client.sleep_level for client in self._replicas.clients)

    def replica_of(self, request_id: str) -> int:
        return self._replicas.replica_of(request_id) or 0

    def stats(self) -> SchedulerStats:
        return total([stats for stats, _ in self.loads()])

    def loads(self) -> list[tuple[SchedulerStats, int]]:
        return [(client.stats, client.num_compiled_after_warmup) for client in self._replicas.clients]

    def add_request(self, request: EngineCoreRequest) -> None:
        self._replicas.add(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._replicas.abort(request_ids)

    def end_lease(self, transfer: KVTransfer) -> None:
        self._replicas.end_lease(transfer)

    def shutdown(self) -> None:
        self._replicas.shutdown()

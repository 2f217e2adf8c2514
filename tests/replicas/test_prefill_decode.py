"""Requests in two legs, over clients that record what they send: which engine gets what, and what follows when a leg fails."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jaxllm.cache_events import KEY_BYTES, CacheEvents
from jaxllm.config import EngineConfig
from jaxllm.engine.messages import Failed, Fault, Load, Outputs, Refused, Update
from jaxllm.errors import EngineDeadError, EngineError, InvalidRequestError, ReplicaLostError
from jaxllm.kv_transfer import KVTransfer
from jaxllm.outputs import EngineCoreOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.replicas import core
from jaxllm.replicas.prefill_decode import PrefillDecode
from jaxllm.request import EngineCoreRequest, ErrorKind, FinishReason, Grammar
from jaxllm.request_options import RequestOptions
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.scheduler.block_hash import hashes_of
from tests.routing.test_balancer import stats
from tests.test_kv_transfer import PULLED, TO_DECODE

LONG = list(range(100))
THRESHOLD = 40
BLOCK = 8


class FakeClient:
    """An engine process's client without a process."""

    def __init__(self, config: EngineConfig):
        self.name = "client-0-x"
        self.is_ready, self.is_draining = True, False
        self.dead_error: EngineDeadError | None = None
        self.stats, self.sleep_level, self.num_compiled_after_warmup = stats(), 0, 0
        self.status = self.stall = None
        self.stalled_seconds = self.tick_seconds = self.silent_seconds = 0.0
        self.long_work = ""
        self.sent: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.refuses: Exception | None = None
        self.let_gone = 0
        self.continued: list[tuple[str, list[int]]] = []
        self.ended_leases: list[KVTransfer] = []
        self.met: list[KVTransfer] = []
        self.prefill_address: KVTransfer | None = None
        self._ready = SimpleNamespace(config=config, model_config=None, max_model_len=1000, processor_arguments={}, kernels={})

    async def ready(self) -> Any:
        return self._ready

    def add(self, request: EngineCoreRequest) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.sent.append(request)

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    def continue_request(self, request_id: str, output_token_ids: Sequence[int]) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.continued.append((request_id, list(output_token_ids)))

    def end_lease(self, transfer: KVTransfer) -> None:
        self.ended_leases.append(transfer)

    def meet(self, transfer: KVTransfer) -> None:
        self.met.append(transfer)

    def let_go(self) -> None:
        self.let_gone += 1

    def call(self, call: Any) -> "asyncio.Future[Any]":
        return asyncio.get_running_loop().create_future()

    def close(self) -> None:
        pass


class Listener:
    """Records the outputs, errors and moves that callers would receive."""

    def __init__(self) -> None:
        self.outputs: list[EngineCoreOutput] = []
        self.refusals: list[tuple[str, Exception]] = []
        self.failures: list[tuple[Exception, list[str]]] = []
        self.moves: list[tuple[str, int, KVTransfer | None]] = []

    def take_outputs(self, outputs: Any) -> None:
        self.outputs += [output for output in outputs if not output.request_id.endswith("-prefill")]

    def take_refusal(self, request_id: str, error: Exception) -> None:
        self.refusals.append((request_id, error))

    def take_failure(self, error: Exception, request_ids: Any = None) -> None:
        if request_ids:
            self.failures.append((error, list(request_ids)))

    def take_move(self, request_id: str, replica: int, transfer: KVTransfer | None) -> None:
        self.moves.append((request_id, replica, transfer))

    def end(self) -> None:
        pass

    def own_metrics(self) -> list[Any]:
        return []


class Fleet:
    """Prefill engines 0 and 1, decode engines 2 and 3."""

    def __init__(self, core: PrefillDecode, clients: list[FakeClient], listener: Listener):
        self.core, self.clients, self.listener = core, clients, listener

    def load(self, rank: int, **fields: Any) -> None:
        sent = len(self.clients[rank].sent)
        self.clients[rank].on_update(Update(Load(stats(**fields), received={"client-0-x": sent})))  # type: ignore[attr-defined]

    def end(self, rank: int, request_id: str, reason: FinishReason = FinishReason.LENGTH, **fields: Any) -> None:
        output = EngineCoreOutput(request_id, [5], reason, **fields)
        load = Load(stats(), received={"client-0-x": len(self.clients[rank].sent)})
        self.clients[rank].on_outputs(Outputs([output], load))  # type: ignore[attr-defined]

    def tell_early(self, rank: int, request_id: str) -> None:
        """A prefill engine has computed the first blocks."""
        output = EngineCoreOutput(request_id, [], kv_transfer_params=TO_DECODE)
        load = Load(stats(), received={"client-0-x": len(self.clients[rank].sent)})
        self.clients[rank].on_outputs(Outputs([output], load))  # type: ignore[attr-defined]

    def begin(self, name: str, *, early: bool = True, **fields: Any) -> tuple[EngineCoreRequest, int]:
        """A request with a first leg at engine 0 that draws its first token and ends, and the rank of its decode engine."""
        request = request_of(name, list(LONG), **fields)
        self.core.add(request)
        assert f"{name}-prefill" == self.ids(0)[-1]
        if early:
            self.tell_early(0, f"{name}-prefill")
        self.end(0, f"{name}-prefill", kv_transfer_params=TO_DECODE)
        return request, next(rank for rank in (2, 3) if name in self.ids(rank))

    def told(self) -> list[tuple[str, list[int], FinishReason | None]]:
        """The outputs that callers have."""
        return [(each.request_id, each.new_token_ids, each.finish_reason) for each in self.listener.outputs]

    def is_idle(self) -> bool:
        """Whether nothing is known of any request."""
        known = (self.core.first_legs, self.core.second_legs)
        return not any(known) and not any(self.core.balancer.num_requests(rank) for rank in range(4))

    def ids(self, rank: int) -> list[str]:
        return [request.request_id for request in self.clients[rank].sent]


def with_fleet(test: Callable[[Fleet], Awaitable[None]], addresses: Sequence[KVTransfer] = (), **options: Any) -> None:
    async def main() -> None:
        config = EngineConfig.from_options(
            data_parallel_size=4,
            kv_role="prefill",
            kv_port=0,
            kv_offloading_size=1.0,
            enable_prefix_caching=True,
            block_size=BLOCK,
            max_num_seqs=8,
        )
        clients = [FakeClient(config) for _ in range(4)]
        for client, address in zip(clients, addresses, strict=False):
            client.prefill_address = address
        core = PrefillDecode(
            lambda rank, pid: clients[rank],  # type: ignore[arg-type, return-value]
            [1, 2, 3, 4],
            prefill_ranks=(0, 1),
            threshold=THRESHOLD,
            **options,
        )
        listener = Listener()
        await core.ready()
        core.start(listener)
        fleet = Fleet(core, clients, listener)
        for rank in range(4):
            fleet.load(rank)
        try:
            await test(fleet)
        finally:
            core.shutdown()

    asyncio.run(main())


def request_of(
    name: str, prompt: list[int] = LONG, *, options: Any = None, pooling: bool = False, **fields: Any
) -> EngineCoreRequest:
    params = {"max_tokens": 9, "seed": 7, "stop_token_ids": [3], "logprobs": 2, "temperature": 0.7, **fields}
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(**params),
        pooling_params=PoolingParams(task="embed") if pooling else None,
        eos_token_ids=(2,),
        options=RequestOptions(**(options or {})),
        grammar=Grammar("g"),
    )


def events_of(request: EngineCoreRequest) -> CacheEvents:
    """Events of an engine that has computed the prompt."""
    names = hashes_of(request.prompt_token_ids, BLOCK, "sha256", {})
    return CacheEvents(stored=b"".join(name[:KEY_BYTES] for name in names))


def test_a_long_prompt_runs_in_two_legs() -> None:
    async def test(fleet: Fleet) -> None:
        request = request_of("a", options={"priority": 3, "session_id": "s"})
        fleet.core.add(request)
        (first,) = fleet.clients[0].sent
        assert first.request_id == "a-prefill" and first.prompt_token_ids is LONG
        wanted = request.sampling_params.clone()
        wanted.max_tokens = 1
        assert first.sampling_params == wanted and (first.eos_token_ids, first.grammar) == ((2,), request.grammar)
        assert first.options == RequestOptions(priority=3, kv_transfer=KVTransfer(keep_for_decode=True, tells_early=True))
        assert fleet.core.core.replica_of("a") == 0

        fleet.load(2, cache_usage=0.5)
        fleet.end(0, "a-prefill", kv_transfer_params=TO_DECODE, num_cached_tokens=16, prefill_seconds=0.5)
        assert fleet.ids(2) == [] and fleet.ids(3) == ["a"]
        assert fleet.listener.outputs == [EngineCoreOutput("a", [5], num_cached_tokens=16, prefill_seconds=0.5)]
        (second,) = fleet.clients[3].sent
        transfer = replace(request.options, kv_transfer=PULLED)
        assert second == replace(request, options=transfer, output_token_ids=(5,)), (
            "all else as the caller wants it, so the answer is one engine's"
        )
        assert fleet.listener.moves == [("a", 3, PULLED)] and fleet.core.core.replica_of("a") == 3

        fleet.end(3, "a", FinishReason.STOP, num_cached_tokens=96)
        assert [output.request_id for output in fleet.listener.outputs] == ["a", "a"]
        assert fleet.is_idle()
        assert [fleet.core.balancer.num_requests(rank) for rank in range(4)] == [0] * 4

    with_fleet(test)


def test_clients_of_such_a_server_name_no_engines() -> None:
    async def test(fleet: Fleet) -> None:
        assert fleet.core.core.config.kv_transfer.kv_role is None
        for prompt in (LONG, LONG[:5]):
            with pytest.raises(InvalidRequestError, match="data_parallel_rank is 2.*leave it out"):
                fleet.core.add(request_of("a", prompt, options={"data_parallel_rank": 2}))
        assert not any(client.sent for client in fleet.clients)

    with_fleet(test)


def test_prefill_goes_where_the_fewest_uncached_tokens_are_queued() -> None:
    async def test(fleet: Fleet) -> None:
        fleet.load(0, num_queued_tokens=500)
        fleet.core.add(request_of("a"))
        assert fleet.ids(1) == ["a-prefill"]
        fleet.load(1, num_queued_tokens=400)
        fleet.clients[0].on_update(Update(Load(stats(num_queued_tokens=500)), events_of(request_of("x"))))  # type: ignore[attr-defined]
        fleet.core.add(request_of("b", list(LONG)))
        assert fleet.ids(0) == ["b-prefill"], "its cache has the prompt"

    with_fleet(test)


def test_what_needs_little_prefill_or_no_decode_runs_on_one_engine() -> None:
    async def test(fleet: Fleet) -> None:
        fleet.core.add(request_of("short", LONG[: THRESHOLD - 1]))
        fleet.core.add(request_of("scores", list(LONG), prompt_logprobs=1))
        fleet.core.add(request_of("fresh", list(LONG), skip_reading_prefix_cache=True))
        assert sorted(fleet.ids(2) + fleet.ids(3)) == ["fresh", "scores", "short"]
        fleet.core.add(request_of("vector", list(LONG), pooling=True))
        fleet.core.add(request_of("one", list(LONG), max_tokens=1))
        fleet.core.add(request_of("full", [*range(500), *range(499)]))
        assert sorted(fleet.ids(0) + fleet.ids(1)) == ["full", "one", "vector"], "there is room for one token"
        cached = CacheEvents(stored=events_of(request_of("x")).stored[: 8 * KEY_BYTES])  # 8 blocks
        fleet.clients[3].on_update(Update(Load(stats()), cached))  # type: ignore[attr-defined]
        fleet.core.add(request_of("known", list(LONG)))
        assert fleet.ids(3)[-1] == "known", "36 tokens are uncached there"
        fleet.core.add(request_of("longer", [*LONG, 1, 2, 3, 4]))
        assert "longer-prefill" in fleet.ids(0) + fleet.ids(1), "40 are"

    with_fleet(test)


def test_answers_to_one_prompt_share_the_first_leg_and_the_decode_engine() -> None:
    async def test(fleet: Fleet) -> None:
        for place in range(3):
            fleet.core.add(request_of(f"{place}_a", seed=place))
        assert fleet.ids(0) + fleet.ids(1) == ["0_a-prefill"]
        fleet.core.abort(["0_a"])
        assert not fleet.clients[0].aborted, "two others wait for it"
        fleet.end(0, "0_a-prefill", kv_transfer_params=TO_DECODE)
        assert {tuple(fleet.ids(2)), tuple(fleet.ids(3))} == {("1_a", "2_a"), ()}
        assert all(request.options.kv_transfer == PULLED for request in fleet.clients[2].sent + fleet.clients[3].sent)

    with_fleet(test)


@pytest.mark.parametrize("params", [None, {}])
def test_without_blocks_the_decode_engine_computes_the_prompt(params: Any) -> None:
    async def test(fleet: Fleet) -> None:
        request = request_of("a")
        fleet.core.add(request)
        fleet.end(0, "a-prefill", kv_transfer_params=params)
        assert [each for client in fleet.clients[2:] for each in client.sent] == [replace(request, output_token_ids=(5,))]

    with_fleet(test)


@pytest.mark.parametrize("cause", ["error", "refused", "failed step", "dead", "cannot send"])
def test_where_prefill_fails_the_decode_engine_computes_the_prompt(cause: str) -> None:
    async def test(fleet: Fleet) -> None:
        client: Any = fleet.clients[0]
        if cause == "cannot send":
            client.refuses = EngineDeadError("it has ended")
        request = request_of("a")
        fleet.core.add(request)
        if cause == "error":
            fleet.end(0, "a-prefill", FinishReason.ERROR, stop_reason="NaN", error_kind=ErrorKind.NOT_FINITE)
        elif cause == "refused":
            client.on_refused(Refused("a-prefill", Fault("overloaded", "the queue is full")))
        elif cause == "failed step":
            client.on_failed(Failed("a step failed"))
        elif cause == "dead":
            client.on_dead(EngineDeadError("killed"))
        assert [each for decode in fleet.clients[2:] for each in decode.sent] == [request]
        assert not fleet.listener.failures and not fleet.listener.refusals and not fleet.core.first_legs
        if cause == "dead":
            fleet.core.add(request_of("b", list(LONG)))
            assert fleet.ids(1) == ["b-prefill"]

    with_fleet(test)


@pytest.mark.parametrize("cause", ["error", "refused", "failed step", "dead", "cannot send"])
def test_with_the_policy_fail_the_error_of_a_first_leg_is_that_of_its_requests(cause: str) -> None:
    async def test(fleet: Fleet) -> None:
        client, listener = cast(Any, fleet.clients[0]), fleet.listener
        if cause == "cannot send":
            client.refuses = EngineDeadError("it has ended")
            with pytest.raises(EngineDeadError, match="it has ended"):
                fleet.core.add(request_of("a"))
        else:
            for request_id in ("a", "b"):
                fleet.core.add(request_of(request_id))
        if cause == "error":
            fleet.end(0, "a-prefill", FinishReason.ERROR, stop_reason="NaN", error_kind=ErrorKind.NOT_FINITE)
            assert [(each.request_id, each.error_kind) for each in listener.outputs] == [
                ("a", ErrorKind.NOT_FINITE),
                ("b", ErrorKind.NOT_FINITE),
            ]
        elif cause == "refused":
            client.on_refused(Refused("a-prefill", Fault("overloaded", "the queue is full")))
            assert [(request_id, str(error)) for request_id, error in listener.refusals] == [
                ("a", "the queue is full"),
                ("b", "the queue is full"),
            ]
        elif cause == "failed step":
            client.on_failed(Failed("a step failed"))
            assert [(str(error), ids) for error, ids in listener.failures] == [("a step failed", ["a", "b"])]
        elif cause == "dead":
            client.on_dead(EngineDeadError("killed"))
            ((error, ids),) = listener.failures
            assert isinstance(error, ReplicaLostError) and ids == ["a", "b"]
        assert not any(decode.sent for decode in fleet.clients[2:])
        assert not fleet.core.first_legs and not fleet.core.balancer.num_requests(0)
        client.refuses = None
        fleet.core.add(request_of("c", LONG[1:]))
        assert "c-prefill" in fleet.ids(0) + fleet.ids(1)

    with_fleet(test, load_failure_policy="fail")


def test_a_refusal_of_one_second_leg_sends_none_of_the_other_answers() -> None:
    async def test(fleet: Fleet) -> None:
        for place in range(3):
            fleet.core.add(request_of(f"{place}_a"))

        def refuse(request_id: str, error: Exception) -> None:  # as AsyncLLM does
            refused.append(request_id)
            fleet.core.abort([f"{place}_a" for place in range(3)])

        refused: list[str] = []
        fleet.listener.take_refusal = refuse  # type: ignore[method-assign]
        for rank in (2, 3):
            fleet.clients[rank].refuses = EngineError("full")
        fleet.end(0, "0_a-prefill", kv_transfer_params=TO_DECODE)
        assert refused == ["0_a"]
        assert not fleet.core.first_legs
        assert [fleet.core.balancer.num_requests(rank) for rank in range(4)] == [0] * 4

    with_fleet(test)


@pytest.mark.parametrize("kind", [ErrorKind.QUEUE_TIMEOUT, ErrorKind.TIMEOUT, ErrorKind.ADAPTER])
def test_a_request_whose_time_is_up_or_whose_adapter_is_gone_ends_with_its_first_leg(kind: ErrorKind) -> None:
    async def test(fleet: Fleet) -> None:
        for place in range(2):
            fleet.core.add(request_of(f"{place}_a"))
        fleet.end(0, "0_a-prefill", FinishReason.ERROR, stop_reason="too late", error_kind=kind)
        told = [(each.request_id, each.finish_reason, each.stop_reason, each.error_kind) for each in fleet.listener.outputs]
        assert told == [(f"{place}_a", FinishReason.ERROR, "too late", kind) for place in range(2)]
        assert not fleet.ids(2) + fleet.ids(3) and not fleet.core.first_legs

    with_fleet(test)


def test_an_aborted_first_leg_ends_its_request() -> None:
    async def test(fleet: Fleet) -> None:
        fleet.core.add(request_of("a"))
        fleet.end(0, "a-prefill", FinishReason.ABORT)  # e.g. by a pause
        assert [(each.request_id, each.finish_reason) for each in fleet.listener.outputs] == [("a", FinishReason.ABORT)]

    with_fleet(test)


def test_a_cancelled_request_is_aborted_at_the_engine_of_its_leg() -> None:
    async def test(fleet: Fleet) -> None:
        fleet.core.add(request_of("a"))
        fleet.core.abort(["a"])
        assert fleet.clients[0].aborted == ["a-prefill"]
        fleet.end(0, "a-prefill", kv_transfer_params=TO_DECODE)  # it was on its way
        assert not fleet.ids(2) + fleet.ids(3)
        fleet.core.add(request_of("b", list(LONG)))
        rank = next(rank for rank in (0, 1) if "b-prefill" in fleet.ids(rank))
        fleet.end(rank, "b-prefill", kv_transfer_params=TO_DECODE)
        decode = next(rank for rank in (2, 3) if fleet.ids(rank) == ["b"])
        fleet.core.abort(["b"])
        assert fleet.clients[decode].aborted == ["b"] and fleet.clients[rank].aborted in ([], ["a-prefill"])

    with_fleet(test)


def test_errors_of_the_second_leg_reach_the_caller() -> None:
    async def test(fleet: Fleet) -> None:
        def second_leg_of(name: str) -> int:
            fleet.core.add(request_of(name, list(LONG)))
            rank = next(rank for rank in (0, 1) if f"{name}-prefill" in fleet.ids(rank))
            fleet.end(rank, f"{name}-prefill", kv_transfer_params=TO_DECODE)
            return next(rank for rank in (2, 3) if name in fleet.ids(rank))

        rank = second_leg_of("a")
        fleet.clients[rank].on_refused(Refused("a", Fault("invalid", "never fits", "prompt")))  # type: ignore[attr-defined]
        ((name, error),) = fleet.listener.refusals
        assert name == "a" and isinstance(error, InvalidRequestError)
        rank = second_leg_of("b")
        fleet.clients[rank].on_dead(EngineDeadError("killed"))  # type: ignore[attr-defined]
        ((lost, ids),) = fleet.listener.failures
        assert isinstance(lost, ReplicaLostError) and ids == ["b"]
        other = 5 - rank
        assert second_leg_of("c") == other
        fleet.clients[other].refuses = EngineError("the engine process does not fetch its messages")
        with pytest.raises(StopIteration):
            second_leg_of("d")
        assert fleet.listener.refusals[-1][0] == "d"

    with_fleet(test)


def test_decode_engines_meet_prefill_engines_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "JOIN_SECONDS", 0.01)  # control calls have no answer
    first, second, third = (KVTransfer(remote_engine_id=name, host="127.0.0.1", port=1) for name in "abc")

    async def test(fleet: Fleet) -> None:
        met = [client.met for client in fleet.clients]
        assert met == [[], [], [first, second], [first, second]]
        fleet.clients[1].prefill_address = third  # that of the process in its place
        fleet.clients[1].on_dead(EngineDeadError("killed"))  # type: ignore[attr-defined]
        fleet.clients[3].on_dead(EngineDeadError("killed"))  # type: ignore[attr-defined]
        while fleet.core._states != ["serving"] * 4:
            await asyncio.sleep(0.001)
        assert met == [[], [], [first, second, third], [first, second, first, third]]

    with_fleet(test, addresses=[first, second])


@pytest.mark.parametrize("cause", ["refused", "cannot send", "dead", "aborted too late", "fetched", "aborted"])
def test_the_lease_of_a_second_leg_that_does_not_fetch_is_ended(cause: str) -> None:
    async def test(fleet: Fleet) -> None:
        fleet.core.add(request_of("a"))
        clients: list[Any] = list(fleet.clients)
        if cause == "aborted too late":  # the answer is on its way
            fleet.core.abort(["a"])
        if cause == "cannot send":
            clients[2].refuses = clients[3].refuses = EngineDeadError("it has ended")
        fleet.end(0, "a-prefill", kv_transfer_params=TO_DECODE)
        if cause in ("refused", "dead", "fetched", "aborted"):
            (decode,) = [client for client in clients[2:] if client.sent]
            assert not clients[0].ended_leases
        if cause == "refused":
            decode.on_refused(Refused("a", Fault("invalid", "no")))
        elif cause == "dead":
            decode.on_dead(EngineDeadError("killed"))
        elif cause == "fetched":
            decode.on_outputs(Outputs([EngineCoreOutput("a", [5])], Load(stats(), received={"client-0-x": 1})))
            decode.on_dead(EngineDeadError("killed"))
        elif cause == "aborted":  # the decode engine ends it
            fleet.core.abort(["a"])
        assert clients[0].ended_leases == ([] if cause in ("fetched", "aborted") else [PULLED])
        assert not any(client.ended_leases for client in clients[1:]) and not fleet.core.second_legs

    with_fleet(test)


def test_without_decode_engines_the_server_is_down_and_without_prefill_engines_it_is_not() -> None:
    async def test(fleet: Fleet) -> None:
        for rank in (0, 1):
            fleet.clients[rank].on_dead(EngineDeadError("killed"))  # type: ignore[attr-defined]
        fleet.core.add(request_of("a"))
        fleet.core.add(request_of("b", pooling=True))
        assert len(fleet.ids(2) + fleet.ids(3)) == 2 and fleet.core.dead_error is None

    with_fleet(test)

    async def test_decode(fleet: Fleet) -> None:
        fleet.core.add(request_of("a"))
        for rank in (2, 3):
            fleet.clients[rank].on_dead(EngineDeadError("killed"))  # type: ignore[attr-defined]
        with pytest.raises(EngineDeadError, match="no decode engine"):
            fleet.core.add(request_of("b", list(LONG)))
        assert "no decode engine" in str(fleet.core.dead_error)
        fleet.end(0, "a-prefill", kv_transfer_params=TO_DECODE)
        ((name, error),) = fleet.listener.refusals
        assert name == "a" and isinstance(error, EngineDeadError)

    with_fleet(test_decode)


def test_a_decode_engine_that_fetches_already_is_told_the_first_token() -> None:
    async def test(fleet: Fleet) -> None:
        for place in range(3):
            fleet.core.add(request_of(f"{place}_a", seed=place))
        fleet.tell_early(0, "0_a-prefill")
        (client,) = (client for client in fleet.clients[2:] if client.sent)
        assert [each.awaits_first_token for each in client.sent] == [True, False, False], "one seed draws one token"
        assert not fleet.listener.moves and not client.continued
        client.on_outputs(Outputs([EngineCoreOutput("2_a", [6])], Load(stats())))  # type: ignore[attr-defined]
        rank = fleet.clients.index(client)
        assert fleet.listener.moves == [("2_a", rank, PULLED)], "it was faster, and counts there"
        fleet.end(0, "0_a-prefill", kv_transfer_params=TO_DECODE)
        assert client.continued == [("0_a", [5])] and len(client.sent) == 3
        assert fleet.told() == [("2_a", [6], None), ("0_a", [5], None)]
        assert [name for name, *_ in fleet.listener.moves] == ["2_a", "0_a", "1_a"]
        fleet.core.abort(["0_a", "1_a", "2_a"])
        assert fleet.is_idle() and client.aborted == ["0_a", "1_a", "2_a"]

    with_fleet(test)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("cause", ["stop token", "stop string", "cancelled before"])
def test_a_request_that_ends_with_its_first_token_needs_no_decode_engine(cause: str, early: bool) -> None:
    async def test(fleet: Fleet) -> None:
        take_outputs = fleet.listener.take_outputs

        def end_by_text(outputs: Any) -> None:  # as AsyncLLM does
            take_outputs(outputs)
            if cause == "stop string":
                fleet.core.abort([output.request_id for output in outputs])

        fleet.listener.take_outputs = end_by_text  # type: ignore[method-assign]
        fleet.core.add(request_of("a"))
        if early:
            fleet.tell_early(0, "a-prefill")
        if cause == "cancelled before":
            fleet.core.abort(["a"])
        reason = FinishReason.STOP if cause == "stop token" else FinishReason.LENGTH
        fleet.end(0, "a-prefill", reason, kv_transfer_params=TO_DECODE, stop_reason=3 if cause == "stop token" else None)
        assert (
            fleet.told()
            == {
                "stop token": [("a", [5], FinishReason.STOP)],
                "stop string": [("a", [5], None)],
                "cancelled before": [],
            }[cause]
        )
        decodes = fleet.clients[2:]
        assert [name for client in decodes for name in client.aborted] == ["a"] * early
        assert early or not any(client.sent for client in decodes)
        assert not any(client.continued for client in decodes) and not fleet.listener.moves
        assert fleet.is_idle() and fleet.clients[0].ended_leases == [PULLED], "nobody fetches its blocks"

    with_fleet(test)


@pytest.mark.parametrize("cause", ["error", "failed step", "dead", "silent"])
def test_without_a_first_token_the_decode_engine_that_waits_for_it_draws_one(cause: str) -> None:
    async def test(fleet: Fleet) -> None:
        client: Any = fleet.clients[0]
        fleet.core.add(request_of("a"))
        fleet.tell_early(0, "a-prefill")
        if cause == "error":
            fleet.end(0, "a-prefill", FinishReason.ERROR, stop_reason="NaN", error_kind=ErrorKind.NOT_FINITE)
        elif cause == "failed step":
            client.on_failed(Failed("a step failed"))
        elif cause == "dead":
            client.on_dead(EngineDeadError("killed"))
        else:
            fleet.core.add(request_of("b", list(LONG)))
            client.silent_seconds = 9.0
            fleet.core._watch(0)
            assert not any(decode.continued for decode in fleet.clients[2:])
            client.silent_seconds = 11.0
            fleet.core._watch(0)
            assert client.aborted == ["a-prefill"] and "b-prefill" in fleet.core.first_legs, "nothing fetches of that one"
            fleet.end(0, "a-prefill", kv_transfer_params=TO_DECODE)  # it goes on after all
            assert client.ended_leases == [PULLED]
        assert [each for decode in fleet.clients[2:] for each in decode.continued] == [("a", [])]
        assert not fleet.listener.outputs and not fleet.core.second_legs.take_begun(["a"])

    with_fleet(test)


def test_a_decode_engine_that_cannot_be_told_the_first_token_ends_the_request() -> None:
    async def test(fleet: Fleet) -> None:
        for name in ("lost", "full"):
            fleet.core.add(request_of(name, list(LONG)))
            rank = next(rank for rank in (0, 1) if f"{name}-prefill" in fleet.ids(rank))
            fleet.tell_early(rank, f"{name}-prefill")
            (client,) = (client for client in fleet.clients[2:] if name in [each.request_id for each in client.sent])
            client.refuses = EngineDeadError("it has ended") if name == "lost" else EngineError("it fetches no messages")
            fleet.end(rank, f"{name}-prefill", kv_transfer_params=TO_DECODE)
            client.refuses = None
            if name == "lost":
                assert not fleet.listener.refusals, "that is told otherwise"
                client.on_dead(EngineDeadError("it has ended"))  # type: ignore[attr-defined]
                ((_, ids),) = fleet.listener.failures
                assert ids == ["lost"]
            else:
                ((request_id, _),) = fleet.listener.refusals
                assert request_id == "full" and client.aborted == ["full"]
        assert fleet.is_idle()

    with_fleet(test)


@pytest.mark.parametrize("early", [True, False])
def test_a_request_whose_first_token_was_passed_on_runs_again_behind_it(early: bool) -> None:
    async def test(fleet: Fleet) -> None:
        request, rank = fleet.begin("a", early=early)
        other = 5 - rank
        fleet.clients[rank].on_dead(EngineDeadError("killed"))  # type: ignore[attr-defined]
        assert not fleet.listener.failures and not fleet.core.second_legs
        leg = fleet.clients[0].sent[-1]
        assert leg.request_id == "a-prefill" and leg.output_token_ids == (), "it computes the prompt"
        fleet.end(0, "a-prefill", kv_transfer_params=TO_DECODE)
        assert len(fleet.listener.outputs) == 1, "the caller has the token"
        again = replace(request, options=replace(request.options, kv_transfer=PULLED), output_token_ids=(5,))
        assert fleet.clients[other].sent == [again] and fleet.listener.moves[-1] == ("a", other, PULLED)
        fleet.clients[other].on_dead(EngineDeadError("killed"))  # type: ignore[attr-defined]
        ((error, ids),) = fleet.listener.failures
        assert isinstance(error, ReplicaLostError) and ids == ["a"], "not a third time"
        assert fleet.is_idle()

    with_fleet(test, retries=True)


@pytest.mark.parametrize("cause", ["no retries", "a second token", "all at the end"])
def test_requests_that_do_not_run_again_behind_their_first_token(cause: str) -> None:
    async def test(fleet: Fleet) -> None:
        kind = RequestOutputKind.FINAL_ONLY if cause == "all at the end" else RequestOutputKind.DELTA
        _, rank = fleet.begin("a", output_kind=kind)
        if cause == "a second token":
            fleet.clients[rank].on_outputs(Outputs([EngineCoreOutput("a", [6])], Load(stats())))  # type: ignore[attr-defined]
        fleet.clients[rank].on_dead(EngineDeadError("killed"))  # type: ignore[attr-defined]
        ((error, ids),) = fleet.listener.failures
        assert isinstance(error, ReplicaLostError) and ids == ["a"] and error.may_retry == (cause != "no retries")
        assert len(fleet.ids(0)) == 1 and fleet.is_idle()

    with_fleet(test, retries=cause != "no retries")


def test_a_prefill_engine_that_drains_finishes_its_legs() -> None:
    async def test(fleet: Fleet) -> None:
        fleet.core.add(request_of("a"))
        client: Any = fleet.clients[0]
        client.is_draining = True
        client.on_draining()
        assert not client.let_gone
        fleet.core.add(request_of("b", list(LONG)))
        assert fleet.ids(1) == ["b-prefill"]
        fleet.end(0, "a-prefill", kv_transfer_params=TO_DECODE)
        assert client.let_gone and "a" in fleet.ids(2) + fleet.ids(3)

    with_fleet(test)

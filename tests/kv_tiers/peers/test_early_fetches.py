"""A decode engine fetches blocks while the prefill engine computes later ones. Tests decide when each engine makes a step."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.device_ops import GatherBlocks
from jaxllm.engine.fault_points import injected
from jaxllm.kv_tiers.peers import client
from jaxllm.kv_tiers.peers.leases import LEASE_SECONDS
from jaxllm.kv_transfer import KVTransfer, read_kv_transfer
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import EngineCoreRequest, ErrorKind, FinishReason, Request, RequestStatus
from jaxllm.runner.block_format import checksums
from jaxllm.sampling_params import SamplingParams
from tests.helpers.engines import make_core
from tests.helpers.waiting import wait_until
from tests.kv_tiers.peers.test_two_engines import DECODE, GREEDY, NUM_BLOCKS, PREFILL, Runner, make, prompt_of

CHUNKS = {"max_num_batched_tokens": 16, "token_buckets": (16,)}
"""A block a step."""
NUM_FULL = 6
"""Full blocks of a prompt."""
EARLY = KVTransfer(keep_for_decode=True, tells_early=True)
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, seed=0)


class Pair:
    """A prefill engine, whose steps the test makes, and decode engines."""

    def __init__(self) -> None:
        self.one = Runner(make_core("qwen3", shares_programs=True, num_gpu_blocks_override=NUM_BLOCKS))
        self.prefill, self.decode = Runner(make(**PREFILL, **CHUNKS)), Runner(make(**DECODE))
        self.failing = Runner(make(**DECODE, kv_load_failure_policy="fail"))
        self._seeds = itertools.count(1000)
        self.outputs: list[EngineCoreOutput] = []
        """Outputs of the decode engine."""

    @property
    def runners(self) -> tuple[Runner, ...]:
        return self.one, self.prefill, self.decode, self.failing

    def prompt(self) -> list[int]:
        """Six blocks and a part that no engine knows."""
        return prompt_of(16 * NUM_FULL + 4, next(self._seeds))

    def begin(self, prompt: list[int]) -> tuple[str, dict[str, Any]]:
        """Compute the first blocks. Returns the first leg's id, and what it told early."""
        leg = self.prefill.send(prompt, ONE_TOKEN, EARLY)
        told: list[EngineCoreOutput] = []
        while not told:
            told += self.step_prefill()
        (output,) = told
        assert (output.request_id, output.finish_reason, output.new_token_ids) == (leg, None, [])
        assert output.kv_transfer_params is not None
        return leg, output.kv_transfer_params

    def step_prefill(self) -> list[EngineCoreOutput]:
        """Have the prefill engine make a step, and wait for the copies that it began."""
        outputs, copies = self.prefill.core.step(), self.prefill.core.runner.op_runner(GatherBlocks)
        wait_until(lambda: len(copies._finished) == copies._num_under_way)
        return outputs

    def compute(self, num_blocks: int) -> None:
        """Have the prefill engine compute until it keeps so many blocks."""
        while self.num_stored() < num_blocks:
            assert not self.step_prefill()

    def num_stored(self) -> int:
        """Blocks that the prefill engine keeps for others and has told of."""
        return sum(len(lease.slots) for lease in self.leases._leases.values() if not lease.is_over)

    @property
    def leases(self) -> Any:
        return self.prefill.core._tiers[0]._leases  # type: ignore[attr-defined]

    def step_decode(self, runner: Runner, until: Callable[[], bool]) -> None:
        """Have the decode engine make steps until something holds."""

        def holds() -> bool:
            if runner.core.has_unfinished_requests():
                self.outputs += runner.core.step()
                runner.core.scheduler.check_integrity()
            return until()

        wait_until(holds)

    def is_idle(self) -> bool:
        """Whether nothing of a lease is left at both ends."""
        stores = [runner.core._tiers[0]._stores._stores[0] for runner in (self.decode, self.failing)]  # type: ignore[attr-defined]
        return all(lease.is_over for lease in self.leases._leases.values()) and not any(
            store._leases or store._following._awaiting or store._num_lent.total() for store in stores
        )


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    found = Pair()
    yield found
    for runner in found.runners:
        runner.core.shutdown()


def num_arrived(runner: Runner, prompt: list[int]) -> int:
    """Blocks of a prompt that the prefix cache of a decode engine has."""
    probe = Request(EngineCoreRequest(request_id="probe", prompt_token_ids=list(prompt), sampling_params=GREEDY))
    return runner.core.scheduler.num_cached_tokens(probe) // 16  # type: ignore[attr-defined]


@pytest.mark.parametrize("transport", ["shared memory", "tcp"])
def test_blocks_arrive_while_later_ones_are_computed(pair: Pair, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if transport == "tcp":
        monkeypatch.setattr(client, "socket_name", lambda engine_id: "\0jaxllm-nowhere")
        (store,) = pair.decode.core._tiers[0]._stores._stores  # type: ignore[attr-defined]
        for peer, _ in list(store._peers.values()):
            store._drop(peer)
    prompt = pair.prompt()
    leg, params = pair.begin(prompt)
    request_id = pair.decode.send(prompt, GREEDY, read_kv_transfer(params))
    request, events = pair.decode.core.scheduler.requests[request_id], []
    last: list[EngineCoreOutput] = []
    while not last:
        pair.step_decode(pair.decode, lambda: num_arrived(pair.decode, prompt) == pair.num_stored())
        assert request.status in (RequestStatus.WAITING, RequestStatus.WAITING_FOR_BLOCKS) and not pair.outputs
        events.append(pair.num_stored())
        last += pair.step_prefill()
    assert len(set(events)) >= 3 and 0 < max(events) < NUM_FULL, "blocks arrived before all were computed"
    assert last[0].request_id == leg and last[0].finish_reason is FinishReason.LENGTH
    assert last[0].kv_transfer_params == params, "what a router is told at the end has not changed"
    pair.prefill.finish()
    tokens, end = pair.decode.finish()[request_id]
    assert tokens == pair.one.run(prompt)[0] and end.num_cached_tokens == 16 * NUM_FULL
    assert pair.decode.loaded_tokens[request_id] == {"peer": 16 * NUM_FULL}
    wait_until(pair.is_idle)
    for runner in pair.runners:
        runner.core.check_integrity()


def test_a_prompt_that_no_router_asked_to_tell_of_early(pair: Pair) -> None:
    """The contract with other routers: one output, at the end."""
    pair.prefill.send(pair.prompt(), ONE_TOKEN, KVTransfer(keep_for_decode=True))
    outputs: list[EngineCoreOutput] = []
    while pair.prefill.core.has_unfinished_requests() or not outputs:
        outputs += pair.prefill.core.step()
    (output,) = outputs
    assert output.finish_reason is FinishReason.LENGTH and output.kv_transfer_params is not None
    assert not any("early" in key for key in output.kv_transfer_params)
    pair.leases.end_all()


def abort(pair: Pair, leg: str) -> None:
    pair.prefill.core.abort_requests([leg])


def fail_step(pair: Pair, leg: str) -> None:
    pair.prefill.core.loop.start_over()


def end_leases(pair: Pair, leg: str) -> None:
    pair.leases.end_all()


def expire(pair: Pair, leg: str) -> None:
    for lease in pair.leases._leases.values():
        lease.expires_at = 0.0


def close_connections(pair: Pair, leg: str) -> None:
    """As if it had ended."""
    for channel in [*pair.prefill.core._tiers[0]._server._guests]:  # type: ignore[attr-defined]
        channel.interrupt()
    pair.leases.end_all()


def find_wrong(pair: Pair, leg: str) -> None:
    """The prefill engine finds that the request computed NaN: all that it stored is wrong, and decode engines have some of it."""
    scheduler: Any = pair.prefill.core.scheduler
    scheduler.cache_manager.discard_computed(scheduler.requests[leg])
    scheduler.fail_requests([leg], ErrorKind.NOT_FINITE, "NaN")


def damage(pair: Pair, leg: str) -> None:
    """Bits of all slots flip, and what is stored later is right."""
    pair.prefill.core.runner.op_runner(GatherBlocks).arena.words[:, 0, 0] ^= 1


FAULTS: dict[str, Any] = {each.__name__: each for each in (abort, fail_step, end_leases, expire, close_connections, find_wrong)}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow
def test_what_does_not_come_is_computed_or_fails(pair: Pair, fault: str) -> None:
    """The rest of a prompt is computed from the last block that arrived, or the request ends with an error."""
    for decode in (pair.decode, pair.failing):
        pair.outputs.clear()
        prompt = pair.prompt()
        leg, params = pair.begin(prompt)
        request_id = decode.send(prompt, GREEDY, read_kv_transfer(params))
        pair.compute(2)
        pair.step_decode(decode, lambda decode=decode, prompt=prompt: num_arrived(decode, prompt) == 2)  # type: ignore[misc]
        FAULTS[fault](pair, leg)
        pair.prefill.core.step()
        tokens, last = decode.finish()[request_id]
        assert not pair.outputs
        if decode is pair.decode:
            assert tokens == pair.one.run(prompt)[0]
            assert last.num_cached_tokens == 0 if fault == "find_wrong" else 32 <= last.num_cached_tokens < 16 * NUM_FULL
        else:
            assert last.finish_reason is FinishReason.ERROR and last.error_kind is ErrorKind.KV_TRANSFER
            assert fault != "find_wrong" or num_arrived(decode, prompt) == 0
        pair.prefill.finish()
        wait_until(pair.is_idle)
        for runner in pair.runners:
            runner.core.check_integrity()


def poison(pair: Pair) -> None:
    """Contents of the prefill engine are NaN, with right checksums: it computed them so."""
    arena = pair.prefill.core.runner.op_runner(GatherBlocks).arena
    for slot in [slot for lease in pair.leases._leases.values() if not lease.is_over for slot in lease.slots.values()]:
        arena.words[slot] = 0x7FC07FC0
        words_Hw = jnp.asarray(arena.words[slot].reshape(arena.sums.shape[2], -1))
        arena.sums[slot] = np.asarray(checksums(words_Hw[None]))


def test_nan_of_which_a_lost_prefill_engine_cannot_tell(pair: Pair) -> None:
    """It ends when the decode engine has some of it. The answer is right, and so is that of whoever asks again."""
    for decode in (pair.decode, pair.failing):
        prompt = pair.prompt()
        leg, params = pair.begin(prompt)
        request_id = decode.send(prompt, GREEDY, read_kv_transfer(params))
        pair.compute(2)
        poison(pair)
        pair.step_decode(decode, lambda decode=decode, prompt=prompt: num_arrived(decode, prompt) == 2)  # type: ignore[misc]
        close_connections(pair, leg)
        find_wrong(pair, leg)
        tokens, last = decode.finish()[request_id]
        wanted = pair.one.run(prompt)[0]
        if decode is pair.decode:
            assert tokens == wanted and last.num_cached_tokens == 0
        else:
            assert last.error_kind is ErrorKind.KV_TRANSFER
        assert decode.run(prompt)[0] == wanted
        pair.prefill.finish()
        wait_until(pair.is_idle)
        for runner in pair.runners:
            runner.core.check_integrity()


def test_a_request_waits_for_its_first_token_and_computes_what_does_not_come(pair: Pair) -> None:
    """Even NaN: it begins anew, behind its first token."""
    prompt = pair.prompt()
    leg, params = pair.begin(prompt)
    request_id = pair.decode.send(prompt, GREEDY, read_kv_transfer(params), awaits_first_token=True)
    pair.compute(2)
    poison(pair)
    pair.step_decode(pair.decode, lambda: num_arrived(pair.decode, prompt) == 2)
    close_connections(pair, leg)
    find_wrong(pair, leg)
    wait_until(pair.is_idle)
    for _ in range(20):
        assert not pair.decode.core.step(), "it draws none itself"
    wanted = pair.one.run(prompt)[0]
    for other in ("unknown", request_id, request_id):  # the last comes too late
        pair.decode.core.continue_request(other, wanted[:1])
    tokens, last = pair.decode.finish()[request_id]
    assert tokens == wanted[1:] and last.num_cached_tokens == 0
    pair.prefill.finish()
    for runner in pair.runners:
        runner.core.check_integrity()


@pytest.mark.parametrize("fault", [poison, lambda pair: damage(pair, "")], ids=["NaN", "bits"])
def test_wrong_blocks_of_a_prompt_that_is_computed_are_replaced_or_fail(pair: Pair, fault: Callable[[Pair], None]) -> None:
    """All come after the prefill engine has ended its part, and as it wrote them."""
    for decode in (pair.decode, pair.failing):
        prompt = pair.prompt()
        params = pair.prefill.prefill(prompt)
        fault(pair)
        tokens, last = decode.decode(prompt, params)
        wanted = pair.one.run(prompt)[0]
        if decode is pair.decode:
            assert tokens == wanted and last.num_cached_tokens == 0
        else:
            assert not tokens and last.finish_reason is FinishReason.ERROR
        assert decode.run(prompt)[0] == wanted, "what was wrong is found again"
        wait_until(pair.is_idle)
        pair.prefill.core.reset_prefix_cache()


def test_a_damaged_block_is_computed(pair: Pair) -> None:
    prompt = pair.prompt()
    leg, params = pair.begin(prompt)
    pair.compute(1)
    damage(pair, leg)
    num_damaged = pair.decode.core.stats().num_damaged_blocks
    request_id = pair.decode.send(prompt, GREEDY, read_kv_transfer(params))
    tokens, last = pair.decode.finish()[request_id]
    assert tokens == pair.one.run(prompt)[0] and last.num_cached_tokens == 0
    assert pair.decode.core.stats().num_damaged_blocks > num_damaged
    damage(pair, leg)
    pair.prefill.finish()
    wait_until(pair.is_idle)


@pytest.mark.parametrize("whose", ["prefill", "decode"])
def test_a_cancelled_request_leaves_nothing(pair: Pair, whose: str) -> None:
    """A router aborts both legs, in any order."""
    pair.outputs.clear()
    prompt = pair.prompt()
    leg, params = pair.begin(prompt)
    request_id = pair.decode.send(prompt, GREEDY, read_kv_transfer(params))
    pair.compute(1)
    pair.step_decode(pair.decode, lambda: num_arrived(pair.decode, prompt) == 1)
    legs = [(pair.prefill, leg), (pair.decode, request_id)]
    for runner, each in legs if whose == "prefill" else legs[::-1]:
        runner.core.abort_requests([each])
        assert not runner.finish()
    wait_until(pair.is_idle)
    for runner in pair.runners:
        runner.core.check_integrity()


def test_a_lease_that_nobody_wants_is_not_kept_when_its_prompt_is_computed(pair: Pair) -> None:
    prompt = pair.prompt()
    leg, params = pair.begin(prompt)
    transfer = read_kv_transfer(params)
    assert transfer is not None
    pair.prefill.core.end_lease(transfer)
    assert pair.prefill.finish()[leg][1].kv_transfer_params is None
    assert pair.is_idle()


@pytest.mark.parametrize("when", ["a chunk is computed", "all is computed"])
def test_a_prompt_that_nobody_asks_for_is_kept_for_a_while(pair: Pair, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its API server ended between the legs, so that the engine ended what it had of it."""
    prompt = pair.prompt()
    leg, params = pair.begin(prompt)
    if when == "a chunk is computed":
        pair.compute(2)
        pair.prefill.core.abort_requests([leg])
    pair.prefill.finish()
    (tier,), num_expired = pair.prefill.core._tiers, pair.prefill.core.stats().num_expired_kv_leases
    assert 2 <= pair.num_stored() <= NUM_FULL and pair.prefill.core.stats().num_kv_leases == 1
    clock = pair.leases._clock
    monkeypatch.setattr(pair.leases, "_clock", lambda: clock() + LEASE_SECONDS)
    stats = pair.prefill.core.stats()  # of an engine without work
    assert stats.num_kv_leases == 0 and stats.num_expired_kv_leases == num_expired + 1
    pair.prefill.run(prompt_of(5), ONE_TOKEN)
    assert not pair.leases._leases and not tier._held and not tier._announced  # type: ignore[attr-defined]
    assert pair.prefill.core.stats().num_expired_kv_leases == num_expired + 1
    pair.prefill.core.check_integrity()
    tokens, last = pair.decode.decode(prompt, params)  # another API server is late
    assert tokens == pair.one.run(prompt)[0] and last.num_cached_tokens == 0
    assert pair.is_idle()


def test_a_prefill_engine_that_stores_nothing_more_is_not_awaited(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it computes there is no limit; once it has, kv_pull_timeout is that of what it has yet to store."""
    prompt = pair.prompt()
    leg, params = pair.begin(prompt)
    request_id = pair.decode.send(prompt, GREEDY, read_kv_transfer(params))
    pair.compute(1)
    pair.step_decode(pair.decode, lambda: num_arrived(pair.decode, prompt) == 1)
    store = pair.decode.core._tiers[0]._stores._stores[0]  # type: ignore[attr-defined]
    monkeypatch.setattr(store, "_timeout", 0.0)
    for _ in range(3):
        pair.decode.core.step()
    assert pair.decode.core.scheduler.requests[request_id].status is RequestStatus.WAITING_FOR_BLOCKS
    (lease,) = [lease for lease in pair.leases._leases.values() if not lease.is_over]
    pair.leases.end_computing(lease)
    tokens, last = pair.decode.finish()[request_id]
    assert tokens == pair.one.run(prompt)[0] and 16 <= last.num_cached_tokens < 16 * NUM_FULL
    pair.prefill.finish()
    wait_until(pair.is_idle)


def test_a_connection_that_fails_while_it_waits_for_more(pair: Pair) -> None:
    prompt = pair.prompt()
    _, params = pair.begin(prompt)
    with injected("kv.follow:2:error"):
        request_id = pair.decode.send(prompt, GREEDY, read_kv_transfer(params))
        tokens, last = pair.decode.finish()[request_id]
    assert tokens == pair.one.run(prompt)[0] and last.num_cached_tokens < 16 * NUM_FULL
    pair.prefill.finish()
    pair.leases.end_all()  # behind a connection that was lost they are kept for a while
    wait_until(pair.is_idle)


def test_several_prompts_at_once(pair: Pair) -> None:
    prompts = [pair.prompt(), pair.prompt()]
    legs = [pair.prefill.send(prompt, ONE_TOKEN, EARLY) for prompt in prompts]
    ids: dict[str, str] = {}
    while pair.prefill.core.has_unfinished_requests():
        for output in pair.step_prefill():
            if output.finish_reason is None:
                prompt = prompts[legs.index(output.request_id)]
                ids[output.request_id] = pair.decode.send(prompt, GREEDY, read_kv_transfer(output.kv_transfer_params))
    found = pair.decode.finish()
    for prompt, leg in zip(prompts, legs, strict=True):
        request_id = ids[leg]
        tokens, last = found[request_id]
        assert tokens == pair.one.run(prompt)[0] and last.num_cached_tokens == 16 * NUM_FULL
    wait_until(pair.is_idle)

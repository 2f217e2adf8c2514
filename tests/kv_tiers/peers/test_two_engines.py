"""A prompt computed in one engine and continued in another: the tokens are those of one engine."""

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from jaxllm.device_ops import GatherBlocks
from jaxllm.engine.core import EngineCore
from jaxllm.engine.fault_points import injected
from jaxllm.errors import InvalidRequestError
from jaxllm.kv_tiers.peers import client
from jaxllm.kv_tiers.peers.prefill_tier import PrefillTier
from jaxllm.kv_transfer import KVTransfer, read_kv_transfer
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import EngineCoreRequest
from jaxllm.request_options import RequestOptions
from jaxllm.sampling_params import SamplingParams
from tests.helpers.engines import make_core
from tests.helpers.fake_copies import AlwaysWorth
from tests.helpers.waiting import wait_until

NUM_BLOCKS = 40
PREFILL = {"kv_role": "prefill", "kv_port": 0}
DECODE = {"kv_role": "decode", "kv_pull_timeout": 5.0}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, seed=0)
SEEDED = SamplingParams(temperature=1.0, max_tokens=8, seed=7)


def make(name: str = "qwen3", **options: Any) -> EngineCore:
    """An engine to which loading is always worth its time, however small the model and slow the machine."""
    options = {"kv_offloading_size": 0.02, "num_gpu_blocks_override": NUM_BLOCKS, **options}
    core = make_core(name, shares_programs=True, **options)
    core._tiers[0]._worth = AlwaysWorth()  # type: ignore[attr-defined]
    return core


def prompt_of(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(60) for _ in range(count)]


class Runner:
    """Runs requests of one engine."""

    def __init__(self, core: EngineCore):
        self.core = core
        self.num_sent = 0
        self.loaded_tokens: dict[str, dict[str, int] | None] = {}
        """Where the tokens of prompts came from, by request."""

    def send(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        transfer: KVTransfer | None = None,
        *,
        output_token_ids: tuple[int, ...] = (),
        awaits_first_token: bool = False,
        **options: Any,
    ) -> str:
        self.num_sent += 1
        request_id = f"r{self.num_sent}"
        self.core.add_request(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=list(prompt),
                sampling_params=params,
                options=RequestOptions(kv_transfer=transfer, **options),
                output_token_ids=output_token_ids,
                awaits_first_token=awaits_first_token,
            )
        )
        return request_id

    def finish(self) -> dict[str, tuple[list[int], EngineCoreOutput]]:
        """The tokens and the last output of each request."""
        tokens: dict[str, list[int]] = {}
        last: dict[str, EngineCoreOutput] = {}
        deadline = time.monotonic() + 60.0
        while self.core.has_unfinished_requests():
            assert time.monotonic() < deadline
            for output in self.core.step():
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                self.loaded_tokens.setdefault(output.request_id, output.loaded_tokens)
                last[output.request_id] = output
            self.core.scheduler.check_integrity()
        return {request_id: (tokens[request_id], last[request_id]) for request_id in tokens}

    def run(
        self, prompt: Sequence[int], params: SamplingParams = GREEDY, transfer: KVTransfer | None = None, **options: Any
    ) -> Any:
        request_id = self.send(prompt, params, transfer, **options)
        return self.finish()[request_id]

    def prefill(self, prompt: Sequence[int], params: SamplingParams = GREEDY, **options: Any) -> dict[str, Any] | None:
        """Compute a prompt on a prefill engine, and return the `kv_transfer_params` of its answer."""
        one = SamplingParams(temperature=params.temperature, seed=params.seed, max_tokens=1)
        _, last = self.run(prompt, one, KVTransfer(keep_for_decode=True), **options)
        return last.kv_transfer_params

    def decode(self, prompt: Sequence[int], answer: Any, params: SamplingParams = GREEDY, **options: Any) -> Any:
        return self.run(prompt, params, read_kv_transfer(answer), **options)


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Runner, Runner, Runner]]:
    """One that computes all, one of each role."""
    one = make_core("qwen3", shares_programs=True, num_gpu_blocks_override=NUM_BLOCKS)
    cores = one, make(**PREFILL), make(**DECODE)
    yield tuple(map(Runner, cores))
    for core in cores:
        core.shutdown()


@pytest.fixture(autouse=True)
def no_leases(request: pytest.FixtureRequest) -> None:
    """Leases of earlier tests are over."""
    if "engines" in request.fixturenames:
        leases_of(request.getfixturevalue("engines")[1]).end_all()


@pytest.fixture(params=["shared memory", "tcp"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "tcp":
        monkeypatch.setattr(client, "socket_name", lambda engine_id: "\0jaxllm-nowhere")
    if "engines" in request.fixturenames:  # earlier tests may have left a connection of the other kind
        drop_peers(request.getfixturevalue("engines")[2])
    return str(request.param)


def leases_of(runner: Runner) -> Any:
    (tier,) = runner.core._tiers
    assert isinstance(tier, PrefillTier)
    return tier._leases


def drop_peers(runner: Runner) -> None:
    """Have a decode engine connect again."""
    (store,) = runner.core._tiers[0]._stores._stores
    with store._lock:
        for peer, _ in list(store._peers.values()):
            store._drop(peer)


def have_ended(runner: Runner) -> bool:
    """Whether all leases of a prefill engine are over."""
    return all(lease.is_over for lease in leases_of(runner)._leases.values())


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_tokens_are_those_of_one_engine(engines: Any, transport: str, params: SamplingParams) -> None:
    one, prefill, decode = engines
    for core in (prefill.core, decode.core):
        assert core.reset_prefix_cache()
    for count, seed in ((95, 0), (64, 1), (80, 2), (79, 3)):
        prompt = prompt_of(count, seed + 100 * (params is SEEDED) + 1000 * (transport == "tcp"))
        wanted, _ = one.run(prompt, params)
        answer = prefill.prefill(prompt, params)
        assert answer is not None and len(answer["remote_block_ids"][0]) == count // 16
        tokens, last = decode.decode(prompt, answer, params)
        assert tokens == wanted
        assert last.num_cached_tokens == count // 16 * 16
        assert decode.loaded_tokens[last.request_id] == {"peer": last.num_cached_tokens}
    wait_until(lambda: have_ended(prefill))
    assert prefill.prefill(prompt_of(10)) is None, "there is no full block"
    assert len(leases_of(prefill)) == 0, "the slots of leases that are over are free"
    for each in (prefill, decode):
        each.core.check_integrity()


def test_a_prompt_computed_in_chunks_and_found_in_the_cache(engines: Any, transport: str) -> None:
    one, prefill, decode = engines
    begin = prompt_of(64, 5 + (transport == "tcp"))
    first = prefill.prefill(begin)
    prompt = begin + prompt_of(30, 77)
    answer = prefill.prefill(prompt)  # four blocks are in the pool already
    assert answer["remote_prefill_cached_tokens"] == 64 and len(answer["remote_block_ids"][0]) == 5
    for given, each in ((prompt, answer), (begin, first)):
        tokens, last = decode.decode(given, each)
        assert tokens == one.run(given)[0]
        assert last.num_cached_tokens == len(given) // 16 * 16


def test_answers_of_one_prompt_share_a_lease(engines: Any) -> None:
    one, prefill, decode = engines
    prompt = prompt_of(90, 9)
    answer = read_kv_transfer(prefill.prefill(prompt))
    ids = [decode.send(prompt, SamplingParams(temperature=1.0, seed=seed, max_tokens=8), answer) for seed in range(3)]
    found = decode.finish()
    for seed, request_id in enumerate(ids):
        wanted, _ = one.run(prompt, SamplingParams(temperature=1.0, seed=seed, max_tokens=8))
        assert found[request_id][0] == wanted
        assert found[request_id][1].num_cached_tokens == 80
    wait_until(lambda: have_ended(prefill))
    decode.core.check_integrity()


def test_another_prompt_is_computed(engines: Any) -> None:
    one, prefill, decode = engines
    answer = prefill.prefill(prompt_of(90, 11))
    for other, num_cached in ((prompt_of(90, 12), 0), (prompt_of(90, 11)[:70] + [3] * 20, 64)):
        tokens, last = decode.decode(other, answer)
        assert tokens == one.run(other)[0] and last.num_cached_tokens == num_cached
        answer = prefill.prefill(prompt_of(90, 11))
    tokens, last = decode.decode(prompt_of(90, 11), answer, cache_salt="of another user")
    assert last.num_cached_tokens == 0


@pytest.mark.parametrize(
    "change",
    [
        {"remote_request_id": "0" * 32},
        {"remote_engine_id": "another"},
        {"remote_port": 1},
        {"remote_host": "169.254.169.254"},
        {"remote_host": "no-such-host.invalid"},
    ],
    ids=str,
)
def test_what_cannot_be_fetched_is_computed(engines: Any, transport: str, change: dict[str, Any]) -> None:
    if transport != "tcp" and "remote_port" in change:
        pytest.skip("processes of one host find each other without a port")
    one, prefill, decode = engines
    prompt = prompt_of(90, 61 + len(str(change)) + 100 * (transport == "tcp"))
    answer = prefill.prefill(prompt)
    tokens, last = decode.decode(prompt, {**answer, **change})
    assert tokens == one.run(prompt)[0] and last.num_cached_tokens == 0
    decode.core.check_integrity()


def test_requests_that_wait_for_a_prefill_engine_hold_up_nobody(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, prefill, decode = engines
    is_let_go = threading.Event()
    attach = client.Connection.attach
    monkeypatch.setattr(client.Connection, "attach", lambda self, lease: is_let_go.wait(10.0) and attach(self, lease))
    prompt, other = prompt_of(90, 21), prompt_of(40, 22)
    waiting = decode.send(prompt, GREEDY, read_kv_transfer(prefill.prefill(prompt)))
    running = decode.send(other, GREEDY)
    tokens: dict[str, list[int]] = {waiting: [], running: []}
    while decode.core.has_unfinished_requests():
        for output in decode.core.step():
            tokens[output.request_id] += output.new_token_ids
        if len(tokens[running]) == 8:
            assert is_let_go.is_set() or not tokens[waiting]
            is_let_go.set()
    assert tokens == {waiting: one.run(prompt)[0], running: one.run(other)[0]}


@pytest.mark.parametrize("when", ["attaching", "loading"])
def test_aborted_requests_leave_nothing(engines: Any, when: str) -> None:
    one, prefill, decode = engines
    prompt = prompt_of(90, 31 + len(when))
    request_id = decode.send(prompt, GREEDY, read_kv_transfer(prefill.prefill(prompt)))
    if when == "loading":
        request = decode.core.scheduler.requests[request_id]
        wait_until(lambda: bool(decode.core.step()) or request.status.name == "WAITING_FOR_BLOCKS")
    decode.core.abort_requests([request_id])
    decode.finish()
    wait_until(lambda: have_ended(prefill))
    assert decode.run(prompt)[0] == one.run(prompt)[0]
    decode.core.check_integrity()


def test_requests_that_are_not_queued_end_their_leases(engines: Any, transport: str) -> None:
    """Requests that the engine refuses, that are aborted while it is paused, and that its server refuses."""
    _, prefill, decode = engines
    answer = read_kv_transfer(prefill.prefill(prompt_of(90, 36)))
    with pytest.raises(InvalidRequestError):
        decode.send(prompt_of(90, 36), GREEDY, answer, adapter="unknown")
    wait_until(lambda: have_ended(prefill))

    answer = read_kv_transfer(prefill.prefill(prompt_of(90, 37)))
    decode.core.pause("wait")
    request_id = decode.send(prompt_of(90, 37), GREEDY, answer)
    assert not have_ended(prefill)
    decode.core.abort_requests([request_id])
    wait_until(lambda: have_ended(prefill))
    decode.core.resume()

    answer = read_kv_transfer(prefill.prefill(prompt_of(90, 38)))
    assert answer is not None
    waiting = decode.send(prompt_of(90, 38), GREEDY, answer)
    decode.core.end_lease(answer)  # another request has it
    decode.core.abort_requests([waiting])
    wait_until(lambda: have_ended(prefill))
    for core in (decode.core, prefill.core):
        answer = read_kv_transfer(prefill.prefill(prompt_of(90, 39)))
        assert answer is not None
        core.end_lease(answer)
        wait_until(lambda: have_ended(prefill))
    decode.core.end_lease(msgspec.structs.replace(answer, host="10.0.0.1", remote_engine_id="elsewhere"))  # not among its peers
    decode.core.check_integrity()


def test_leases_keep_half_of_host_memory(engines: Any) -> None:
    _, prefill, _ = engines
    most = leases_of(prefill).max_blocks
    assert most == prefill.core.stats().num_host_slots // 2
    leases_of(prefill).max_blocks = 7
    try:
        assert prefill.prefill(prompt_of(80, 41)) is not None
        assert prefill.prefill(prompt_of(80, 42)) is None
    finally:
        leases_of(prefill).max_blocks = most
        leases_of(prefill).end_all()


def test_a_failed_step_of_the_prefill_engine(engines: Any) -> None:
    """Contents that were ready stay ready; contents that were being stored may be lost."""
    one, prefill, decode = engines
    prompt = prompt_of(90, 51)
    answer = prefill.prefill(prompt)
    prefill.core.loop.start_over()
    prefill.core.scheduler.check_integrity()
    assert not prefill.core.has_unfinished_requests()
    tokens, last = decode.decode(prompt, answer)
    assert tokens == one.run(prompt)[0]
    assert prefill.core.reset_prefix_cache()
    again = prefill.prefill(prompt)
    assert again["remote_prefill_cached_tokens"] == 0
    assert prefill.core.reset_prefix_cache(), "it drops what is kept too"
    other = prompt_of(90, 52)
    assert decode.decode(other, again)[0] == one.run(other)[0]


@pytest.mark.parametrize("fault", ["kv.hello:1-:error", "kv.pull:1:error", "kv.receive:2:corrupt", "kv.pull:1:hang=0.2"])
def test_injected_faults(engines: Any, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "socket_name", lambda engine_id: "\0jaxllm-nowhere")
    one, prefill, decode = engines
    drop_peers(decode)
    num_damaged = decode.core.stats().num_damaged_blocks
    prompt = prompt_of(90, 71 + len(fault))
    answer = prefill.prefill(prompt)
    with injected(fault):
        tokens, last = decode.decode(prompt, answer)
    assert tokens == one.run(prompt)[0]
    if "corrupt" not in fault:
        # Blocks before the one whose pull fails may have arrived.
        assert last.num_cached_tokens == 80 if "hang" in fault else last.num_cached_tokens < 80
    else:
        assert decode.core.stats().num_damaged_blocks == num_damaged + 1
    decode.core.check_integrity()


@pytest.mark.parametrize("fault", ["", "kv.locate:1:error", "kv.locate:1:hang=0.2", "damaged"])
def test_devices_read_the_memory_of_a_prefill_engine_where_it_is(engines: Any, fault: str) -> None:
    one, prefill, decode = engines
    (tier,) = decode.core._tiers
    (store,) = tier._stores._stores
    for core in (prefill.core, decode.core):
        assert core.reset_prefix_cache()
    first = prompt_of(90, 81 + len(fault))
    decode.decode(first, prefill.prefill(first))  # connects
    (peer,) = [peer for peer, _ in store._peers.values()]
    wait_until(lambda: peer.region is not None)
    prompt = prompt_of(90, 181 + len(fault))
    answer, num_slots = prefill.prefill(prompt), len(tier.contents)
    num_damaged = decode.core.stats().num_damaged_blocks
    if is_damaged := fault == "damaged":
        prefill.core.runner.op_runner(GatherBlocks).arena.words[:, 0, 0] ^= 1
        fault = ""
    with injected(fault or "kv.pull:1-:error"):
        tokens, last = decode.decode(prompt, answer)
    assert tokens == one.run(prompt)[0]
    if is_damaged:
        assert decode.core.stats().num_damaged_blocks > num_damaged
    elif not fault or "hang" in fault:
        assert last.num_cached_tokens == 80 and len(tier.contents) == num_slots, "they take no host memory here"
        assert decode.loaded_tokens[last.request_id] == {"peer": 80}
    assert not store._num_lent.total()
    decode.core.check_integrity()
    region, regions = peer.region, decode.core.runner.op_runner(GatherBlocks).arena.regions
    assert region is None or not regions[region]._num_lent.total()
    store._drop(peer)
    wait_until(lambda: peer.has_ended)
    peer.join()
    assert region not in regions


def test_engines_without_a_role_import_no_peers() -> None:
    code = "import sys, jaxllm.kv_tiers, jaxllm.engine.features; assert not [n for n in sys.modules if 'kv_tiers.peers' in n]"
    subprocess.run([sys.executable, "-c", code], check=True)

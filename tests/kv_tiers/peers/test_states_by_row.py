"""Two engines of a model whose layers keep a state by row: the prompt's states come with its blocks, or all of it is computed.

On other numbers of devices states have the same bytes: tests/runner/test_state_copies.py.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.engine.fault_points import injected
from jaxllm.kv_tiers.peers import client
from jaxllm.kv_transfer import KVTransfer, read_kv_transfer
from jaxllm.request import FinishReason
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.prefix_states import is_of_states
from tests.helpers.engines import make_core
from tests.helpers.waiting import wait_until
from tests.kv_tiers.peers.test_two_engines import (
    DECODE,
    GREEDY,
    NUM_BLOCKS,
    PREFILL,
    SEEDED,
    Runner,
    drop_peers,
    have_ended,
    leases_of,
    make,
    prompt_of,
)

pytestmark = pytest.mark.slow

NAME = "qwen3_next"
CHUNKS = {"max_num_batched_tokens": 40, "max_num_prefill_tokens": 40}
ONE_TOKEN = SamplingParams(temperature=0.0, seed=0, max_tokens=1)


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Runner, Runner, Runner]]:
    """One that computes all in one step, one of each role; the prefill engine computes chunks."""
    cores = make_core(NAME, num_gpu_blocks_override=NUM_BLOCKS), make(NAME, **PREFILL, **CHUNKS), make(NAME, **DECODE)
    yield tuple(map(Runner, cores))
    for core in cores:
        core.shutdown()


@pytest.fixture(autouse=True)
def no_leases(engines: Any) -> Iterator[None]:
    """Leases of earlier tests are over, and nothing is left of this one."""
    leases_of(engines[1]).end_all()
    yield
    for each in engines:
        assert not each.core.has_unfinished_requests() or each is engines[1]
        each.core.check_integrity()


def connect_over_tcp(decode: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """With new connections."""
    monkeypatch.setattr(client, "socket_name", lambda engine_id: "\0jaxllm-nowhere")
    drop_peers(decode)


@pytest.mark.parametrize("transport", ["shared memory", "tcp"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_tokens_are_those_of_one_engine(
    engines: Any, params: SamplingParams, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, prefill, decode = engines
    if transport == "tcp":
        connect_over_tcp(decode, monkeypatch)
    for count in (95, 96, 97, 80, 81, 64):
        prompt = prompt_of(count, count + 100 * (params is SEEDED) + 1000 * (transport == "tcp"))
        wanted, _ = one.run(prompt, params)
        answer = prefill.prefill(prompt, params)
        num_passed = (count - 1) // 16 * 16
        assert len(answer["remote_block_ids"][0]) == num_passed // 16 and answer["remote_num_tokens"] == num_passed
        tokens, last = decode.decode(prompt, answer, params)
        assert tokens == wanted
        if num_passed < 64:  # too few to load
            assert last.num_cached_tokens == 0
        else:
            assert last.num_cached_tokens == num_passed
            assert decode.loaded_tokens[last.request_id] == {"peer": num_passed}
        wait_until(lambda: have_ended(prefill))
    assert prefill.prefill(prompt_of(16)) is None, "there is no full block before the last token"


def test_an_answer_goes_on_behind_the_first_token_of_the_other_engine(engines: Any) -> None:
    one, prefill, decode = engines
    for count in (95, 96, 97):
        prompt = prompt_of(count, 500 + count)
        wanted, _ = one.run(prompt, SEEDED)
        answer = prefill.prefill(prompt, SEEDED)
        tokens, last = decode.decode(prompt, answer, SEEDED, output_token_ids=(wanted[0],))
        assert tokens == wanted[1:] and last.finish_reason == FinishReason.LENGTH
        assert last.num_cached_tokens == (count - 1) // 16 * 16
        wait_until(lambda: have_ended(prefill))


def test_many_at_once(engines: Any) -> None:
    """More than there are rows; blocks are short, so requests wait for each other's, or compute."""
    one, prefill, decode = engines
    prompts = [prompt_of(70 + 5 * index, 300 + index) for index in range(6)]
    wanted = [one.run(prompt)[0] for prompt in prompts]
    ids = [prefill.send(prompt, ONE_TOKEN, KVTransfer(keep_for_decode=True)) for prompt in prompts]
    prefilled = prefill.finish()
    answers = [read_kv_transfer(prefilled[request_id][1].kv_transfer_params) for request_id in ids]
    assert None not in answers
    ids = [decode.send(prompt, GREEDY, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    found = decode.finish()
    assert [found[request_id][0] for request_id in ids] == wanted
    assert sum(found[request_id][1].num_cached_tokens > 0 for request_id in ids) >= 4


def test_answers_of_one_prompt_share_what_came(engines: Any) -> None:
    one, prefill, decode = engines
    prompt = prompt_of(90, 9)
    answer = read_kv_transfer(prefill.prefill(prompt))
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=8) for seed in range(3)]
    ids = [decode.send(prompt, each, answer) for each in params]
    found = decode.finish()
    assert [found[request_id][0] for request_id in ids] == [one.run(prompt, each)[0] for each in params]
    assert {found[request_id][1].num_cached_tokens for request_id in ids} == {80}


def test_a_prompt_that_begins_the_same_continues_behind_states_alone(engines: Any) -> None:
    """At first there are none behind its part of the blocks."""
    one, prefill, decode = engines
    prompt = prompt_of(90, 11)
    answer = prefill.prefill(prompt)
    decode.decode(prompt, answer)
    for other, num_cached in ((prompt[:75], 0), (prompt + prompt_of(15, 12), 80), (prompt[:70] + [3] * 20, 64)):
        tokens, last = decode.decode(other, prefill.prefill(prompt))
        assert tokens == one.run(other)[0] and last.num_cached_tokens == num_cached
    tokens, last = decode.decode(prompt[:80] + [3] * 9, prefill.prefill(prompt))
    assert tokens == one.run(prompt[:80] + [3] * 9)[0] and last.num_cached_tokens == 80, "another last token"
    _, last = decode.decode(prompt_of(90, 12), prefill.prefill(prompt_of(90, 12)), cache_salt="of another user")
    assert last.num_cached_tokens == 0


@pytest.mark.parametrize("change", [{"remote_request_id": "0" * 32}, {"remote_engine_id": "another"}], ids=str)
def test_what_cannot_be_fetched_is_computed(engines: Any, change: dict[str, Any]) -> None:
    one, prefill, decode = engines
    prompt = prompt_of(90, 61 + len(str(change)))
    tokens, last = decode.decode(prompt, {**prefill.prefill(prompt), **change})
    assert tokens == one.run(prompt)[0] and last.num_cached_tokens == 0


@pytest.mark.parametrize("part", ["first", "last"])
@pytest.mark.parametrize("kind", ["states", "blocks"])
def test_without_a_part_all_is_computed(engines: Any, kind: str, part: str) -> None:
    one, prefill, decode = engines
    prompt = prompt_of(90, 71 + 2 * (kind == "states") + (part == "last"))
    answer = prefill.prefill(prompt)
    (lease,) = (lease for lease in leases_of(prefill)._leases.values() if not lease.is_over)
    wait_until(lambda: bool(prefill.core.step()) or not lease.pending)
    names = [name for name in lease.names if is_of_states(name) == (kind == "states")]
    leases_of(prefill).lose([names[0 if part == "first" else -1]])
    tokens, last = decode.decode(prompt, answer)
    assert tokens == one.run(prompt)[0] and last.num_cached_tokens == 0


@pytest.mark.parametrize("number", [1, 5, 6, 10], ids=["first block", "last block", "first of states", "last of states"])
def test_damaged_contents_are_computed(engines: Any, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    one, prefill, decode = engines
    connect_over_tcp(decode, monkeypatch)
    prompt, num_damaged = prompt_of(90, 81 + number), decode.core.stats().num_damaged_blocks
    answer = prefill.prefill(prompt)
    with injected(f"kv.receive:{number}:corrupt"):
        tokens, last = decode.decode(prompt, answer)
    assert tokens == one.run(prompt)[0] and last.num_cached_tokens == 0
    assert decode.core.stats().num_damaged_blocks == num_damaged + 1


@pytest.mark.parametrize("when", ["attaching", "loading", "running"])
def test_requests_aborted_while_they_decode_leave_nothing(engines: Any, when: str) -> None:
    one, prefill, decode = engines
    prompt = prompt_of(90, 91 + len(when))
    request_id = decode.send(prompt, GREEDY, read_kv_transfer(prefill.prefill(prompt)))
    request = decode.core.scheduler.requests[request_id]
    if when != "attaching":
        status = "WAITING_FOR_BLOCKS" if when == "loading" else "RUNNING"
        wait_until(lambda: bool(decode.core.step()) or request.status.name == status)
    decode.core.abort_requests([request_id])
    decode.finish()
    wait_until(lambda: have_ended(prefill))
    assert decode.run(prompt)[0] == one.run(prompt)[0]


@pytest.mark.parametrize("num_steps", [1, 2])
def test_requests_aborted_while_their_prompt_is_computed_leave_nothing(engines: Any, num_steps: int) -> None:
    one, prefill, decode = engines
    prompt = prompt_of(95, 120 + num_steps)
    request_id = prefill.send(prompt, ONE_TOKEN, KVTransfer(keep_for_decode=True))
    for _ in range(num_steps):
        prefill.core.step()
    prefill.core.abort_requests([request_id])
    prefill.finish()
    assert len(leases_of(prefill)) == 0
    tokens, last = decode.decode(prompt, prefill.prefill(prompt))
    assert tokens == one.run(prompt)[0] and last.num_cached_tokens == 80


@pytest.mark.parametrize("cause", ["blocks are needed", "all is reset", "a step fails"])
def test_a_request_that_loses_its_row_gets_its_states_again_or_computes(
    engines: Any, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, prefill, decode = engines
    connect_over_tcp(
        decode, monkeypatch
    )  # else devices may read them from the prefill engine's memory, and they are nowhere else
    prompt = prompt_of(90, 130 + ord(cause[2]))
    wanted, _ = one.run(prompt)
    answer = prefill.prefill(prompt)
    request_id = decode.send(prompt, GREEDY, read_kv_transfer(answer))
    request, tokens = decode.core.scheduler.requests[request_id], list[int]()
    while request.num_output_tokens < 3:
        for output in decode.core.step():
            tokens += output.new_token_ids
    if cause == "blocks are needed":
        decode.core.scheduler.hold_requests([request_id])
        for output in decode.core.step():
            tokens += output.new_token_ids
        decode.core.scheduler.release_requests([request_id])
    elif cause == "all is reset":
        assert decode.core.reset_prefix_cache(reset_running_requests=True)
    else:
        decode.core.loop.start_over()
    hits = decode.core.stats().resumed_prefix_cache_hits
    while decode.core.has_unfinished_requests():
        for output in decode.core.step():
            tokens += output.new_token_ids
    assert tokens == wanted and request.num_preemptions == 1
    assert decode.core.stats().resumed_prefix_cache_hits - hits == (0 if cause == "all is reset" else 80)


def test_without_blocks_for_states_nothing_is_passed_on(engines: Any) -> None:
    one, prefill, decode = engines
    pool, prompt = prefill.core.scheduler.cache_manager.pool, prompt_of(90, 150)
    taken = pool.allocate(pool.num_free_blocks - 10)  # six for the prompt, five for the states
    prefill.send(prompt, ONE_TOKEN, KVTransfer(keep_for_decode=True))
    outputs = []
    while prefill.core.has_unfinished_requests():
        outputs += prefill.core.step()
    pool.free(taken)
    assert outputs[-1].kv_transfer_params is None and outputs[-1].finish_reason is FinishReason.LENGTH
    assert decode.decode(prompt, None)[0] == one.run(prompt)[0]


def test_states_that_are_no_numbers_are_not_passed_on(engines: Any) -> None:
    one, prefill, decode = engines
    prompt = prompt_of(90, 160)
    request_id = prefill.send(prompt, ONE_TOKEN, KVTransfer(keep_for_decode=True))
    prefill.core.step()
    row = prefill.core.runner.rows[0].by_request[request_id].index
    caches = list(prefill.core.runner.caches)
    state = np.array(caches[-1])
    state[row] = np.nan
    caches[-1] = jax.device_put(state, caches[-1].sharding)
    prefill.core.runner.caches = tuple(caches)
    _, last = prefill.finish()[request_id]
    assert last.finish_reason is FinishReason.ERROR and last.kv_transfer_params is None
    tokens, last = decode.decode(prompt, prefill.prefill(prompt))
    assert tokens == one.run(prompt)[0] and last.num_cached_tokens == 80

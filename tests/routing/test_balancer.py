"""Which replica the balancer chooses, and what it knows of each."""

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jaxllm.cache_events import KEY_BYTES, CacheEvents
from jaxllm.errors import EngineDeadError, InvalidRequestError
from jaxllm.lora.adapter import Adapter, AdapterVersion
from jaxllm.pooling_params import PoolingParams
from jaxllm.request import EngineCoreRequest, PromptItem, Request
from jaxllm.request_options import RequestOptions
from jaxllm.routing.balancer import Balancer
from jaxllm.routing.loads import LOAD_TOKENS, ROW_TOKENS
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.block_hash import block_hasher
from jaxllm.scheduler_stats import SchedulerStats

BLOCK = 4


def make_balancer(num_replicas=3, **options) -> Balancer:
    balancer = Balancer(num_replicas, **{"block_size": BLOCK, "max_num_seqs": 8, **options})
    for replica in range(num_replicas):
        balancer.set_up(replica)
        balancer.note_load(replica, stats())
    return balancer


def stats(**fields) -> SchedulerStats:
    zeros = {field.name: 0 for field in dataclasses.fields(SchedulerStats) if field.default is dataclasses.MISSING}
    return SchedulerStats(**zeros | {"num_cache_blocks": 1000} | fields)


def make_request(name, prompt, *, prompt_logprobs=None, items=(), pooling_params=None, **options) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=4, prompt_logprobs=prompt_logprobs)
    return EngineCoreRequest(
        request_id=str(name),
        prompt_token_ids=prompt,
        items=items,
        pooling_params=pooling_params,
        sampling_params=params,
        options=RequestOptions(**options),
    )


def events_of(spec: EngineCoreRequest, algorithm="sha256", adapter: Adapter | None = None) -> CacheEvents:
    """Events of an engine that has computed a prompt."""
    request = Request(spec)
    request.adapter = adapter
    block_hasher(BLOCK, algorithm)(request)
    return CacheEvents(stored=b"".join(name[:KEY_BYTES] for name in request.block_hashes))


def test_requests_without_anything_cached_go_to_the_least_work_and_in_turn_among_equals():
    balancer = make_balancer()
    assert [balancer.choose(make_request(i, [i] * 20)) for i in range(6)] == [0, 1, 2, 0, 1, 2]
    balancer.note_load(1, stats(num_running=2))
    balancer.note_load(0, stats(num_running=2, num_queued_tokens=50))
    balancer.note_load(2, stats(num_running=3))
    assert balancer.choose(make_request("a", [1] * 20)) == 1


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_a_cached_prefix_is_worth_a_queue_of_twice_its_length(algorithm):
    balancer = make_balancer(hash_algorithm=algorithm)
    chat = make_request("chat", list(range(400)))
    balancer.note_events(2, events_of(chat, algorithm))
    balancer.note_events(1, events_of(make_request("half", chat.prompt_token_ids[:200]), algorithm))
    longer = make_request("next", [*chat.prompt_token_ids, *range(40)])
    assert balancer.choose(longer) == 2
    balancer.ended("next")
    balancer.note_load(2, stats(num_queued_tokens=390))
    assert balancer.choose(longer) == 2
    balancer.ended("next")
    balancer.note_load(2, stats(num_queued_tokens=410))
    assert balancer.choose(longer) == 1
    balancer.ended("next")
    balancer.note_load(2, stats())
    for other in (
        make_request("salt", longer.prompt_token_ids, cache_salt="x"),
        make_request("logprobs", longer.prompt_token_ids, prompt_logprobs=1),
    ):
        balancer._last = 2
        assert balancer.choose(other) == 0, "its blocks are others"
        balancer.ended(other.request_id)
        balancer.note_load(0, stats())
    balancer.note_events(2, events_of(make_request("salt", longer.prompt_token_ids, cache_salt="x"), algorithm))
    assert balancer.choose(make_request("salted", longer.prompt_token_ids, cache_salt="x")) == 2


def test_a_prefix_in_host_memory_is_worth_most_of_its_tokens_and_takes_their_room():
    balancer = make_balancer()
    chat = make_request("chat", list(range(400)))
    half = events_of(make_request("half", chat.prompt_token_ids[:200]))
    balancer.note_events(0, CacheEvents(stored=half.stored, with_host=CacheEvents(stored=events_of(chat).stored)))
    longer = make_request("next", [*chat.prompt_token_ids, *range(40)])
    assert balancer.fewest_uncached(longer, np.ones(3, bool)) == 40, "what is loaded is not computed"
    found = balancer._cached_of(longer)
    assert (found.on_devices[0], found.in_host[0], found.on_devices[1], found.in_host[1]) == (200, 200, 0, 0)
    # It computes 40 tokens, and 200 of host memory count as 30. Elsewhere it would compute 440.
    for queued, chosen in ((730, 0), (750, 1)):
        balancer.note_load(0, stats(num_queued_tokens=queued))
        balancer._last = 0
        assert balancer.choose(longer) == chosen
        assert balancer.loads.replicas[chosen].unreported[-1] == ((70, 240, None) if chosen == 0 else (440, 440, None))
        balancer.ended("next")
        balancer.note_load(chosen, stats())
    gone = CacheEvents(removed=half.stored, with_host=CacheEvents(stored=half.stored))
    balancer.note_events(0, gone)
    assert balancer._cached_of(longer).in_host[0] == 400, "it has left the devices"
    balancer.set_up(0)
    assert balancer._cached_of(longer).in_host[0] == 0, "another engine"


def test_pooling_requests_may_skip_the_cache():
    balancer = make_balancer()
    prompt = list(range(100))
    balancer.note_events(2, events_of(make_request("a", prompt)))
    assert balancer.choose(make_request("b", prompt, pooling_params=PoolingParams(skip_reading_prefix_cache=True))) == 0
    assert balancer.choose(make_request("c", prompt, pooling_params=PoolingParams(skip_reading_prefix_cache=False))) == 2


def test_a_burst_between_two_reports_is_spread():
    balancer = make_balancer()
    chat = list(range(400))
    balancer.note_events(0, events_of(make_request("chat", chat)))
    chosen = Counter(balancer.choose(make_request(i, [*chat, *[i] * 100])) for i in range(24))
    assert chosen[0] >= 8 and min(chosen.values()) >= 4
    assert chosen[0] <= 8, "no more than it has seats"


def test_reports_cover_what_was_received():
    balancer = make_balancer(num_api_servers=1)
    for i in range(3):
        assert balancer.choose(make_request(i, [i] * 100), rank=0) == 0
    assert balancer.loads.work[0] == 300 + 3 * ROW_TOKENS
    balancer.note_load(0, stats(num_waiting=1, num_queued_tokens=100), num_received=1)
    assert balancer.loads.work[0] == 300 + 3 * ROW_TOKENS
    balancer.note_load(0, stats(num_running=1), num_received=2)
    assert balancer.loads.work[0] == 100 + 2 * ROW_TOKENS
    balancer.note_load(0, stats(num_running=3), num_received=3)
    assert balancer.loads.work[0] == 3 * ROW_TOKENS
    balancer.choose(make_request(3, [3] * 100), rank=0)
    balancer.note_load(0, stats())
    assert balancer.loads.work[0] == 0


def test_other_api_servers_send_as_much_as_this_one():
    balancer = make_balancer(num_api_servers=4)
    balancer.choose(make_request(0, [0] * 100), rank=0)
    assert balancer.loads.work[0] == 4 * (100 + ROW_TOKENS)


@pytest.mark.parametrize(
    "full",
    [
        {"num_running": 8},
        {"num_running": 5, "num_waiting": 3},
        {"cache_usage": 0.999},
        {"cache_usage": 0.5, "num_queued_tokens": 2000},
    ],
)
def test_never_queues_behind_a_full_replica_while_another_is_free(full):
    balancer = make_balancer()
    chat = make_request("chat", list(range(800)))
    balancer.note_events(0, events_of(chat))
    balancer.note_load(0, stats(**full))
    balancer.note_load(1, stats(num_running=7, num_queued_tokens=900))
    balancer.note_load(2, stats(num_running=7, num_queued_tokens=1000))
    longer = [*chat.prompt_token_ids, *range(400)]
    assert balancer.choose(make_request("next", longer)) == 1
    balancer.note_load(1, stats(num_running=8))
    assert balancer.choose(make_request("third", longer)) == 2
    balancer.note_load(2, stats(num_running=8, num_queued_tokens=20_000))
    balancer.note_load(1, stats(num_running=8, num_queued_tokens=20_000))
    assert balancer.choose(make_request("all are full", longer)) == 0


def test_where_all_are_full_the_shortest_queue_outweighs_a_cached_prefix():
    balancer = make_balancer(2)
    chat = make_request("chat", list(range(800)))
    balancer.note_events(0, events_of(chat))
    balancer.note_load(0, stats(num_running=8, num_waiting=4))
    balancer.note_load(1, stats(num_running=8, num_waiting=1))
    assert balancer.choose(make_request("next", chat.prompt_token_ids)) == 1
    assert balancer.choose(make_request("another", chat.prompt_token_ids)) == 0


def test_replicas_go_down_and_come_up():
    balancer = make_balancer()
    chat = make_request("chat", list(range(400)))
    balancer.note_events(1, events_of(chat))
    assert balancer.choose(chat) == 1 and balancer.replica_of("chat") == 1
    assert balancer.choose(make_request("other", [7] * 10), rank=1) == 1
    assert sorted(balancer.set_down(1)) == ["chat", "other"] and balancer.replica_of("chat") is None
    assert [balancer.is_up(replica) for replica in range(3)] == [True, False, True]
    balancer.note_events(1, events_of(chat))  # a late message
    balancer.note_load(1, stats())
    assert {balancer.choose(make_request(i, chat.prompt_token_ids)) for i in range(6)} == {0, 2}
    with pytest.raises(EngineDeadError, match="replica 1 is down"):
        balancer.choose(chat, rank=1)
    with pytest.raises(InvalidRequestError, match="data_parallel_rank is 3, must be 0 to 2"):
        balancer.choose(chat, rank=3)
    for replica in (0, 2):
        balancer.set_down(replica)
    with pytest.raises(EngineDeadError, match="no replica"):
        balancer.choose(chat)
    balancer.set_up(1)
    assert balancer.choose(chat) == 1 and balancer.loads.work[1] == 400 + ROW_TOKENS, "its cache is empty again"
    balancer.ended("chat")
    balancer.ended("chat")
    assert balancer.loads.replicas[1].num_in_flight == 0


def test_a_replica_that_drains_keeps_its_requests_and_gets_no_more():
    balancer = make_balancer()
    chat = make_request("chat", list(range(400)))
    balancer.note_events(1, events_of(chat))
    assert balancer.choose(chat) == 1
    balancer.set_draining(1)
    assert {balancer.choose(make_request(i, chat.prompt_token_ids)) for i in range(6)} == {0, 2}
    assert not balancer.has_seat(1) and balancer.replica_of("chat") == 1 and balancer.num_requests(1) == 1
    with pytest.raises(EngineDeadError, match="replica 1 is being stopped"):
        balancer.choose(chat, rank=1)
    balancer.ended("chat")
    assert balancer.num_requests(1) == 0
    for replica in (0, 2):
        balancer.set_draining(replica)
    with pytest.raises(EngineDeadError, match="no replica of the engine takes requests"):
        balancer.choose(chat)
    balancer.set_up(1)
    assert balancer.choose(chat) == 1


def test_requests_with_an_adapter_find_the_blocks_of_its_files_at_each_replica():
    balancer = make_balancer()
    request = make_request("a", list(range(2400)), adapter="sql")
    first, second = (
        Adapter(1, "sql", "/sql", version=AdapterVersion(Path("/sql"), 8, {}, digest)) for digest in ("old", "new")
    )
    balancer.note_events(1, events_of(request, adapter=second))
    balancer.note_events(2, events_of(request, adapter=first))
    assert balancer._cached_of(request).on_devices.tolist() == [0, 0, 0], "no key is known"
    for replica, adapter in enumerate([first, second, second]):
        balancer.set_adapters(replica, {"sql": adapter.cache_key})
    assert balancer._cached_of(request).on_devices.tolist() == [0, 2400, 0], "replica 2 has other files now"
    assert balancer.choose(request) == 1
    assert balancer._cached_of(make_request("b", request.prompt_token_ids)).on_devices.tolist() == [0, 0, 0]


def test_requests_with_an_adapter_go_where_it_has_a_slot():
    balancer = make_balancer(max_num_seqs=100)
    for replica, running in enumerate([("a", "b"), ("a",), ("c",)]):
        balancer.note_load(replica, stats(running_adapters=running, max_adapters=2))
    chosen = [balancer.choose(make_request(name, [1] * 10, adapter=name[0])) for name in ("c1", "c2", "b1")]
    assert chosen == [2, 2, 0]
    assert {balancer.choose(make_request(f"d{i}", [1] * 10, adapter="d")) for i in range(3)} <= {1, 2}, "no slot is left at 0"
    balancer.note_load(0, stats(max_adapters=2, num_queued_tokens=LOAD_TOKENS // 2), 1)  # idle, and still there
    assert balancer.choose(make_request("b2", [1] * 10, adapter="b")) == 0
    balancer.note_load(0, stats(max_adapters=2, running_adapters=("x", "y")))
    assert balancer.choose(make_request("b3", [1] * 10, adapter="b")) != 0, "others took its slot"


def test_least_loaded_is_vllms_score_and_round_robin_takes_turns():
    balancer = make_balancer(policy="least_loaded", num_api_servers=2)
    balancer.note_load(0, stats(num_running=3))
    balancer.note_load(1, stats(num_running=1, num_waiting=1, cache_usage=0.9))
    balancer.note_load(2, stats(num_running=1, num_waiting=1))
    assert balancer.loads.vllm_score.tolist() == [3, pytest.approx(4.4), 2]
    assert [balancer.choose(make_request(i, [1])) for i in range(2)] == [2, 2] and balancer.loads.vllm_score[2] == 4
    balancer = make_balancer(policy="round_robin")
    balancer.note_load(0, stats(num_running=8))
    assert [balancer.choose(make_request(i, [1])) for i in range(4)] == [0, 1, 2, 0]
    balancer.set_down(1)
    assert [balancer.choose(make_request(i, [1])) for i in "ab"] == [2, 0]


@pytest.mark.parametrize("policy", ["cache_aware", "least_loaded", "round_robin"])
def test_a_replica_that_seems_to_hang_is_avoided_while_others_take_requests(policy):
    balancer = make_balancer(policy=policy)
    chat = make_request("chat", list(range(400)))
    balancer.note_events(1, events_of(chat))
    balancer.set_stalled(1, True)
    assert {balancer.choose(make_request(i, chat.prompt_token_ids)) for i in range(6)} == {0, 2}
    assert balancer.choose(chat, rank=1) == 1, "who names it gets it"
    balancer.set_stalled(0, True)
    balancer.set_stalled(2, True)
    assert len({balancer.choose(make_request(f"more {i}", [i])) for i in range(30)}) > 1, "all hang: all are tried"
    balancer.set_down(1)
    balancer.set_up(1)
    assert balancer.choose(make_request("last", [7])) == 1, "it was started again"


@pytest.mark.parametrize("policy", ["cache_aware", "least_loaded", "round_robin"])
def test_a_session_keeps_its_replica_until_that_one_is_full_stalled_or_down(policy):
    balancer = make_balancer(policy=policy)
    numbers = iter(range(100))

    def choose(session_id: str, **fields) -> int:
        return balancer.choose(make_request(next(numbers), [1] * 20, session_id=session_id, **fields))

    first, second = choose("a"), choose("b")
    assert first != second
    assert [choose("a") for _ in range(3)] == [first] * 3 and choose("b") == second
    balancer.note_load(first, stats(num_running=8))
    moved = choose("a")
    assert moved != first, "all seats are taken"
    balancer.note_load(first, stats())
    assert choose("a") == moved, "where its latest request has left its blocks"
    balancer.set_stalled(moved, True)
    assert choose("a") != moved
    balancer.set_stalled(moved, False)
    other = 3 - first - second
    assert balancer.choose(make_request("r", [1], session_id="b"), other) == other, "the client names it"
    balancer.set_down(other)
    assert choose("b") != other


def test_the_latest_sessions_are_remembered(monkeypatch):
    monkeypatch.setattr("jaxllm.routing.balancer.MAX_SESSIONS", 2)
    balancer = make_balancer(policy="round_robin")
    assert [balancer.choose(make_request(name, [1], session_id=name)) for name in "abac"] == [0, 1, 0, 1]
    assert list(balancer._sessions) == ["a", "c"]


def test_a_prompt_with_an_item_goes_to_the_replica_that_has_that_item_cached():
    balancer = make_balancer()
    dog, cat = (make_request(name, [7] * 80, items=(PromptItem("image", name.encode(), 8, 60),)) for name in ("dog", "cat"))
    balancer.note_events(1, events_of(dog))
    balancer.note_events(2, events_of(cat))
    assert [balancer.choose(each) for each in (dog, cat)] == [1, 2]

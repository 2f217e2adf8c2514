"""Blocks that live elsewhere, in a tier that is a dictionary. tests/scheduler/test_random_schedules.py mixes them with all else."""

import random
import time
from itertools import pairwise

import pytest

from jaxllm.request import ErrorKind, Request, RequestStatus
from jaxllm.scheduler import loading
from jaxllm.scheduler.block_hash import block_hasher
from jaxllm.scheduler_output import ModelRunnerOutput
from tests.helpers.fake_runner import FakeEngine, oracle_tokens
from tests.helpers.fake_tier import FakeTier
from tests.helpers.scheduling import make_request, make_scheduler

VOCAB = 50
PROMPTS = {name: [index + 1] * 33 for index, name in enumerate("abc")}


def make_engine(tier: FakeTier | None = None, **options: object) -> tuple[FakeEngine, FakeTier]:
    """An engine whose pool has forgotten prompt a, and whose tier has it."""
    tier = FakeTier(random.Random(1), max_steps=0, load_blocks=100, share_stored=1.0) if tier is None else tier
    options = {"block_size": 4, "num_blocks": 21, "max_model_len": 48, **options}
    engine = FakeEngine(make_scheduler(tiers=(tier,), **options), vocab_size=VOCAB)
    add(engine, "a")
    for number in range(5):
        engine.run()
        engine.scheduler.add_request(make_request(f"filler {number}", [30 + number] * 44, max_tokens=1))
    engine.run()
    assert engine.scheduler.num_cached_tokens(make_request("x", PROMPTS["a"])) == 0 and len(tier.contents) >= 8
    return engine, tier


def add(engine: FakeEngine, name: str, **options: object) -> Request:
    """A request for the prompt of its first letter."""
    request = make_request(name, PROMPTS[name[0]], max_tokens=3, **options)
    engine.scheduler.add_request(request)
    return request


def block_names(name: str) -> list[bytes]:
    """The names of the blocks of a prompt."""
    request = make_request("names", PROMPTS[name])
    block_hasher(4, "sha256")(request)
    return list(request.block_hashes)


def check_tokens(engine: FakeEngine, *requests: Request) -> None:
    """Every request gets its tokens, although those without ops leave nothing to run for a while."""
    found: dict[str, list[int]] = {}
    for _ in range(100):
        engine.dispatch()
        for output in engine.collect():
            found.setdefault(output.request_id, []).extend(output.new_token_ids)
    assert not engine.scheduler.has_requests()
    for request in requests:
        assert found[request.request_id] == oracle_tokens(request.spec.prompt_token_ids, 3, VOCAB)


def test_evicted_blocks_come_back_and_are_not_computed_again() -> None:
    engine, tier = make_engine()
    num_computed = engine.runner.num_computed_tokens
    request = add(engine, "a2")
    engine.dispatch()
    assert request.status is RequestStatus.WAITING_FOR_BLOCKS
    num_of_disk = tier.sources(request.block_hashes[:8]).count("disk")
    check_tokens(engine, request)
    assert (request.num_cached_tokens, tier.num_loaded) == (32, 8)
    assert 0 < num_of_disk < 8 and request.loaded_tokens == {"host": 4 * (8 - num_of_disk), "disk": 4 * num_of_disk}
    assert engine.runner.num_computed_tokens - num_computed == 1 + 2


def test_full_blocks_are_stored_when_they_are_computed() -> None:
    tier = FakeTier(random.Random(1))
    engine = FakeEngine(make_scheduler(tiers=(tier,), block_size=4, kv_offloading_write="full"), vocab_size=VOCAB)
    request = add(engine, "a")
    check_tokens(engine, request)
    assert tier.contents.keys() == set(request.block_hashes[:8]), "steps come until all is stored"
    assert engine.scheduler.cache_manager.pool.num_free_blocks > 900, "nothing would be evicted"
    again = add(engine, "a2")
    check_tokens(engine, again)
    assert len(tier.contents) == 8 and again.num_cached_tokens == 32
    tier.discard(list(tier.contents))
    check_tokens(engine, add(engine, "a3"))
    assert len(tier.contents) == 8, "what the tier has lost is stored again when a request finds it"
    threshold = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    threshold["kv_connector_extra_config"] = {"cpu_bytes_to_use": 1, "store_threshold": 2}
    options = {"kv_offloading_write": "full", "kv_transfer_config": threshold}
    engine = FakeEngine(make_scheduler(tiers=(tier := FakeTier(random.Random(1)),), block_size=4, **options), vocab_size=VOCAB)
    for name, count in (("a", 0), ("a2", 8)):
        check_tokens(engine, add(engine, name))
        assert len(tier.contents) == count, "the second request that has a block stores it"


def test_computed_blocks_are_stored_many_at_a_time_while_requests_run() -> None:
    tier = FakeTier(random.Random(1), share_stored=1.0)
    engine = FakeEngine(make_scheduler(tiers=(tier,), block_size=4, kv_offloading_write="full"), vocab_size=VOCAB)
    engine.scheduler.add_request(make_request("r", [1] * 9, max_tokens=60))
    for _ in range(100):
        engine.dispatch()
        engine.collect()
    stores = [len(plan.ops) for plan in engine.plans if plan.ops]
    assert sum(stores) == 17 and len(stores) < 10 and len(engine.plans) > 60


def test_a_request_that_waits_for_blocks_holds_up_nobody_and_keeps_its_place() -> None:
    engine, tier = make_engine(num_blocks=31, max_num_seqs=1)
    tier.is_stuck = True
    first, second, third = (add(engine, name) for name in ("a2", "b2", "c2"))
    engine.dispatch()
    assert [request.request_id for request in engine.scheduler.running] == ["b2"]
    tier.is_stuck = False
    check_tokens(engine, first, second, third)
    firsts = dict.fromkeys(data.request_id for plan in engine.plans for data in plan.new_requests)
    assert list(firsts)[-3:] == ["b2", "a2", "c2"]


def test_requests_with_the_same_prefix_load_it_once() -> None:
    engine, tier = make_engine()
    requests = [add(engine, f"a{index}") for index in range(3)]
    check_tokens(engine, *requests)
    assert (tier.num_loads, tier.num_loaded) == (1, 8)
    assert [request.num_cached_tokens for request in requests] == [32] * 3
    assert [bool(request.loaded_tokens) for request in requests] == [True, False, False], "the others find it on the devices"


def test_what_is_loaded_for_another_request_counts_as_cached() -> None:
    engine, tier = make_engine()
    half = PROMPTS["a"][:16] + [9] * 17
    for prompt in (half, *([50 + number] * 44 for number in range(5))):
        engine.scheduler.add_request(make_request(f"{prompt[-1]}", prompt, max_tokens=1))
        engine.run()
    num_loaded, num_hits = tier.num_loaded, engine.scheduler.stats().external_prefix_cache_hits
    requests = [add(engine, "a2"), make_request("other", half, max_tokens=3)]
    engine.scheduler.add_request(requests[1])
    check_tokens(engine, *requests)
    assert [request.num_cached_tokens for request in requests] == [32, 32] and tier.num_loaded - num_loaded == 8 + 4
    loaded = [sum((request.loaded_tokens or {}).values()) for request in requests]
    assert loaded == [32, 16] and engine.scheduler.stats().external_prefix_cache_hits - num_hits == 48


@pytest.mark.parametrize("fault", ["all blocks", "some blocks", "late"])
def test_what_does_not_come_is_computed(fault: str) -> None:
    engine, tier = make_engine()
    tier.share_bad = {"all blocks": 1.0, "some blocks": 0.3, "late": 0.0}[fault]
    if fault == "late":
        tier.is_stuck, tier.patience_seconds = True, 0.0
    request = add(engine, "a2")
    check_tokens(engine, request)
    assert tier.num_loads == 1 and not tier.loads and not request.loads_blocks
    assert request.num_cached_tokens == 0 if fault != "some blocks" else 0 <= request.num_cached_tokens < 32
    assert sum((request.loaded_tokens or {}).values()) == request.num_cached_tokens


@pytest.mark.parametrize("event", ["abort", "deadline", "hold", "start over", "reset", "need of blocks"])
def test_a_load_ends_with_whatever_ends_the_wait(event: str) -> None:
    engine, tier = make_engine()
    tier.is_stuck = True
    scheduler = engine.scheduler
    request = add(engine, "a2", timeout_seconds=0.0 if event == "deadline" else None)
    engine.dispatch()
    assert tier.loads and scheduler.holds_blocks
    if event == "abort":
        scheduler.finish_requests("a2", RequestStatus.FINISHED_ABORTED)
    elif event == "deadline":
        (output,) = scheduler.fail_expired()
        assert output.error_kind is ErrorKind.TIMEOUT
    elif event == "hold":
        scheduler.hold_requests(["a2"])
    elif event == "start over":
        engine.start_over()
    elif event == "reset":
        assert scheduler.reset_prefix_cache(reset_running_requests=True) and not tier.contents
    else:
        others = [make_request(f"n{index}", [20 + index] * 20, max_tokens=14) for index in range(2)]
        for other in others:
            scheduler.add_request(other)
        while others[0].num_output_tokens < 10:
            engine.step()
        assert not any(other.num_preemptions for other in others)
    assert not tier.loads and request.status is not RequestStatus.WAITING_FOR_BLOCKS
    scheduler.check_integrity()
    tier.is_stuck = False
    scheduler.release_requests(["a2"])
    check_tokens(engine, *([] if event in ("abort", "deadline") else [request]))
    assert not scheduler.holds_blocks


def test_a_request_gets_the_blocks_that_loads_behind_it_hold() -> None:
    engine, tier = make_engine(scheduling_policy="priority")
    tier.is_stuck = True
    late, urgent = add(engine, "a2", priority=1), make_request("n", [20] * 45, max_tokens=2)
    engine.dispatch()
    assert late.status is RequestStatus.WAITING_FOR_BLOCKS
    engine.scheduler.cache_manager.pool.allocate(2)  # somebody else's: the rest is too little
    engine.scheduler.add_request(urgent)
    plan = engine.scheduler.schedule()
    assert [row.request_id for row in plan.rows] == ["n"] and late.status is RequestStatus.WAITING and not tier.loads


def test_a_request_that_was_refused_before_a_load_began_gets_its_blocks() -> None:
    engine, _ = make_engine(num_blocks=18, scheduling_policy="priority")
    scheduler = engine.scheduler
    scheduler.add_request(make_request("runs", [40] * 21, max_tokens=20))
    engine.step()
    large = make_request("large", [41] * 45, max_tokens=3, priority=-1)
    scheduler.add_request(large)
    engine.step()
    scheduler.hold_requests(["large"])
    loads = add(engine, "a2")
    engine.step()
    assert loads.status is RequestStatus.WAITING_FOR_BLOCKS
    scheduler.finish_requests("runs", RequestStatus.FINISHED_ABORTED)
    scheduler.release_requests(["large"])
    check_tokens(engine, large, loads)


def test_a_load_takes_blocks_a_part_at_a_time() -> None:
    engine, tier = make_engine()
    engine.scheduler.cache_manager.loading._load_blocks, tier.num_late = 3, 0
    request, pool = add(engine, "a2"), engine.scheduler.cache_manager.pool
    num_held = [0]
    while not engine.in_flight or not engine.plans[-1].rows:
        if engine.in_flight:
            engine.collect()
        num_held.append(pool.num_usable_blocks - pool.num_free_blocks)
        engine.dispatch()
    assert num_held == sorted(num_held) and max(after - before for before, after in pairwise(num_held)) <= 3
    check_tokens(engine, request)
    assert (request.num_cached_tokens, tier.num_loaded) == (32, 8) and tier.num_loads >= 3


def test_loads_begin_as_soon_as_others_are_over() -> None:
    engine, tier = make_engine(FakeTier(random.Random(3), max_steps=6, load_blocks=4, copy_blocks=1, share_stored=1.0))
    request, num_under_way = add(engine, "a2"), []
    while not engine.in_flight or not engine.plans[-1].rows:
        if engine.in_flight:
            engine.collect()
        engine.dispatch()
        num_under_way.append(len(tier.loads))
    assert num_under_way[:3] == [3, 4, 4], "a few, as what they evict is stored, and then all that the tier takes"
    assert min(num_under_way[1 : num_under_way.index(3, 1)]) == 4, "until none is left to begin"
    check_tokens(engine, request)
    assert (request.num_cached_tokens, tier.num_loaded, tier.num_loads) == (32, 8, 8)


@pytest.mark.parametrize(("most", "num_found"), [(0, 0), (3, 0), (14, 12), (1000, 32)])
def test_a_request_limits_what_is_loaded_of_it(most: int, num_found: int) -> None:
    engine, tier = make_engine(FakeTier(random.Random(1), max_steps=2, load_blocks=2, share_stored=1.0))
    request = add(engine, "a2", max_load_tokens=most)
    check_tokens(engine, request)
    assert (request.num_cached_tokens, 4 * tier.num_loaded) == (num_found, num_found)


def test_a_limit_holds_if_what_arrives_for_another_request_never_comes() -> None:
    engine, tier = make_engine(FakeTier(random.Random(1), load_blocks=2, share_stored=1.0), num_blocks=41)
    tier.is_stuck = True
    other, request = add(engine, "a2"), add(engine, "a3", max_load_tokens=0)
    engine.dispatch()
    assert other.status is RequestStatus.WAITING_FOR_BLOCKS
    engine.scheduler.finish_requests("a2", RequestStatus.FINISHED_ABORTED)
    tier.is_stuck = False
    check_tokens(engine, request)
    assert not request.loaded_tokens and tier.num_loaded == 0


def test_tokens_on_the_devices_do_not_count_as_loaded() -> None:
    engine, tier = make_engine()
    pool, names = engine.scheduler.cache_manager.pool, block_names("a")
    engine.scheduler.add_request(make_request("first", PROMPTS["a"][:9], max_tokens=1, max_load_tokens=0))
    engine.run()
    assert [pool.is_cached(name) for name in names] == [True] * 2 + [False] * 6
    request = add(engine, "a2", max_load_tokens=8)
    check_tokens(engine, request)
    assert (request.num_cached_tokens, tier.num_loaded, sum(request.loaded_tokens.values())) == (16, 2, 8)


def test_tiers_keep_nothing_of_a_request_that_fails_after_a_preemption() -> None:
    engine, tier = make_engine()
    engine.depth = 2
    request = make_request("d", [9] * 33, max_tokens=3)
    engine.scheduler.add_request(request)
    engine.dispatch()
    engine.scheduler.hold_requests(["d"])
    for name, length in (("other", 44), ("evicts its blocks, which the tier is to store", 33)):
        engine.scheduler.add_request(make_request(name, [40 + length] * length, max_tokens=1))
    engine.depth = 3
    engine.dispatch()
    assert any(tier.stores.keys() & set(request.block_hashes))
    plan, _ = engine.in_flight[0]
    engine.in_flight[0] = plan, ModelRunnerOutput({}, errors={"d": "it broke"})
    while engine.scheduler.has_requests():
        engine.step()
    assert request.status is RequestStatus.FINISHED_ERROR
    assert not (tier.stores.keys() | tier.contents.keys()) & set(request.block_hashes)


def test_a_load_evicts_nothing_that_is_not_stored() -> None:
    engine, tier = make_engine()
    tier.contents = {name: content for name, content in tier.contents.items() if name in block_names("a")}
    tier.share_stored, tier.num_late = 0.0, 0
    request = add(engine, "a2")
    for _ in range(5):
        engine.step()
    assert request.status is RequestStatus.WAITING_FOR_BLOCKS and not tier.num_loaded
    tier.share_stored = 1.0
    check_tokens(engine, request)
    assert (request.num_cached_tokens, tier.num_loaded) == (32, 8)
    assert tier.num_late == 1, "the block of its last token is not loaded"


def test_a_load_that_waits_too_long_for_stores_ends() -> None:
    engine, tier = make_engine(FakeTier(random.Random(1), patience_seconds=0.0))
    tier.contents = {name: content for name, content in tier.contents.items() if name in block_names("a")}
    tier.share_stored = 0.0
    request = add(engine, "a2")
    check_tokens(engine, request)
    assert request.num_cached_tokens == 0 and not request.loads_blocks


def test_what_a_tier_loses_during_a_load_is_computed() -> None:
    engine, tier = make_engine()
    engine.scheduler.cache_manager.loading._load_blocks = 3
    request = add(engine, "a2")
    engine.dispatch()
    tier.contents = {name: content for name, content in tier.contents.items() if name in block_names("a")[:5]}
    check_tokens(engine, request)
    assert request.num_cached_tokens == 20 and request.loads_blocks


def test_a_load_uses_what_others_compute_meanwhile() -> None:
    engine, tier = make_engine(num_blocks=31)
    tier.is_stuck, engine.scheduler.cache_manager.loading._load_blocks = True, 3
    first, second = add(engine, "a2"), add(engine, "a3")
    engine.dispatch()
    assert second.status is RequestStatus.WAITING_FOR_BLOCKS and tier.num_loads == 1
    engine.scheduler.hold_requests(["a2"])
    first.loads_blocks = False
    tier.is_stuck = False
    engine.scheduler.release_requests(["a2"])
    check_tokens(engine, first, second)
    assert second.num_cached_tokens == 32 and tier.num_loaded < 8


def test_a_load_goes_on_where_another_was_aborted() -> None:
    engine, tier = make_engine()
    engine.scheduler.cache_manager.loading._load_blocks = 3
    first, second = add(engine, "a2"), add(engine, "a3")
    while tier.num_loaded < 3:
        engine.step()
    assert {first.status, second.status} == {RequestStatus.WAITING_FOR_BLOCKS}
    engine.scheduler.finish_requests("a2", RequestStatus.FINISHED_ABORTED)
    check_tokens(engine, second)
    assert second.num_cached_tokens == 32 and 8 <= tier.num_loaded <= 8 + 3


def test_what_has_arrived_of_a_preempted_load_is_kept() -> None:
    engine, tier = make_engine()
    engine.scheduler.cache_manager.loading._load_blocks = 3
    request = add(engine, "a2")
    while tier.num_loaded < 3:
        engine.step()
    tier.is_stuck = True
    assert engine.scheduler.cache_manager.loading.end_latest()
    assert request.status is RequestStatus.WAITING and engine.scheduler.num_cached_tokens(request) == 12
    engine.scheduler.check_integrity()


def test_a_load_leaves_blocks_to_prompts_and_to_those_that_run() -> None:
    engine, tier = make_engine(num_blocks=31, watermark=0.1, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    prompt = make_request("n", [20] * 40, max_tokens=2)
    engine.scheduler.add_request(prompt)
    engine.step()
    request, pool = add(engine, "a2"), engine.scheduler.cache_manager.pool
    while prompt.num_computed_tokens < 40:
        engine.step()
        num_to_come = 11 - engine.scheduler.cache_manager.num_blocks_of("n")
        assert pool.num_free_blocks >= 3 + num_to_come
    assert tier.num_loaded
    engine.run()
    assert request.output_token_ids == oracle_tokens(PROMPTS["a"], 3, VOCAB) and request.num_cached_tokens == 32


def test_few_tokens_are_not_worth_a_load() -> None:
    engine, tier = make_engine()
    tier.min_tokens = 33
    request = add(engine, "a2")
    check_tokens(engine, request)
    assert not tier.num_loads and request.loads_blocks


def test_a_pause_does_not_make_a_load_late(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tier = make_engine(FakeTier(random.Random(1), patience_seconds=10.0, max_steps=0))
    tier.is_stuck, now = True, time.monotonic()
    request = add(engine, "a2")
    engine.step()
    monkeypatch.setattr(loading.time, "monotonic", lambda: now)
    now += 3600.0
    engine.step()
    assert tier.loads and request.status is RequestStatus.WAITING_FOR_BLOCKS
    for _ in range(21):
        now += 0.5
        engine.step()
    assert not tier.loads and not request.loads_blocks


def test_tiers_learn_which_contents_were_found_in_the_pool() -> None:
    engine, tier = make_engine()
    check_tokens(engine, add(engine, "b"))
    check_tokens(engine, add(engine, "b2"))
    for number in range(5):
        engine.scheduler.add_request(make_request(f"other {number}", [40 + number] * 44, max_tokens=1))
        engine.run()
    assert tier.used == set(block_names("b"))


def test_contents_that_were_computed_wrongly_leave_the_tier() -> None:
    engine, tier = make_engine()
    names = list(add(engine, "a2").block_hashes)
    engine.scheduler.finish_requests("a2", RequestStatus.FINISHED_ABORTED)
    request = make_request("a3", PROMPTS["a"], max_tokens=3)
    request.loads_blocks = False
    engine.scheduler.add_request(request)
    plan = engine.scheduler.schedule()
    assert tier.contents.keys() >= set(names)
    engine.scheduler.update_from_output(plan, ModelRunnerOutput({}, errors={"a3": "it broke"}))
    assert tier.contents.keys().isdisjoint(names)


def test_a_content_is_stored_once_its_step_is_done_and_only_if_no_copy_stays() -> None:
    tier = FakeTier(random.Random(1))
    scheduler = make_scheduler(num_blocks=9, block_size=4, tiers=(tier,), max_model_len=32)
    pool = scheduler.cache_manager.pool
    first, second = pool.allocate(2)
    for block in (first, second):
        pool.publish(block, b"name")
    scheduler.cache_manager.loading.begin_step(1, 0)
    pool.free([first])
    pool.allocate(7)
    assert not scheduler.cache_manager.loading.take_ops()
    pool.free([second])
    pool.allocate(1)
    assert len(scheduler.cache_manager.loading.take_ops()) == 1 and list(tier.stores) == [b"name"]

"""Groups of layers with a sliding window: blocks that expire, prefixes that need only the window, several groups over one pool."""

import pytest

from jaxllm.cache_policy import FULL, WindowPolicy
from jaxllm.config import CacheOptions
from jaxllm.errors import InvalidRequestError
from jaxllm.request import RequestStatus
from jaxllm.scheduler.block_hash import block_hasher
from jaxllm.scheduler.kv_cache_manager import KVCacheManager
from jaxllm.scheduler_output import ModelRunnerOutput
from tests.helpers.fake_runner import FakeEngine, oracle_tokens
from tests.helpers.scheduling import make_request, make_scheduler

BLOCK, VOCAB = 4, 1000
WINDOW = WindowPolicy(8)


def make_manager(*policies, num_blocks=41):
    return KVCacheManager(
        CacheOptions(block_size=BLOCK, enable_prefix_caching=True), num_blocks, policies=policies, max_step_tokens=16
    )


def request_of(request_id, num_tokens, **fields):
    request = make_request(request_id, list(range(num_tokens)), max_tokens=1000, **fields)
    request.extend_hashes = block_hasher(BLOCK, "sha256")
    request.extend_hashes(request)
    return request


def compute(manager, request, count):
    """Allocate and compute the next tokens. Returns the new block ids."""
    prefix = manager.get_computed_blocks(request) if not manager.block_ids(request.request_id) else None
    found = {} if prefix is None else {"prefix": prefix}
    new_ids = manager.allocate_slots(request, count, **found)
    request.num_computed_tokens += count + (prefix.num_computed_tokens if prefix else 0)
    manager.check_integrity([request])
    return new_ids


def engine_of(*policies, depth=1, **options):
    scheduler = make_scheduler(block_size=BLOCK, policies=policies, async_scheduling=depth > 1, **options)
    return FakeEngine(scheduler, vocab_size=VOCAB, depth=depth)


def test_blocks_before_the_window_are_freed_in_turn_and_stay_findable():
    manager = make_manager(WINDOW)
    request = request_of("a", 40)
    assert compute(manager, request, 16) == [1, 2, 3, 4]
    # Token 16 reads tokens 9 to 16, so blocks 0 and 1 of the table have expired.
    assert compute(manager, request, 4) == [5] and manager.num_blocks_of("a") == 3
    assert manager.pool.free_block_ids()[-2:] == [2, 1] and manager.pool.find(request.block_hashes[0]).block_id == 1
    assert compute(manager, request, 16) == [6, 7, 8, 9] and manager.num_blocks_of("a") == 6
    assert manager.block_ids("a") == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    manager.free(request, request.num_computed_tokens)
    assert manager.pool.num_free_blocks == 40
    assert manager.get_computed_blocks(request_of("b", 30)).num_computed_tokens == 28


def test_new_blocks_come_group_by_group():
    manager = make_manager(FULL, WINDOW, WINDOW)
    request = request_of("a", 24)
    assert compute(manager, request, 8) == [1, 2, 3, 4, 5, 6]
    assert manager.block_ids("a") == [1, 2, 3, 4, 5, 6]
    assert compute(manager, request, 4) == [7, 8, 9]
    assert manager.block_ids("a") == [1, 2, 7, 3, 4, 8, 5, 6, 9]
    assert compute(manager, request, 12) == list(range(10, 19))
    assert manager.num_blocks_of("a") == 6 + 2 * 5  # token 12 reads tokens from 5 on
    manager.free(request, request.num_computed_tokens)
    # The ends of all tables are evicted first.
    assert [i for i in manager.pool.free_block_ids() if i in (12, 15, 18, 1)] == [12, 15, 18, 1]


def test_a_prefix_needs_only_the_blocks_of_the_window():
    manager = make_manager(FULL, WINDOW)
    first = request_of("a", 32)
    compute(manager, first, 32)
    manager.free(first, 32)
    in_window = {index: manager.pool.find(first.block_hashes[index] + b"\1\0") for index in range(8)}
    for index in range(6):
        manager.pool.forget(in_window[index])
    second = request_of("b", 35)
    prefix = manager.get_computed_blocks(second)
    assert prefix.num_computed_tokens == 32 and len(prefix.blocks) == 8 + 2
    assert compute(manager, second, 3) is not None
    assert manager.block_ids("b")[9:15] == [0] * 6, "the null block stands for what is not needed"
    assert manager.num_blocks_of("b") == 9 + 3
    manager.free(second, 35)
    # Without one of them, or without a block of full attention before them, the prefix is useless.
    manager.pool.forget(in_window[7])
    assert manager.get_computed_blocks(request_of("c", 35)).num_computed_tokens == 0


def test_the_longest_prefix_serves_every_group():
    manager = make_manager(FULL, WINDOW, WindowPolicy(4))
    first = request_of("a", 32)
    compute(manager, first, 32)
    find, hashes = manager.pool.find, first.block_hashes
    for index, suffix in ((7, b""), (6, b"\2\0"), (4, b"\1\0")):
        manager.pool.forget(find(hashes[index] + suffix))
    # 7 blocks of the first group; 6 of the third; in the second 6 and 5 need block 4.
    assert manager.get_computed_blocks(request_of("b", 40)).num_computed_tokens == 16


@pytest.mark.parametrize("policies", [(WINDOW,), (FULL, WINDOW)])
def test_a_wholly_cached_prompt_computes_its_last_token(policies):
    engine = engine_of(*policies)
    prompt = list(range(24))
    for name in ("a", "b"):
        engine.scheduler.add_request(make_request(name, prompt, max_tokens=4))
        assert engine.run()[name] == oracle_tokens(prompt, 4, VOCAB)
    assert engine.plans[-4].new_requests[0].num_computed_tokens == 23
    assert engine.plans[-4].new_requests[0].num_cached_tokens == 24


def test_nothing_of_a_failed_request_stays_findable():
    engine = engine_of(WINDOW)
    scheduler = engine.scheduler
    request = make_request("a", list(range(30)), max_tokens=40)
    scheduler.add_request(request)
    for _ in range(20):
        engine.step()
    assert scheduler.cache_manager.num_blocks_of("a") == 3
    engine.dispatch()
    plan, _ = engine.in_flight[0]
    engine.in_flight[0] = (plan, ModelRunnerOutput({}, errors={"a": "it broke"}))
    engine.collect()
    assert request.status == RequestStatus.FINISHED_ERROR
    assert all(scheduler.cache_manager.pool.find(name) is None for name in request.block_hashes)
    scheduler.check_integrity()


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("caching", [True, False])
def test_a_request_holds_its_window_however_long_it_grows(depth, caching):
    engine = engine_of(WINDOW, WindowPolicy(3), depth=depth, caching=caching, num_blocks=8, max_num_batched_tokens=4)
    prompt = list(range(13))
    engine.scheduler.add_request(make_request("a", prompt, max_tokens=10 * 8 + 5))
    tokens, most = [], 0
    while engine.scheduler.has_requests():
        for output in engine.step():
            tokens += output.new_token_ids
        most = max(most, engine.scheduler.cache_manager.num_blocks_of("a"))
    assert tokens == oracle_tokens(prompt, 85, VOCAB)
    assert most == 3 + 2  # of 4 tokens each: the window, and what the next token falls into


@pytest.mark.parametrize("depth", [1, 3])
def test_requests_that_outgrow_the_pool_are_preempted_and_resumed(depth):
    engine = engine_of(FULL, WINDOW, depth=depth, num_blocks=21, max_num_batched_tokens=8)
    prompts = {name: [ord(name), *range(9)] for name in "abc"}
    for name, prompt in prompts.items():
        engine.scheduler.add_request(make_request(name, prompt, max_tokens=30))
    assert engine.run() == {name: oracle_tokens(prompt, 30, VOCAB) for name, prompt in prompts.items()}
    assert engine.scheduler.stats().num_preemptions > 0


def test_a_step_longer_than_the_window_has_blocks_for_all_its_tokens():
    engine = engine_of(WINDOW, num_blocks=12, max_num_batched_tokens=30)
    prompt = list(range(60))
    engine.scheduler.add_request(make_request("a", prompt, max_tokens=2))
    engine.step()
    assert engine.scheduler.cache_manager.num_blocks_of("a") == 8
    assert engine.run()["a"] == oracle_tokens(prompt, 2, VOCAB)


def test_what_never_fits_is_refused_with_the_blocks_that_it_needs():
    # 15 blocks of full attention; a step of 16 tokens and the 7 before it lie in at most 7 blocks.
    for num_usable in (21, 22):
        engine = engine_of(FULL, WINDOW, num_blocks=num_usable + 1, max_num_batched_tokens=16)
        request = make_request("a", 41, max_tokens=20)
        if num_usable < 22:
            with pytest.raises(InvalidRequestError, match=r"needs up to 22 blocks of the KV cache, which has 21"):
                engine.scheduler.add_request(request)
        else:
            engine.scheduler.add_request(request)
            assert len(engine.run()["a"]) == 20


@pytest.mark.parametrize(("policies", "num_longest"), [((FULL,), 2.5), ((FULL, WINDOW), 40 / (16 + 7))], ids=str)
def test_stats_say_for_how_many_of_the_longest_requests_there_is_room(policies, num_longest):
    scheduler = make_scheduler(num_blocks=41, block_size=BLOCK, max_model_len=64, max_num_batched_tokens=16, policies=policies)
    assert scheduler.cache_manager.num_blocks_for(64) == 40 / num_longest
    assert scheduler.stats().max_concurrency == pytest.approx(num_longest)


def test_reset_forgets_the_blocks_of_all_groups():
    manager = make_manager(FULL, WINDOW)
    request = request_of("a", 32)
    compute(manager, request, 32)
    manager.free(request, 32)
    assert manager.get_computed_blocks(request_of("b", 35)).num_computed_tokens == 32
    assert manager.reset_prefix_cache()
    assert manager.get_computed_blocks(request_of("b", 35)).num_computed_tokens == 0

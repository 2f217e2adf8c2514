"""Block tables and prefix sharing, with the exact block ids that the order of reuse gives."""

import pytest

from jaxllm.config import CacheOptions
from jaxllm.scheduler.block_hash import block_hasher
from jaxllm.scheduler.kv_cache_manager import KVCacheManager
from tests.helpers.scheduling import make_request

BLOCK = 16


@pytest.fixture
def manager():
    return KVCacheManager(CacheOptions(block_size=BLOCK, enable_prefix_caching=True), num_blocks=11, max_step_tokens=1000)


def request_of(request_id, tokens, **fields):
    request = make_request(request_id, tokens, max_tokens=1000, **fields)
    request.extend_hashes = block_hasher(BLOCK, "sha256")
    request.extend_hashes(request)
    return request


def admit(manager, request):
    """Compute all of a request at once. Returns the prefix that was found and the new blocks' ids."""
    prefix = manager.get_computed_blocks(request)
    new_ids = manager.allocate_slots(request, request.num_tokens - prefix.num_computed_tokens, prefix)
    if new_ids is not None:
        request.num_computed_tokens = request.num_tokens
    return prefix, new_ids


def found(prefix):
    return [block.block_id for block in prefix.blocks]


def free(manager, request):
    manager.free(request, request.num_computed_tokens)


def common(count):
    return [i for i in range(count // BLOCK) for _ in range(BLOCK)]


def test_sharing_freeing_and_reuse_in_exact_order(manager):
    a = request_of("a", common(48) + [3] * 7)
    prefix, new_ids = admit(manager, a)
    assert found(prefix) == [] and new_ids == [1, 2, 3, 4]
    blocks = manager.pool.blocks
    assert [blocks[i].block_hash for i in (1, 2, 3)] == a.block_hashes and blocks[4].block_hash is None

    b = request_of("b", common(48) + [4] * 5)
    prefix, new_ids = admit(manager, b)
    assert found(prefix) == [1, 2, 3] and prefix.num_computed_tokens == prefix.num_cached_tokens == 48
    assert new_ids == [5] and manager.block_ids("b") == [1, 2, 3, 5]
    assert [blocks[i].ref_count for i in (1, 2, 3, 4, 5)] == [2, 2, 2, 1, 1]
    manager.check_integrity([a, b])

    free(manager, a)
    free(manager, b)
    assert manager.pool.free_block_ids() == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]

    c = request_of("c", common(48) + [5] * 6)
    prefix, new_ids = admit(manager, c)
    assert found(prefix) == [1, 2, 3] and new_ids == [5]
    free(manager, c)

    d = request_of("d", [99] * 160)
    prefix, new_ids = admit(manager, d)
    assert found(prefix) == [] and new_ids == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    assert manager.pool.num_free_blocks == 0
    assert manager.get_computed_blocks(a).blocks == []
    manager.check_integrity([d])


def test_least_recently_freed_is_evicted_first(manager):
    a = request_of("a", common(80) + [5] * 7)
    assert admit(manager, a)[1] == [1, 2, 3, 4, 5, 6]
    b = request_of("b", [100 + i for i in range(48)])
    assert admit(manager, b)[1] == [7, 8, 9]
    free(manager, a)
    assert manager.pool.free_block_ids() == [6, 10, 5, 4, 3, 2, 1]
    free(manager, b)
    assert manager.pool.free_block_ids() == [6, 10, 5, 4, 3, 2, 1, 9, 8, 7]

    c = request_of("c", common(32) + [77] * 3)
    prefix, new_ids = admit(manager, c)
    assert found(prefix) == [1, 2] and prefix.num_computed_tokens == 32
    assert new_ids == [6] and manager.pool.num_free_blocks == 7


def test_a_block_is_published_when_decoding_fills_it(manager):
    request = request_of("a", common(48) + [3] * 7)
    admit(manager, request)
    blocks = manager.pool.blocks
    for _ in range(4):
        request.append_output(8)
    assert manager.allocate_slots(request, 4) == [] and blocks[4].block_hash is None
    request.num_computed_tokens += 4
    for _ in range(19):
        request.append_output(9)
    assert manager.allocate_slots(request, 19) == [5]
    request.num_computed_tokens += 19
    assert blocks[4].block_hash == request.block_hashes[3] and blocks[5].block_hash is None
    manager.check_integrity([request])


def test_too_few_blocks_change_nothing(manager):
    a = request_of("a", common(48))
    admit(manager, a)
    b = request_of("b", common(96))
    assert found(admit(manager, b)[0]) == [1, 2, 3]
    free(manager, b)
    assert manager.pool.free_block_ids() == [7, 8, 9, 10, 6, 5, 4]
    c = request_of("c", [50] * 80)
    assert admit(manager, c)[1] == [7, 8, 9, 10, 6]

    d = request_of("d", common(144))
    prefix, new_ids = admit(manager, d)
    assert found(prefix) == [1, 2, 3, 4, 5] and new_ids is None
    assert [manager.pool.blocks[i].ref_count for i in (1, 2, 3, 4, 5)] == [1, 1, 1, 0, 0]
    assert manager.pool.free_block_ids() == [5, 4] and manager.block_ids("d") == []
    manager.check_integrity([a, c])


def test_found_blocks_that_nobody_uses_count_as_needed(manager):
    a = request_of("a", common(32))
    admit(manager, a)
    free(manager, a)
    admit(manager, request_of("b", [50] * 112))
    assert manager.pool.num_free_blocks == 3
    c = request_of("c", common(32) + [9] * 20)
    assert admit(manager, c)[1] is None  # 2 found + 2 new > 3


def test_a_found_block_is_never_evicted_for_the_request_that_found_it(manager):
    a = request_of("a", common(160))
    admit(manager, a)
    free(manager, a)
    b = request_of("b", common(80) + [60] * 80)
    prefix, new_ids = admit(manager, b)
    assert found(prefix) == [1, 2, 3, 4, 5] and new_ids == [10, 9, 8, 7, 6]
    manager.check_integrity([b])


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_a_wholly_cached_request_computes_one_token_from_shared_blocks(manager, num_blocks):
    a, b = request_of("a", common(BLOCK * num_blocks)), request_of("b", common(BLOCK * num_blocks))
    admit(manager, a)
    prefix, new_ids = admit(manager, b)
    assert prefix.num_computed_tokens == BLOCK * num_blocks - 1 and prefix.num_cached_tokens == BLOCK * num_blocks
    assert new_ids == [] and manager.block_ids("a") == manager.block_ids("b")
    manager.check_integrity([a, b])
    b.append_output(5)
    assert manager.allocate_slots(b, 1) == [num_blocks + 1]
    free(manager, a)
    free(manager, b)
    assert manager.pool.num_free_blocks == 10
    manager.check_integrity([])


def test_equal_content_computed_at_the_same_time_keeps_both_blocks(manager):
    a, b = request_of("a", common(32)), request_of("b", common(32))
    for request in (a, b):  # both looked up before either was published
        manager.allocate_slots(request, 8)
        request.num_computed_tokens = 8
    for request in (a, b):
        manager.allocate_slots(request, 24)
        request.num_computed_tokens = 32
    assert manager.block_ids("a") == [1, 3] and manager.block_ids("b") == [2, 4]
    manager.check_integrity([a, b])
    free(manager, a)
    admit(manager, request_of("c", [70] * 128))  # takes everything, evicts a's
    assert found(manager.get_computed_blocks(request_of("d", common(32)))) == [2, 4]


def test_salts_separate_and_equal_salts_share(manager):
    admit(manager, request_of("a", common(32), cache_salt="x"))
    assert found(manager.get_computed_blocks(request_of("b", common(32)))) == []
    assert found(manager.get_computed_blocks(request_of("c", common(32), cache_salt="y"))) == []
    assert found(manager.get_computed_blocks(request_of("d", common(32), cache_salt="x"))) == [1, 2]


@pytest.mark.parametrize("params", [{"prompt_logprobs": 1}, {"prompt_logprobs": 0}, {"skip_reading_prefix_cache": True}])
def test_who_does_not_read_the_cache_still_writes_it(manager, params):
    admit(manager, request_of("a", common(32)))
    b = request_of("b", common(48), **params)
    prefix, new_ids = admit(manager, b)
    assert found(prefix) == [] and new_ids == [3, 4, 5]
    assert found(manager.get_computed_blocks(request_of("c", common(48)))) == [1, 2, 5]


def test_reset_forgets_everything_once_nothing_is_used(manager):
    a = request_of("a", common(48))
    admit(manager, a)
    assert not manager.reset_prefix_cache()
    assert found(manager.get_computed_blocks(request_of("b", common(48)))) == [1, 2, 3]
    free(manager, a)
    assert manager.reset_prefix_cache()
    assert found(manager.get_computed_blocks(request_of("c", common(48)))) == []


def test_without_caching_nothing_is_found():
    manager = KVCacheManager(CacheOptions(block_size=BLOCK, enable_prefix_caching=False), num_blocks=11, max_step_tokens=1000)
    a, b = make_request("a", common(48)), make_request("b", common(48))
    admit(manager, a)
    prefix, new_ids = admit(manager, b)
    assert found(prefix) == [] and new_ids == [4, 5, 6]
    free(manager, a)
    assert manager.pool.free_block_ids() == [3, 2, 1, 7, 8, 9, 10]


def test_only_valid_blocks_stay_findable_after_freeing(manager):
    a, b = request_of("a", common(32)), request_of("b", common(64))
    admit(manager, a)
    admit(manager, b)
    manager.free(b, num_valid_tokens=50)  # 3 of its blocks are sound
    assert found(manager.get_computed_blocks(request_of("c", common(64)))) == [1, 2, 3]
    c = request_of("c", common(64))
    admit(manager, c)
    manager.free(c, num_valid_tokens=0)  # what it found was another's work
    assert found(manager.get_computed_blocks(request_of("d", common(64)))) == [1, 2, 3]
    manager.check_integrity([a])


def test_integrity_check_sees_wrong_sharing(manager):
    a, b = request_of("a", common(32)), request_of("b", [9] * 32)
    admit(manager, a)
    admit(manager, b)
    manager.check_integrity([a, b])
    (table_a,), (table_b,) = (manager._tables[name].groups for name in "ab")
    table_b.blocks[0] = table_a.blocks[0]
    with pytest.raises(AssertionError):
        manager.check_integrity([a, b])

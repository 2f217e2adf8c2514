"""Blocks: free, findable, evicted."""

import pytest

from jaxllm.scheduler.block_pool import BlockPool


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(5)
    assert pool.num_usable_blocks == pool.num_free_blocks == 4
    assert [block.block_id for block in pool.allocate(4)] == [1, 2, 3, 4]
    with pytest.raises(IndexError):
        pool.allocate(1)
    pool.check_integrity()


def test_two_blocks_with_the_same_content_are_both_kept_and_the_other_survives_one():
    pool = BlockPool(5)
    a, b, c = pool.allocate(3)
    for block in (a, b, c):
        pool.publish(block, b"same")
    assert pool.find(b"same") is a
    pool.check_integrity()
    pool.free([a])
    assert pool.find(b"same") is b  # taking one that is used costs nothing
    pool.forget(a)
    assert pool.find(b"same") is b
    pool.forget(b)
    assert pool.find(b"same") is c
    pool.check_integrity()
    pool.forget(c)
    assert pool.find(b"same") is None


def test_reuse_removes_the_old_content_from_the_map():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.publish(blocks[0], b"x")
    pool.free(blocks)
    assert pool.find(b"x") is blocks[0]
    assert pool.allocate(1) == [blocks[1]]  # the one that holds nothing goes first
    assert pool.find(b"x") is blocks[0]
    assert pool.allocate(1) == [blocks[0]]
    assert pool.find(b"x") is None
    pool.check_integrity()


def test_a_touched_block_leaves_the_queue_and_returns_after_its_last_user():
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.publish(block, b"x")
    pool.free([block])
    pool.touch([block])
    pool.touch([block])
    assert block.ref_count == 2 and pool.num_free_blocks == 2
    pool.free([block])
    assert pool.num_free_blocks == 2
    pool.free([block])
    assert pool.free_block_ids() == [2, 3, 1]
    pool.check_integrity()


def test_freeing_twice_is_noticed():
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


def test_reset_waits_until_every_block_is_free():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.publish(blocks[0], b"x")
    assert not pool.reset() and pool.find(b"x") is blocks[0]
    pool.free(blocks)
    assert pool.reset() and pool.find(b"x") is None
    pool.check_integrity()


def test_usage():
    pool = BlockPool(11)
    assert pool.usage == 0.0
    pool.allocate(5)
    assert pool.usage == 0.5

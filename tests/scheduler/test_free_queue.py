"""The queue of free blocks."""

import pytest

from jaxllm.scheduler.block import KVCacheBlock
from jaxllm.scheduler.free_queue import FreeBlockQueue


def make(count):
    blocks = [KVCacheBlock(i) for i in range(count)]
    return blocks, FreeBlockQueue(blocks)


def ids(blocks):
    return [block.block_id for block in blocks]


def test_initial_order_is_block_id():
    _, queue = make(5)
    assert ids(queue) == [0, 1, 2, 3, 4] and len(queue) == 5


def test_popleft_takes_the_front():
    _, queue = make(3)
    assert queue.popleft().block_id == 0
    assert ids(queue) == [1, 2] and len(queue) == 2


def test_popleft_n_keeps_order():
    _, queue = make(5)
    assert ids(queue.popleft_n(3)) == [0, 1, 2]
    assert ids(queue.popleft_n(0)) == []
    assert ids(queue) == [3, 4]
    queue.check_integrity()


def test_append_n_and_prepend_n_keep_the_given_order():
    _, queue = make(1)
    queue.append_n([KVCacheBlock(10), KVCacheBlock(11)])
    queue.prepend_n([KVCacheBlock(20), KVCacheBlock(21)])
    assert ids(queue) == [20, 21, 0, 10, 11] and len(queue) == 5
    queue.append_n([])
    queue.prepend_n([])
    queue.check_integrity()


@pytest.mark.parametrize("index", [0, 2, 4])
def test_remove_from_anywhere(index):
    blocks, queue = make(5)
    queue.remove(blocks[index])
    assert ids(queue) == [i for i in range(5) if i != index] and len(queue) == 4
    assert blocks[index].previous_free is None and blocks[index].next_free is None
    queue.check_integrity()


def test_drain_and_refill():
    blocks, queue = make(4)
    assert ids(queue.popleft_n(4)) == [0, 1, 2, 3]
    assert len(queue) == 0 and list(queue) == []
    queue.append_n(reversed(blocks))
    assert ids(queue) == [3, 2, 1, 0] and len(queue) == 4
    queue.check_integrity()


def test_popping_an_empty_queue_raises_and_changes_nothing():
    _, queue = make(1)
    with pytest.raises(IndexError, match="2 blocks asked of a free queue that holds 1"):
        queue.popleft_n(2)
    assert ids(queue) == [0]
    queue.popleft()
    with pytest.raises(IndexError):
        queue.popleft()


def test_removing_a_block_that_is_not_in_the_queue_raises():
    _, queue = make(2)
    block = queue.popleft()
    with pytest.raises(ValueError, match="not in the free queue"):
        queue.remove(block)

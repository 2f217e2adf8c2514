"""Orders of the waiting queue."""

import random

import pytest

from jaxllm.scheduler.scheduling_policies import make_waiting_queue
from tests.helpers.scheduling import make_request


def drain(queue):
    return [queue.pop().request_id for _ in range(len(queue))]


def test_fcfs_keeps_arrival_order_and_puts_back_in_front():
    queue = make_waiting_queue("fcfs")
    for name in "abc":
        queue.add(make_request(name, 1, priority=-ord(name)))
    first = queue.pop()
    assert queue.peek().request_id == "b"
    queue.put_back(first)
    assert drain(queue) == ["a", "b", "c"]


def test_priority_orders_by_priority_then_arrival_then_id():
    queue = make_waiting_queue("priority")
    for name, priority, arrival in [("e", 1, 0), ("d", 0, 5), ("b", 0, 1), ("c", 0, 1), ("a", -1, 9)]:
        queue.add(make_request(name, 1, priority=priority, arrival=arrival))
    assert drain(queue) == ["a", "b", "c", "d", "e"]


def test_priority_gives_no_boost_to_who_is_put_back():
    queue = make_waiting_queue("priority")
    late = make_request("late", 1, priority=5)
    queue.add(make_request("soon", 1, priority=1))
    queue.put_back(late)
    assert drain(queue) == ["soon", "late"]


@pytest.mark.parametrize("policy", ["fcfs", "fair", "priority"])
def test_removal_from_anywhere_keeps_the_order_of_the_rest(policy):
    rng = random.Random(0)
    queue = make_waiting_queue(policy)
    requests = [make_request(f"r{i:03}", 1, arrival=i) for i in range(300)]
    for request in requests:
        queue.add(request)
    gone = set(rng.sample(range(300), 250)) | {0}
    for i in sorted(gone, key=lambda _: rng.random()):
        queue.remove(requests[i])
    assert len(queue) == len(list(queue)) == 300 - len(gone)
    assert drain(queue) == [f"r{i:03}" for i in range(300) if i not in gone]


@pytest.mark.parametrize("policy", ["fcfs", "fair", "priority"])
def test_an_id_may_come_again_after_removal(policy):
    queue = make_waiting_queue(policy)
    old, new = make_request("a", 1), make_request("a", 2)
    queue.add(old)
    queue.remove(old)
    queue.add(new)
    assert queue.pop() is new and len(queue) == 0

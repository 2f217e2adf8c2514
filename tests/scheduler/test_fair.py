"""The fair policy: clients in turn by tokens, and places for those that have none."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.request import RequestStatus
from jaxllm.scheduler import fair_queue, scheduling_policies
from jaxllm.scheduler.fair_queue import FairQueue
from jaxllm.scheduler.scheduling_policies import Turns
from tests.helpers.scheduling import make_request, make_scheduler, step


def fair_scheduler(**options):
    scheduler = make_scheduler(scheduling_policy="fair", caching=False, **options)
    scheduler._turns = Turns(patience_seconds=0)
    return scheduler


def ids(requests):
    return [request.request_id for request in requests]


def drain(queue):
    return "".join(queue.pop().request_id[0] for _ in range(len(queue)))


def test_clients_take_turns_by_the_tokens_of_their_prompts():
    queue = FairQueue()
    for client, count, num_tokens in (("a", 6, 10), ("b", 3, 20), ("c", 2, 30)):
        for number in range(count):
            queue.add(make_request(f"{client}{number}", num_tokens, client=client))
    assert drain(queue) == "abcabacabaa"


def test_a_client_that_comes_later_has_saved_nothing_up():
    queue = FairQueue()
    for number in range(9):
        queue.add(make_request(f"a{number}", 10, client="a"))
    for _ in range(5):
        queue.pop()
    for number in range(3):
        queue.add(make_request(f"b{number}", 10, client="b"))
    assert drain(queue) == "abababa"


def test_outputs_are_charged_when_requests_end():
    queue = FairQueue()
    for number in range(3):
        for client in "ab":
            queue.add(make_request(f"{client}{number}", 10, client=client))
    first = queue.pop()
    first.token_ids += [7] * 15
    queue.note_end(first)
    assert drain(queue) == "bbbaa"


def test_who_is_put_back_is_first_again_and_who_gives_way_is_not():
    for put, expected in (("put_back", "aba"), ("give_way", "baa")):
        queue = FairQueue()
        for name in ("a0", "a1", "b0"):
            queue.add(make_request(name, 10, client=name[0]))
        getattr(queue, put)(queue.pop())
        assert drain(queue) == expected


class Oracle:
    """The queue's rule, without any structure: the client with the least clock, then the one that got its clock first."""

    def __init__(self):
        self.lines, self.clocks, self.order, self.charged, self.numbers = {}, {}, {}, {}, itertools.count()

    def next_client(self):
        waiting = [client for client in self.lines if self.lines[client]]
        return min(waiting, key=lambda name: (self.clocks[name], self.order[name]), default=None)

    def least(self):
        client = self.next_client()
        return 0 if client is None else self.clocks[client]

    def set(self, client, clock, sign=1):
        self.clocks[client], self.order[client] = clock, sign * next(self.numbers)

    def add(self, request):
        client = request.options.client
        if self.next_client() is None:
            self.clocks, self.charged = {}, {}
        if not self.lines.setdefault(client, []):
            self.set(client, max(self.clocks.get(client, 0), self.least()))
        self.lines[client].append(request)

    def pop(self):
        client = self.next_client()
        request = self.lines[client].pop(0)
        self.set(client, self.clocks[client] + request.num_prompt_tokens)
        self.charged[request] = request.num_output_tokens
        return request

    def put_back(self, request):
        client = request.options.client
        self.set(client, self.clocks.get(client, self.least()) - request.num_prompt_tokens, -1)
        self.lines.setdefault(client, []).insert(0, request)

    def give_way(self, request):
        client = request.options.client
        self.set(client, max(self.clocks.get(client, 0), self.least()))
        self.lines.setdefault(client, []).insert(0, request)

    def remove(self, request):
        self.lines[request.options.client].remove(request)

    def note_output(self, request):
        client = request.options.client
        num_new = request.num_output_tokens - self.charged.get(request, request.num_output_tokens)
        self.charged[request] = request.num_output_tokens
        if self.next_client() is not None and num_new:
            self.set(client, self.clocks.get(client, self.least()) + num_new)

    def note_end(self, request):
        self.note_output(request)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), num_clients=st.sampled_from([1, 2, 5, 40]))
def test_the_queue_does_what_its_rule_says(seed, num_clients):
    rng = random.Random(seed)
    queue, oracle, waiting, taken = FairQueue(), Oracle(), [], []
    for number in range(300):
        kind = rng.random()
        if kind < 0.45:
            request = make_request(f"r{number}", rng.choice([1, 1, 5, 100]), client=str(rng.randrange(num_clients)))
            for each in (queue, oracle):
                each.add(request)
            waiting.append(request)
        elif kind < 0.7 and waiting:
            request = queue.peek()
            assert queue.pop() is request is oracle.pop()
            waiting.remove(request)
            taken.append(request)
        elif kind < 0.8 and waiting:
            request = waiting.pop(rng.randrange(len(waiting)))
            for each in (queue, oracle):
                each.remove(request)
        elif taken:
            request, what = (
                taken.pop(rng.randrange(len(taken))),
                rng.choice(["put_back", "give_way", "note_output", "note_end"]),
            )
            request.token_ids += [7] * rng.choice([0, 3, 50])
            for each in (queue, oracle):
                getattr(each, what)(request)
            if what == "note_output":
                taken.append(request)
            elif what != "note_end":
                waiting.append(request)
        queue.check_integrity()
    while waiting:
        waiting.remove(queue.peek())
        assert queue.pop() is oracle.pop()


def test_new_clients_do_not_hold_up_who_waits_and_are_forgotten(monkeypatch):
    monkeypatch.setattr(fair_queue, "MAX_REMEMBERED", 100)
    queue = FairQueue()
    for number in range(500):
        queue.add(make_request(f"r{number}", 1, client=str(number)))
        if number:
            assert queue.pop().request_id == f"r{number - 1}"
    assert len(queue._clocks) <= 103 and len(queue._heap) <= 260


def test_a_client_gets_places_of_one_that_holds_them_all_until_both_have_half():
    scheduler = fair_scheduler(max_num_seqs=4)
    for number in range(6):
        scheduler.add_request(make_request(f"a{number}", 5, client="a", max_tokens=500))
    step(scheduler)
    for number in range(3):
        scheduler.add_request(make_request(f"b{number}", 5, client="b", max_tokens=500))
    step(scheduler)  # they came after the step that left others waiting
    for _ in range(20):
        step(scheduler)
    assert ids(scheduler.running) == ["a0", "a1", "b0", "b1"]
    assert scheduler.requests["a3"].num_preemptions == 1 and scheduler.stats().num_preemptions == 2


def test_nobody_gives_way_before_the_next_in_line_has_waited(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    scheduler = make_scheduler(scheduling_policy="fair", max_num_seqs=3)
    for number in range(4):
        scheduler.add_request(make_request(f"a{number}", 5, client="a", max_tokens=500))
    step(scheduler)
    scheduler.add_request(make_request("b", 5, client="b", max_tokens=500))
    for seconds in (0, scheduling_policies.PATIENCE_SECONDS - 0.1):
        now[0] = 100.0 + seconds
        step(scheduler)
        assert ids(scheduler.running) == ["a0", "a1", "a2"]
    now[0] = 100.0 + scheduling_policies.PATIENCE_SECONDS
    step(scheduler)
    assert ids(scheduler.running) == ["a0", "a1", "b"]


def test_blocks_are_given_up_too():
    scheduler = fair_scheduler(num_blocks=41, block_size=4, max_model_len=160, max_num_seqs=8)
    for number in range(4):
        scheduler.add_request(make_request(f"a{number}", 36, client="a", max_tokens=100))
    step(scheduler)
    scheduler.add_request(make_request("b", 30, client="b", max_tokens=8))
    for _ in range(30):
        step(scheduler)
    assert "b" not in scheduler.requests and len(scheduler.running) < 8


def test_when_blocks_run_out_the_newcomer_stays_and_the_client_with_the_most_tokens_gives_up_its_latest():
    scheduler = fair_scheduler(num_blocks=14, block_size=4, max_model_len=52, max_num_seqs=8)
    for name, num_tokens in (("a0", 14), ("a1", 14), ("b0", 12)):
        scheduler.add_request(make_request(name, num_tokens, client=name[0], max_tokens=30))
    for _ in range(8):
        step(scheduler)
    assert ids(scheduler.running) == ["a0", "b0"] and ids(scheduler.waiting) == ["a1"]


def test_held_requests_leave_their_places_and_come_back_first():
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abcd":
        scheduler.add_request(make_request(name, 5, max_tokens=50))
    step(scheduler)
    scheduler.hold_requests(["a", "d", "nobody"])
    step(scheduler)
    assert ids(scheduler.running) == ["b", "c"] and set(scheduler.held) == {"a", "d"}
    scheduler.hold_requests("bc")
    step(scheduler)
    assert not scheduler.has_requests() and len(scheduler.requests) == 4 and not scheduler.holds_blocks
    scheduler.release_requests("da")
    step(scheduler)
    assert ids(scheduler.running) == ["a", "d"] and scheduler.requests["a"].num_output_tokens == 2
    assert sorted(scheduler.finish_requests([*"abcd"], RequestStatus.FINISHED_ABORTED)) == [*"abcd"]
    scheduler.check_integrity()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_other_policies_take_no_places_away(policy):
    scheduler = make_scheduler(scheduling_policy=policy, max_num_seqs=2)
    for name in ("a0", "a1", "a2", "b0"):
        scheduler.add_request(make_request(name, 5, client=name[0], max_tokens=50))
        scheduler.requests[name].queued_at -= 100
    for _ in range(5):
        step(scheduler)
    assert ids(scheduler.running) == ["a0", "a1"]

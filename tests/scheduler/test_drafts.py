"""Steps with several tokens a row: what drafts may take from other requests, and what they may not."""

import random
from collections.abc import Sequence

import pytest

from jaxllm.cache_policy import FULL, WindowPolicy, num_blocks_for
from jaxllm.request import Request
from tests.helpers.fake_runner import FakeEngine, RandomDrafts, oracle_tokens
from tests.helpers.scheduling import make_request, make_scheduler


class AllDrafts(RandomDrafts):
    """Each request gets the most drafts in each step."""

    def __init__(self, num_drafts: int, *, num_lookahead: int = 0, share_right: float = 1.0):
        super().__init__(random.Random(0), num_drafts=num_drafts, num_lookahead=num_lookahead, share_right=share_right)

    def most(self, num_running: int, running: Sequence[Request] = ()) -> int:
        self.num_now = self.num_drafts
        return self.num_drafts

    def of(self, request) -> int:
        return self.num_drafts


@pytest.mark.parametrize("policies", [(FULL,), (WindowPolicy(6),), (FULL, WindowPolicy(6))], ids=str)
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("step_tokens", [1, 2, 5])
def test_a_request_ends_in_the_fewest_blocks_that_admit_it(policies, depth, step_tokens):
    """The positions that a drafter writes to behind the tokens are not counted among those blocks."""
    length = 41
    scheduler = make_scheduler(
        num_blocks=1 + num_blocks_for(policies, length - 1, 4, step_tokens),
        block_size=4,
        max_num_batched_tokens=step_tokens,
        policies=policies,
        async_scheduling=depth > 1,
        drafts=AllDrafts(5, num_lookahead=4, share_right=0.5),
    )
    scheduler.add_request(make_request("a", 13, max_tokens=length - 13))
    prompt = list(scheduler.requests["a"].token_ids)
    tokens = FakeEngine(scheduler, depth=depth).run()
    assert tokens == {"a": oracle_tokens(prompt, length - 13, 1000)}


def test_drafts_give_way_before_a_request_is_preempted():
    """A draft would lie in a block that only another request could give."""
    scheduler = make_scheduler(num_blocks=4, block_size=4, drafts=AllDrafts(4))
    for name, length, max_tokens in (("a", 7, 3), ("b", 3, 2)):
        scheduler.add_request(make_request(name, length, max_tokens=max_tokens))
    engine = FakeEngine(scheduler)
    engine.step()
    assert [(row.request_id, row.num_drafts) for row in scheduler.schedule().rows] == [("a", 0), ("b", 0)]


@pytest.mark.parametrize(("max_tokens", "budget", "drafts"), [(9, 64, 4), (4, 64, 2), (2, 64, 0), (9, 3, 2), (9, 1, 0)])
def test_no_more_drafts_than_tokens_to_come_and_room_in_the_step(max_tokens, budget, drafts):
    scheduler = make_scheduler(max_num_batched_tokens=budget, drafts=AllDrafts(4))
    scheduler.add_request(make_request("a", 1, max_tokens=max_tokens))
    engine = FakeEngine(scheduler)
    engine.step()
    assert [row.num_drafts for row in scheduler.schedule().rows] == [drafts]


def test_a_drafter_gets_slots_behind_the_tokens_but_none_behind_the_last_of_a_request():
    scheduler = make_scheduler(num_blocks=100, block_size=4, max_num_batched_tokens=18, drafts=AllDrafts(2, num_lookahead=5))
    for name, num_prompt, max_tokens in (("long", 6, 99), ("short", 6, 3), ("chunk", 32, 9)):
        scheduler.add_request(make_request(name, num_prompt, max_tokens=max_tokens))
    scheduler.schedule()  # of the last prompt only 6 tokens, after which it draws nothing
    assert [scheduler.cache_manager.num_blocks_of(name) for name in ("long", "short", "chunk")] == [3, 2, 2]


def test_drafts_leave_room_to_a_prompt_beside_many_decodes():
    """A step with decodes is smaller than usual only if these take a small part of it, with their drafts."""
    scheduler = make_scheduler(max_num_batched_tokens=3072, max_num_seqs=300, drafts=AllDrafts(5))
    for number in range(200):
        scheduler.add_request(make_request(f"r{number}", 1, max_tokens=99))
    engine = FakeEngine(scheduler)
    engine.step()
    scheduler.add_request(make_request("prompt", 100))
    assert [row.num_tokens for row in scheduler.schedule().rows] == [6] * 200 + [100]


@pytest.mark.parametrize("share_right", [0.0, 0.5, 1.0])
def test_steps_with_drafts_are_counted_by_what_they_accepted(share_right):
    scheduler = make_scheduler(drafts=AllDrafts(3, share_right=share_right))
    scheduler.add_request(make_request("a", 5, max_tokens=20))
    request, engine = scheduler.requests["a"], FakeEngine(scheduler)
    outputs = []
    while scheduler.has_requests():
        outputs += engine.step()
    counts = outputs[-1].accepted_counts
    assert counts is not None and counts == tuple(request.accepted_counts)
    num_accepted = sum(number * count for number, count in enumerate(counts))
    plans = [row.num_drafts for plan in engine.plans for row in plan.rows if row.num_drafts]
    assert (sum(counts), outputs[-1].num_draft_tokens) == (len(plans), sum(plans))
    assert num_accepted == {0.0: 0, 1.0: sum(plans)}.get(share_right, num_accepted)

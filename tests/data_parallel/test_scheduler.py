"""The schedulers of data-parallel ranks as one, without devices."""

import random
from dataclasses import replace

import pytest

from jaxllm.config import CacheOptions, SchedulerOptions
from jaxllm.data_parallel.scheduler import RanksScheduler
from jaxllm.errors import InvalidRequestError, OverloadedError
from jaxllm.request import ErrorKind, Request, RequestStatus
from jaxllm.request_options import RequestOptions
from jaxllm.scheduler.errors import UpdateError
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler_output import ModelRunnerOutput
from jaxllm.speculative.control import AdaptiveControl
from tests.helpers import engines
from tests.helpers.fake_tier import FakeTier
from tests.helpers.scheduling import make_scheduler

NUM_RANKS = 3


def new_ranks(*, num_blocks=40, drafts=None, **options):
    options = SchedulerOptions(**{"max_num_seqs": 2, "max_num_batched_tokens": 64, **options})
    cache = CacheOptions(block_size=4, enable_prefix_caching=True)
    more = {"num_blocks": num_blocks, "max_model_len": 64, "drafts": drafts}
    return RanksScheduler(lambda: Scheduler(options, cache, **more), NUM_RANKS)


def add(scheduler, name, prompt, *, max_tokens=4, rank=None, **fields):
    spec = replace(
        engines.request(name, list(prompt), max_tokens=max_tokens), options=RequestOptions(data_parallel_rank=rank, **fields)
    )
    scheduler.add_request(Request(spec))


def step(scheduler):
    """Compute a step: every request that reaches the end of its tokens gets a 7. Returns the plan and the outputs."""
    plan = scheduler.schedule()
    drawn = {}
    for rank, part in zip(scheduler.ranks, plan.ranks, strict=True):
        for row in part.rows:
            request = rank.requests[row.request_id]
            if row.start + row.num_tokens >= request.num_tokens:
                drawn[row.request_id] = [7]
    outputs = scheduler.update_from_output(plan, ModelRunnerOutput(drawn))
    scheduler.check_integrity()
    return plan, outputs


def ranks_of(scheduler):
    return [sorted(rank.requests) for rank in scheduler.ranks]


def test_a_plan_has_the_parts_of_all_ranks():
    scheduler = new_ranks()
    add(scheduler, "a", range(5), rank=1)
    add(scheduler, "b", range(9), rank=2)
    plan, _ = step(scheduler)
    assert [part.num_tokens for part in plan.ranks] == [0, 5, 9] and plan.num_tokens == 14
    assert plan.num_scheduled_tokens == {"a": 5, "b": 9}
    assert [data.request_id for data in plan.new_requests] == ["a", "b"]
    scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    plan, _ = step(scheduler)
    assert plan.finished_request_ids == ["a"] and plan.ranks[1].finished_request_ids == ["a"]
    assert [*scheduler.requests] == ["b"] and len(scheduler.requests) == 1 and scheduler.has_requests()


def test_each_rank_waits_for_blocks_of_its_own_tiers():
    tiers = [FakeTier(random.Random(1), max_steps=0) for _ in range(2)]
    own = iter(tiers)
    scheduler = RanksScheduler(lambda: make_scheduler(block_size=4, max_model_len=64, tiers=(next(own),)), 2)
    for rank in (0, 1):
        add(scheduler, str(rank), range(9), rank=rank)
    tiers[1].contents = {name: ["content"] for name in scheduler.requests["1"].block_hashes}
    plan, _ = step(scheduler)
    assert list(plan.num_scheduled_tokens) == ["0"] and scheduler.requests["1"].status is RequestStatus.WAITING_FOR_BLOCKS
    plan, _ = step(scheduler)
    assert plan.ops == plan.ranks[1].ops != () == plan.ranks[0].ops
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {"0": 1, "1": 1} and plan.new_requests[0].num_cached_tokens == 8


def test_requests_spread_over_ranks_and_follow_cached_prefixes():
    scheduler = new_ranks()
    for i in range(NUM_RANKS):
        add(scheduler, str(i), range(20 * i, 20 * i + 16), max_tokens=1)
    assert [len(rank.requests) for rank in scheduler.ranks] == [1, 1, 1]
    homes = {name: index for index, names in enumerate(ranks_of(scheduler)) for name in names}
    step(scheduler)
    assert not scheduler.has_requests() and not scheduler.holds_blocks
    for i in (2, 0, 1, 1):
        add(scheduler, f"{i} again", [*range(20 * i, 20 * i + 16), 99], max_tokens=1)
        assert f"{i} again" in scheduler.ranks[homes[str(i)]].requests
        step(scheduler)
    assert scheduler.stats().prefix_cache_hits == 4 * 16
    assert scheduler.reset_prefix_cache()


def test_a_session_stays_in_its_rank():
    scheduler = new_ranks(max_num_seqs=4)
    for number, session in enumerate("aabbab"):
        add(scheduler, f"{session}{number}", [number] * 8, session_id=session)
    assert ranks_of(scheduler) == [["a0", "a1", "a4"], ["b2", "b3", "b5"], []]


def test_what_did_not_fit_goes_where_none_waits():
    scheduler = new_ranks()
    for name in ("a", "b"):
        add(scheduler, name, range(4), max_tokens=20, rank=0)
    add(scheduler, "stays", range(4), rank=0)
    for name in ("c", "d"):
        add(scheduler, name, range(4), max_tokens=20, rank=1)
    for name in ("e", "f"):
        add(scheduler, name, range(4), max_tokens=2, rank=2)
    for name in ("g", "h", "i"):  # all data-parallel ranks are full
        add(scheduler, name, range(50, 54), max_tokens=20, timeout_seconds=100.0)
    before = {name: index for index, names in enumerate(ranks_of(scheduler)) for name in names}
    for _ in range(5):
        step(scheduler)
    assert "stays" in scheduler.ranks[0].requests  # where its client wants it
    moved = [name for name in ("g", "h", "i") if name in scheduler.ranks[2].requests]
    assert len(moved) >= 2 and {scheduler.requests[name].status for name in moved[:2]} == {RequestStatus.RUNNING}
    assert any(before[name] != 2 for name in moved)
    assert [*scheduler.requests] == ["a", "b", "stays", "c", "d", "g", "h", "i"]  # in the order of arrival
    scheduler.fail_requests(moved, ErrorKind.TIMEOUT, "late")
    assert not {*moved} & {*scheduler.requests}


def test_limits_are_those_of_a_rank():
    scheduler = new_ranks(max_num_queued_reqs=1)
    for name in ("a", "b", "c"):
        add(scheduler, name, range(4), max_tokens=20, rank=0)
    step(scheduler)
    with pytest.raises(OverloadedError):
        [add(scheduler, name, range(4), rank=0) for name in ("d", "e", "f")]
    with pytest.raises(InvalidRequestError, match="must be 0 to 2"):
        add(scheduler, "g", range(4), rank=3)
    with pytest.raises(InvalidRequestError, match="in use"):
        add(scheduler, "a", range(4), rank=1)
    assert scheduler.stats().num_rejected_for_requests == 1


def test_after_a_failure_in_one_rank_the_outputs_of_the_others_are_returned(monkeypatch):
    scheduler = new_ranks()
    for rank in range(NUM_RANKS):
        add(scheduler, str(rank), range(4), rank=rank)
    plan = scheduler.schedule()
    monkeypatch.setattr(scheduler.ranks[1], "drafts", "broken")
    with pytest.raises(UpdateError) as caught:
        scheduler.update_from_output(plan, ModelRunnerOutput({"0": [7], "1": [7], "2": [7]}))
    assert [output.request_id for output in caught.value.outputs] == ["0"]


@pytest.mark.parametrize("seed", range(4))
def test_any_traffic_ends_with_every_request_done_and_no_block_held(seed):
    rng = random.Random(seed)
    scheduler = new_ranks(num_blocks=rng.choice([18, 40]), max_num_batched_tokens=rng.choice([16, 64]))
    lengths = {}
    for number in range(400):
        if number < 200 and rng.random() < 0.5:
            name = f"{number}"
            lengths[name] = rng.randint(1, 12)
            prompt = [rng.randint(0, 3) for _ in range(rng.randint(1, 40))]
            add(scheduler, name, prompt, max_tokens=lengths[name], rank=rng.choice([None, None, 0, 2]))
        if rng.random() < 0.05 and lengths:
            gone = rng.choice([*lengths])
            scheduler.finish_requests(gone, RequestStatus.FINISHED_ABORTED)
            del lengths[gone]
        if number == 100:
            scheduler.start_over()
        for output in step(scheduler)[1]:
            if output.finish_reason is not None:
                lengths.pop(output.request_id)
    assert not lengths and not scheduler.has_requests() and not scheduler.holds_blocks
    assert not scheduler.requests and [*scheduler.requests] == []


def test_all_ranks_have_as_many_drafts_as_pay_in_the_fullest():
    """If one data-parallel rank is too full for drafts, the others have none; all are timed and counted as one."""
    allowed, timed = {1: 2, 2: 0}, []
    control = AdaptiveControl(2, 0, most_drafts=lambda num_running: allowed[num_running])
    control.note_seconds = lambda *found: timed.append(found)
    scheduler = new_ranks(drafts=control, async_scheduling=False)
    for rank, count in ((0, 1), (2, 2)):
        for i in range(count):
            add(scheduler, f"{rank} {i}", [rank, i, 5], rank=rank, max_tokens=20 if rank == 0 else 1 + i)
    numbers = []
    for _ in range(5):
        plan = scheduler.schedule()
        assert {part.num_drafts for part in plan.ranks} == {plan.num_drafts}
        numbers.append((plan.num_drafts, sum(row.num_drafts for row in plan.rows)))
        drawn = {row.request_id: [7] * (1 + row.num_drafts) for row in plan.rows}
        scheduler.update_from_output(plan, ModelRunnerOutput(drawn, {row.request_id: row.num_drafts for row in plan.rows}))
        scheduler.note_seconds(plan, 0.5)
    assert numbers == [(0, 0), (2, 0), (2, 2), (2, 2), (2, 2)]  # a step proposes what the next one checks
    assert timed == [(1, 2, 0.5)] * 4
    stats = scheduler.stats()
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 6, 6)
    assert (stats.accepted_per_position, stats.num_speculative_tokens) == ((3, 3), 2)

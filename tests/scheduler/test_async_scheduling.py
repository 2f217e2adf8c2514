"""Planning ahead of the tokens: two steps in flight."""

from dataclasses import replace

import pytest

from jaxllm.request import ErrorKind, FinishReason, RequestStatus
from jaxllm.scheduler_output import NOT_FINITE, ModelRunnerOutput
from tests.helpers.fake_runner import FakeEngine, oracle_tokens
from tests.helpers.scheduling import make_request, make_scheduler

VOCAB = 1000


def expected(request):
    return oracle_tokens(request.spec.prompt_token_ids, request.sampling_params.max_tokens, VOCAB)


def engine_of(*requests, depth=2, **options):
    scheduler = make_scheduler(async_scheduling=True, **options)
    for request in requests:
        scheduler.add_request(request)
    return FakeEngine(scheduler, vocab_size=VOCAB, depth=depth)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 2, 5, 20])
def test_exactly_max_tokens_and_no_step_beyond(depth, max_tokens):
    requests = [make_request(f"r{i}", 10 + i, max_tokens=max_tokens) for i in range(4)]
    engine = engine_of(*requests, depth=depth)
    tokens = engine.run()
    assert tokens == {request.request_id: expected(request) for request in requests}
    assert len(engine.plans) == max_tokens
    assert engine.runner.num_computed_tokens == sum(request.num_prompt_tokens + max_tokens - 1 for request in requests)


def test_no_step_beyond_max_model_len():
    request = make_request("a", 10, max_tokens=1000)
    engine = engine_of(request, max_model_len=16)
    assert engine.run() == {"a": oracle_tokens(request.spec.prompt_token_ids, 6, VOCAB)} and len(engine.plans) == 6


def test_without_it_no_step_is_planned_before_the_tokens_are_known():
    scheduler = make_scheduler(async_scheduling=False)
    scheduler.add_request(make_request("a", 10))
    assert scheduler.schedule().num_tokens == 10
    assert scheduler.schedule().num_tokens == 0


def test_the_token_past_an_early_stop_is_dropped():
    prompt = [3] * 10
    third = oracle_tokens(prompt, 3, VOCAB)[2]
    engine = engine_of(make_request("a", prompt, stop_token_ids=[third], max_tokens=50))
    assert engine.run() == {"a": oracle_tokens(prompt, 3, VOCAB)}
    assert len(engine.plans) == 4  # one step was on its way


def test_abort_between_plan_and_token_discards_the_token_and_frees_all():
    engine = engine_of(make_request("a", 40), make_request("b", 40))
    engine.dispatch()
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    engine.scheduler.check_integrity()
    assert [output.request_id for output in engine.collect() + engine.collect()] == ["b", "b"]
    engine.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    assert engine.scheduler.cache_manager.pool.usage == 0.0 and not engine.scheduler.has_requests()


def test_a_late_token_never_reaches_a_new_request_of_the_same_id():
    engine = engine_of(make_request("a", [1] * 20))
    engine.dispatch()
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    again = make_request("a", [2] * 9, max_tokens=5)
    engine.scheduler.add_request(again)
    assert engine.run() == {"a": expected(again)}


def test_an_equal_prompt_shares_blocks_that_are_still_being_computed():
    prompt = list(range(100))
    a, b = make_request("a", prompt), make_request("b", prompt + [7])
    engine = engine_of(a)
    engine.dispatch()
    engine.scheduler.add_request(b)
    engine.depth = 3
    engine.dispatch()
    (data,) = engine.plans[-1].new_requests
    assert data.num_computed_tokens == data.num_cached_tokens == 96
    assert engine.run() == {"a": expected(a), "b": expected(b)}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_second_turn_computes_only_what_the_history_leaves_of_a_block(depth):
    requests = [make_request(f"r{i}", [i] * 100, max_tokens=200) for i in range(5)]
    engine = engine_of(*requests, depth=depth)
    engine.run()
    assert all(request.num_tokens == 300 for request in requests)
    for i, request in enumerate(requests):
        engine.scheduler.add_request(make_request(f"turn2-{i}", request.token_ids, max_tokens=2))
    plan = engine.scheduler.schedule()
    assert plan.num_scheduled_tokens == {f"turn2-{i}": 300 % 16 for i in range(5)}
    assert all(data.num_cached_tokens == 288 for data in plan.new_requests)


def test_a_whole_block_of_history_is_found_up_to_its_last_computed_token():
    request = make_request("a", 10, max_tokens=23)  # 33 tokens, 32 of them computed
    engine = engine_of(request)
    engine.run()
    engine.scheduler.add_request(make_request("b", request.token_ids, max_tokens=2))
    assert engine.scheduler.schedule().num_scheduled_tokens == {"b": 1}


def preempt_with_token_in_flight(**options):
    """Two requests need a seventh block while both have a token in flight: "b" must be preempted."""
    a, b = make_request("a", 44, max_tokens=30), make_request("b", 44, max_tokens=30, priority=1)
    engine = engine_of(a, b, num_blocks=7, **options)
    while not b.num_preemptions:
        engine.dispatch()
        if not b.num_preemptions:
            engine.collect()
    return engine, a, b


def test_a_token_in_flight_at_preemption_is_delivered_once():
    engine, a, b = preempt_with_token_in_flight()
    assert b.status == RequestStatus.PREEMPTED and b.num_output_placeholders == 1 and b.num_computed_tokens == 0
    known = b.num_tokens
    # Not readmitted, though it were first in line, before its token has come.
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert engine.scheduler.schedule().num_tokens == 0
    assert engine.scheduler.waiting.peek() is b
    while b.num_output_placeholders:
        engine.collect()
    assert b.num_tokens == known + 1 and b.num_computed_tokens == 0
    engine.run()
    assert b.output_token_ids == expected(b)


def test_a_token_in_flight_at_preemption_may_be_the_last():
    engine, a, b = preempt_with_token_in_flight()
    b.max_num_tokens = b.num_tokens + 1
    outputs = []
    while b.num_output_placeholders:
        outputs += engine.collect()
    assert [output.finish_reason for output in outputs if output.request_id == "b"][-1] == FinishReason.LENGTH
    assert len(engine.scheduler.waiting) == 0 and list(engine.scheduler.requests) == ["a"]
    engine.run()


@pytest.mark.parametrize("policy", ["fcfs", "fair", "priority"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_preempted_request_is_not_overtaken_while_its_tokens_are_in_flight(policy, depth):
    requests = [make_request(name, 15, arrival=place, max_tokens=22) for place, name in enumerate("ab")]
    waiting = make_request("w", 8, arrival=2, max_tokens=4)
    engine = engine_of(*requests, waiting, num_blocks=11, block_size=4, max_num_seqs=2, depth=depth, scheduling_policy=policy)
    engine.run()
    admissions = [data.request_id for plan in engine.plans for data in plan.new_requests]
    assert admissions == ["a", "b", "b", "w"]


def test_only_the_more_urgent_pass_a_request_whose_tokens_are_in_flight():
    engine, a, b = preempt_with_token_in_flight(scheduling_policy="priority")
    scheduler = engine.scheduler
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    for priority in (2, 0):
        scheduler.add_request(make_request(f"priority {priority}", 5, priority=priority, max_tokens=1))
    assert list(scheduler.schedule().num_scheduled_tokens) == ["priority 0"]


def test_several_that_wait_for_a_token_keep_their_order():
    engine = engine_of(*(make_request(name, 40) for name in "abcd"))
    scheduler = engine.scheduler
    engine.dispatch()
    for _ in range(3):
        scheduler._preempt(scheduler.running.pop())
    plan = scheduler.schedule()
    assert list(plan.num_scheduled_tokens) == ["a"]
    assert [request.request_id for request in scheduler.waiting] == ["b", "c", "d"]
    scheduler.check_integrity()


def test_reset_of_running_requests_drops_tokens_in_flight_and_samples_them_again():
    requests = [make_request(name, 40, max_tokens=12) for name in "abc"]
    engine = engine_of(*requests)
    for _ in range(3):
        engine.step()
    engine.dispatch()
    known = [request.num_tokens for request in requests]
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.scheduler.check_integrity()
    assert engine.collect() == [] and engine.collect() == []
    assert [request.num_tokens for request in requests] == known
    engine.run()
    assert [request.output_token_ids for request in requests] == [expected(request) for request in requests]


def test_an_error_of_a_request_that_was_preempted_meanwhile_ends_it():
    engine, a, b = preempt_with_token_in_flight()
    while b.num_output_placeholders:
        plan, result = engine.in_flight.popleft()
        sampled = {request_id: tokens for request_id, tokens in result.sampled_token_ids.items() if request_id != "b"}
        outputs = engine.scheduler.update_from_output(plan, ModelRunnerOutput(sampled, errors={"b": "it broke"}))
        engine.scheduler.check_integrity()
    assert ("b", FinishReason.ERROR, "it broke") in [(o.request_id, o.finish_reason, o.stop_reason) for o in outputs]
    assert list(engine.run()) == ["a"]


@pytest.mark.parametrize("failure", ["error", "NaN"])
@pytest.mark.parametrize("left", ["preempted", "preempted and admitted again", "aborted"])
def test_nothing_is_found_that_a_request_computed_which_fails_after_it_left_its_step(left, failure):
    first = make_request("first", [1] * 32, max_tokens=1)
    engine = engine_of(first, max_num_batched_tokens=32)
    engine.run()
    scheduler, pool = engine.scheduler, engine.scheduler.cache_manager.pool
    request = make_request("a", [1] * 32 + [2] * 65, max_tokens=2)
    scheduler.add_request(request)
    engine.dispatch()  # two chunks: it waits for no token
    if left == "aborted":
        scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    else:
        scheduler.hold_requests(["a"])
        assert len([name for name in request.block_hashes if pool.is_cached(name)]) == 6
    plan, _ = engine.in_flight.popleft()
    if left == "preempted and admitted again":
        scheduler.release_requests(["a"])
        scheduler.schedule()
        assert request.status is RequestStatus.RUNNING and request.num_computed_tokens == 97
    failed = {"errors": {"a": "it broke"}} if failure == "error" else {"not_finite": {"a"}}
    scheduler.update_from_output(plan, ModelRunnerOutput({}, **failed))
    scheduler.check_integrity()
    tries_again = failure == "NaN" and left == "preempted and admitted again"
    assert request.status.is_finished != tries_again and bool(scheduler.requests) == tries_again
    found = [pool.is_cached(name) for name in request.block_hashes]
    others = failure == "error"
    assert found == [others] * 2 + [False] * 4, "the first two are of another request, and may be why it drew NaN"


@pytest.mark.parametrize("num_bad", [1, 2])
def test_a_request_that_draws_nan_behind_what_it_found_computes_that_once(num_bad):
    """The request that computed them may have ended before the fault was seen. Other requests of the step go on."""
    first = make_request("first", [1] * 32, max_tokens=1)
    engine = engine_of(first, max_num_batched_tokens=64)
    engine.run()
    scheduler = engine.scheduler
    alone = make_request("alone", [5] * 20, max_tokens=9)
    reader = make_request("reader", [1] * 32 + [2] * 9, max_tokens=3)
    for request in (alone, reader):
        scheduler.add_request(request)
    outputs, num_drawn = [], 0
    while scheduler.has_requests() or engine.in_flight:
        engine.dispatch()
        plan, result = engine.in_flight[0]
        is_of_this_try = plan.step_id >= reader.admission_step_id
        if result.sampled_token_ids.get("reader") and is_of_this_try and reader.num_preemptions == num_drawn < num_bad:
            num_drawn += 1
            sampled = {**result.sampled_token_ids, "reader": [NOT_FINITE]}
            engine.in_flight[0] = plan, replace(result, sampled_token_ids=sampled, not_finite={"reader"})
        outputs += engine.collect()
        scheduler.check_integrity()
    assert alone.output_token_ids == oracle_tokens([5] * 20, 9, VOCAB) and not alone.num_preemptions
    of_reader = [output for output in outputs if output.request_id == "reader"]
    assert reader.num_preemptions == 1 and reader.num_found_blocks == 0
    if num_bad == 1:
        assert reader.output_token_ids == oracle_tokens([1] * 32 + [2] * 9, 3, VOCAB)
    else:
        (end,) = of_reader
        assert (end.finish_reason, end.error_kind, end.new_token_ids) == (FinishReason.ERROR, ErrorKind.NOT_FINITE, [])
    assert scheduler.stats().num_not_finite == num_bad - 1


@pytest.mark.parametrize("reader", ["in the same step", "in the next step", "preempted meanwhile", "aborted meanwhile"])
def test_what_a_request_without_a_row_was_to_write_is_used_by_nobody(reader):
    """The plan lets others find its blocks before the runner says that it took no part."""
    others = [make_request(f"other {number}", [7 + number] * 64, max_tokens=9) for number in range(2)]
    engine = engine_of(others[0], depth=1, max_num_batched_tokens=96)
    scheduler, pool = engine.scheduler, engine.scheduler.cache_manager.pool
    engine.run()  # blocks have its content now
    scheduler.add_request(others[1])
    engine.dispatch()
    engine.runner.gets_no_row = lambda request_id: request_id == "fails"
    fails, reads = make_request("fails", [1] * 48), make_request("reads", [1] * 48 + [2] * 60, max_tokens=5)
    scheduler.add_request(fails)
    if reader == "in the same step":
        scheduler.add_request(reads)
    engine.depth = 2
    engine.dispatch()
    if reader != "in the same step":
        scheduler.add_request(reads)
    engine.depth = 3
    engine.dispatch()
    if reader == "preempted meanwhile":
        scheduler.hold_requests(["reads"])
    elif reader == "aborted meanwhile":
        scheduler.finish_requests("reads", RequestStatus.FINISHED_ABORTED)
    assert pool.is_cached(reads.block_hashes[4]), "it goes on behind blocks that nothing has written"
    engine.collect()
    (failed,) = [output for output in engine.collect() if output.request_id == "fails"]
    assert failed.finish_reason is FinishReason.ERROR and failed.new_token_ids == []
    assert not any(map(pool.is_cached, reads.block_hashes))
    scheduler.check_integrity()
    scheduler.release_requests(["reads"])
    assert engine.run().get("reads") == (None if reader == "aborted meanwhile" else expected(reads))
    assert others[1].output_token_ids == expected(others[1]) and others[1].num_preemptions == 0
    assert reads.num_preemptions == (0 if reader == "aborted meanwhile" else 1)


def test_what_others_computed_before_it_is_used_although_a_request_gets_no_row():
    first, second = (make_request(name, [1] * 48 + [2] * 9, max_tokens=30) for name in ("first", "second"))
    engine = engine_of(first, depth=2)
    engine.step()
    engine.scheduler.add_request(second)
    engine.step()
    engine.runner.gets_no_row = lambda request_id: request_id.startswith("fails")
    reads = make_request("reads", [1] * 48 + [3] * 20, max_tokens=4)
    computes_all = make_request("fails too", [1] * 48 + [4] * 20, prompt_logprobs=0)  # it looks for nothing in the cache
    for request in (make_request("fails", [1] * 48 + [5] * 20), reads, computes_all):
        engine.scheduler.add_request(request)
    tokens = engine.run()
    assert tokens["reads"] == expected(reads) and tokens["second"][-20:] == expected(second)[-20:]
    assert reads.num_cached_tokens == second.num_cached_tokens == 48
    assert first.num_preemptions == second.num_preemptions == 0, "they were admitted before"


def test_a_small_cache_gives_the_same_tokens_as_a_large_one():
    def run(num_blocks, depth):
        requests = [make_request(f"r{i}", [i % 3] * (20 + 9 * i), max_tokens=25) for i in range(8)]
        engine = engine_of(*requests, num_blocks=num_blocks, max_num_batched_tokens=40, depth=depth)
        return engine.run(), engine.scheduler.stats().num_preemptions

    large, none = run(1000, 2)
    assert none == 0
    for depth in (1, 2):
        small, num_preemptions = run(9, depth)
        assert small == large and num_preemptions > 0


# Stages of a pipeline


@pytest.mark.parametrize(("num_stages", "depth"), [(2, 3), (2, 4), (4, 5), (3, 1)])
def test_steps_are_of_different_requests_until_the_last_stage_has_had_each(num_stages, depth):
    requests = [make_request(f"r{i}", 10 + i, max_tokens=12) for i in range(7)]
    engine = engine_of(*requests, depth=depth, num_stages=num_stages)
    assert engine.run() == {request.request_id: expected(request) for request in requests}
    # All prompts are computed in the first step, the second one waits for their tokens.
    decodes = [{row.request_id for row in plan.rows} for plan in engine.plans[1:]]
    for number, ids in enumerate(decodes):
        assert depth == 1 or all(map(ids.isdisjoint, decodes[max(0, number - num_stages + 1) : number]))
    assert max(map(len, decodes)) == -(-7 // num_stages)


def test_chunks_of_a_prompt_need_no_token_and_follow_each_other_in_the_stages():
    engine = engine_of(make_request("a", 64, max_tokens=2), depth=3, num_stages=2, max_num_batched_tokens=16)
    engine.dispatch()
    assert [row.start for plan in engine.plans for row in plan.rows] == [0, 16, 32]


def test_a_lone_request_goes_on_when_its_token_is_known():
    engine = engine_of(make_request("a", 5, max_tokens=3), depth=4, num_stages=3)
    engine.dispatch()
    assert len(engine.plans) == 1
    engine.collect()
    engine.dispatch()
    assert len(engine.plans) == 2

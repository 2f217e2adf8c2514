"""Number of tokens computed for each request, step by step."""

import pytest

from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.request import ErrorKind, FinishReason, RequestStatus
from jaxllm.scheduler.scheduler import PlanError
from jaxllm.scheduler_output import NO_TOKEN, NOT_FINITE, ModelRunnerOutput, RowStep
from tests.helpers.scheduling import make_request, make_scheduler, result_of, run_to_end, step


def add(scheduler, *requests):
    for request in requests:
        scheduler.add_request(request)
    return requests


def counts(plan):
    return list(plan.num_scheduled_tokens.values())


# The budget of a step


@pytest.mark.parametrize("caching", [True, False])
def test_decodes_come_first_and_prefills_share_the_rest(caching):
    scheduler = make_scheduler(max_num_batched_tokens=1024, long_prefill_token_threshold=400, caching=caching)
    add(scheduler, *(make_request(name, 800) for name in "abc"))
    plan, outputs = step(scheduler)
    assert counts(plan) == [400, 400, 224] and outputs == []
    plan, outputs = step(scheduler)
    assert counts(plan) == [400, 400, 224] and [output.request_id for output in outputs] == ["a", "b"]
    assert len(plan.new_requests) == 0 and [row.start for row in plan.rows] == [400, 400, 224]
    plan, outputs = step(scheduler)
    assert counts(plan) == [1, 1, 352] and [output.request_id for output in outputs] == ["a", "b", "c"]


def test_the_threshold_spares_a_lone_request():
    scheduler = make_scheduler(max_num_batched_tokens=1024, long_prefill_token_threshold=400)
    add(scheduler, make_request("a", 2000))
    assert counts(scheduler.schedule()) == [1024]


def test_the_threshold_holds_among_several():
    scheduler = make_scheduler(max_num_batched_tokens=1024, long_prefill_token_threshold=400)
    add(scheduler, make_request("a", 2000), make_request("b", 10))
    assert counts(scheduler.schedule()) == [400, 10]


def test_the_adaptive_threshold_is_at_least_an_equal_share():
    scheduler = make_scheduler(
        max_num_batched_tokens=1024, long_prefill_token_threshold=100, long_prefill_token_threshold_adaptive=True
    )
    add(scheduler, make_request("a", 2000), make_request("b", 10))
    assert counts(scheduler.schedule()) == [512, 10]


@pytest.mark.parametrize(("chunked", "expected"), [(False, [800]), (True, [800, 224])])
def test_short_prompts_do_not_overtake_a_long_one(chunked, expected):
    scheduler = make_scheduler(max_num_batched_tokens=1024, max_model_len=1024, max_num_seqs=3, enable_chunked_prefill=chunked)
    add(scheduler, *(make_request(name, length) for name, length in zip("abcd", (800, 800, 10, 10), strict=True)))
    assert counts(scheduler.schedule()) == expected


def test_admission_stops_at_max_num_seqs():
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, *(make_request(name, 10, max_tokens=2) for name in "abc"))
    assert list(step(scheduler)[0].num_scheduled_tokens) == ["a", "b"]
    assert list(step(scheduler)[0].num_scheduled_tokens) == ["a", "b"]
    assert list(step(scheduler)[0].num_scheduled_tokens) == ["c"]


def test_several_prompts_are_computed_in_chunks_at_once():
    scheduler = make_scheduler(max_num_batched_tokens=64, long_prefill_token_threshold=16, max_num_seqs=4)
    add(scheduler, *(make_request(name, 100, max_tokens=4) for name in "abcd"))
    assert counts(step(scheduler)[0]) == [16, 16, 16, 16]
    ended = [output for output in run_to_end(scheduler) if output.finish_reason]
    assert sorted(output.request_id for output in ended) == ["a", "b", "c", "d"]


# Larger steps for long prompts


def larger_steps(**options):
    return make_scheduler(max_num_batched_tokens=100, max_num_prefill_tokens=250, **options)


def test_a_long_prompt_takes_larger_steps_until_a_request_decodes():
    scheduler = larger_steps()
    add(scheduler, make_request("a", 600))
    assert [counts(step(scheduler)[0]) for _ in range(2)] == [[250], [250]]
    add(scheduler, make_request("b", 400))
    assert counts(step(scheduler)[0]) == [100]  # a's first token: b waits for a separate step
    assert [counts(step(scheduler)[0]) for _ in range(2)] == [[1, 99], [1, 99]]
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert counts(step(scheduler)[0]) == [202]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ((80, 80, 600), [80, 20]),  # short prompts get their first tokens as soon as without
        ((80, 600), [80, 20]),
        ((100, 100), [100]),
        ((180, 80), [180, 70]),  # what is padded otherwise
        ((600, 80), [250]),
    ],
)
def test_a_step_is_larger_only_for_a_long_prompt_at_its_head(prompts, expected):
    scheduler = larger_steps()
    add(scheduler, *(make_request(f"r{i}", length) for i, length in enumerate(prompts)))
    assert counts(scheduler.schedule()) == expected


def test_the_threshold_limits_larger_steps_too():
    scheduler = larger_steps(long_prefill_token_threshold=60)
    add(scheduler, make_request("a", 600), make_request("b", 600))
    assert counts(scheduler.schedule()) == [60, 40]


def test_larger_steps_are_limited_after_a_failure_too():
    scheduler = larger_steps()
    scheduler.limit_steps(4)
    add(scheduler, make_request("a", 600))
    assert counts(scheduler.schedule()) == [62]


def test_a_preempted_long_request_comes_back_in_larger_steps():
    scheduler = larger_steps(num_blocks=40, caching=False)
    add(scheduler, make_request("a", 300))
    assert [counts(step(scheduler)[0]) for _ in range(4)] == [[250], [50], [1], [1]]
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert [counts(step(scheduler)[0]) for _ in range(3)] == [[250], [53], [1]]


@pytest.mark.parametrize(("max_tokens", "beside"), [(1, 200), (2, 100)])
def test_a_first_token_in_flight_counts_as_a_decode_unless_the_request_ends_with_it(max_tokens, beside):
    scheduler = larger_steps(async_scheduling=True)
    add(scheduler, make_request("a", 150, max_tokens=max_tokens))
    assert counts(scheduler.schedule()) == [150]
    add(scheduler, make_request("b", 200))
    assert scheduler.schedule().num_tokens == beside


# Smaller steps with decodes


@pytest.mark.parametrize(
    ("options", "prompts", "expected"),
    [
        ({}, (700, 700), [1, 700, 323]),
        ({}, (3000, 1000), [1, 1023]),
        ({}, (3000, 1200), [1, 3000, 71]),  # many are left: large steps compute them sooner
        ({"max_num_batched_tokens": 6144}, (5000,), [1, 2047]),
        ({"max_num_batched_tokens": 8192, "token_sizes": (2048, 3072, 8192)}, (5000,), [1, 3071]),  # padded all the same
        ({"token_sizes": (256, 3072)}, (700, 700), [1, 700, 700]),
        ({"max_num_batched_tokens": 512}, (700,), [1, 511]),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 8192}, (5000,), [1, 5000]),
    ],
)
def test_a_step_with_decodes_is_smaller_if_prompts_have_few_tokens_left(options, prompts, expected):
    scheduler = make_scheduler(**{"max_num_batched_tokens": 3072, **options})
    add(scheduler, make_request("decodes", 100))
    assert counts(step(scheduler)[0]) == [100]
    add(scheduler, *(make_request(f"r{i}", length) for i, length in enumerate(prompts)))
    assert counts(step(scheduler)[0]) == expected


def test_a_step_is_as_large_as_usual_without_decodes_and_the_rest_of_its_prompt_with_them_smaller():
    scheduler = make_scheduler(max_num_batched_tokens=3072)
    add(scheduler, make_request("a", 600), make_request("b", 4000))
    assert [counts(step(scheduler)[0]) for _ in range(3)] == [[600, 2472], [1, 1023], [1, 505]]


def test_a_step_with_many_decodes_is_as_large_as_usual():
    scheduler = make_scheduler(max_num_batched_tokens=3072, max_num_seqs=400)
    add(scheduler, *(make_request(f"r{i}", 2) for i in range(257)))
    step(scheduler)
    add(scheduler, make_request("long", 2000))
    assert sum(counts(step(scheduler)[0])) == 257 + 2000


# Plans


def test_a_new_request_is_sent_whole_and_then_as_differences():
    scheduler = make_scheduler(max_num_batched_tokens=32)
    add(scheduler, make_request("a", 40))
    new = scheduler.schedule()
    (data,) = new.new_requests
    assert data.token_ids == scheduler.requests["a"].token_ids and data.token_ids is not scheduler.requests["a"].token_ids
    assert (data.num_prompt_tokens, data.num_computed_tokens, data.num_cached_tokens) == (40, 0, 0)
    assert data.block_ids == [1, 2]
    scheduler.update_from_output(new, result_of(scheduler, new))
    plan, _ = step(scheduler)
    assert plan.new_requests == [] and plan.step_id == new.step_id + 1
    assert plan.rows == [RowStep("a", start=32, num_tokens=8, num_drafts=0, new_blocks=[3])]
    plan, _ = step(scheduler)
    assert [row.new_blocks for row in plan.rows] == [[]] and counts(plan) == [1]


def test_ended_ids_come_with_every_plan_until_one_has_tokens():
    scheduler = make_scheduler()
    add(scheduler, make_request("a", 10))
    step(scheduler)
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    for _ in range(2):
        plan = scheduler.schedule()
        assert plan.num_tokens == 0 and plan.finished_request_ids == ["a"]
    add(scheduler, make_request("b", 10))
    assert scheduler.schedule().finished_request_ids == ["a"]
    assert scheduler.schedule().finished_request_ids == []


def test_an_empty_plan_needs_no_update():
    scheduler = make_scheduler()
    assert scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput({})) == []


# Preemption


def test_the_latest_request_is_preempted_and_its_token_in_flight_kept():
    scheduler = make_scheduler(max_num_batched_tokens=100, num_blocks=11, caching=False)
    a, b = make_request("a", 80), make_request("b", 80)
    add(scheduler, a)
    first = scheduler.schedule()
    assert len(first.new_requests[0].block_ids) == 5
    add(scheduler, b)
    second = scheduler.schedule()
    assert list(second.num_scheduled_tokens) == ["b"] and len(second.new_requests[0].block_ids) == 5
    scheduler.update_from_output(first, ModelRunnerOutput({"a": [0]}))
    third = scheduler.schedule()
    assert third.preempted_request_ids == ["b"] and [row.new_blocks for row in third.rows] == [[10]]
    assert scheduler.running == [a] and b.status == RequestStatus.PREEMPTED
    scheduler.check_integrity()
    (output,) = scheduler.update_from_output(second, ModelRunnerOutput({"b": [42]}))
    assert output.new_token_ids == [42] and b.output_token_ids == [42]
    scheduler.check_integrity()


def test_a_preempted_request_waits_in_front_and_returns_as_new_with_its_outputs():
    scheduler = make_scheduler(num_blocks=11, caching=False)
    a, b = add(scheduler, make_request("a", 80, max_tokens=3), make_request("b", 80, max_tokens=9))
    add(scheduler, make_request("c", 10))
    plan, _ = step(scheduler)
    assert list(plan.num_scheduled_tokens) == ["a", "b"]  # no block for c
    plan, _ = step(scheduler)
    assert plan.preempted_request_ids == ["b"] and list(plan.num_scheduled_tokens) == ["a"]
    assert [request.request_id for request in scheduler.waiting] == ["b", "c"] and b.num_preemptions == 1
    plan, outputs = step(scheduler)
    assert counts(plan) == [1] and outputs[0].finish_reason == FinishReason.LENGTH
    plan, outputs = step(scheduler)
    assert plan.finished_request_ids == ["a"] and list(plan.num_scheduled_tokens) == ["b", "c"]
    data = plan.new_requests[0]
    assert data.token_ids == [*b.spec.prompt_token_ids, 7] and data.num_prompt_tokens == 80
    assert data.num_computed_tokens == 0 and plan.num_scheduled_tokens["b"] == 81
    assert outputs[0].num_preemptions == 1 and outputs[0].new_token_ids == [7]


def test_a_resumed_request_finds_its_own_blocks():
    scheduler = make_scheduler(num_blocks=13)
    add(scheduler, make_request("a", 80, max_tokens=4), make_request("b", 80))
    step(scheduler)
    scheduler._preempt(scheduler.running.pop())
    plan, _ = step(scheduler)
    (data,) = plan.new_requests
    assert data.request_id == "b" and data.num_computed_tokens == data.num_cached_tokens == 80 and len(data.token_ids) == 81
    assert plan.num_scheduled_tokens == {"a": 1, "b": 1}
    stats = scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (160, 0)
    assert (stats.resumed_prefix_cache_queries, stats.resumed_prefix_cache_hits, stats.num_preemptions) == (81, 80, 1)


def test_prompt_logprobs_are_reported_once_though_a_resumed_request_computes_them_again():
    scheduler = make_scheduler()
    add(scheduler, make_request("a", 20, prompt_logprobs=0))
    marker = object()
    plan = scheduler.schedule()
    (output,) = scheduler.update_from_output(plan, ModelRunnerOutput({"a": [1]}, prompt_logprobs={"a": marker}))
    assert output.new_prompt_logprobs is marker
    scheduler._preempt(scheduler.running.pop())
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"a": 21}  # reads no cache
    (output,) = scheduler.update_from_output(plan, ModelRunnerOutput({"a": [1]}, prompt_logprobs={"a": marker}))
    assert output.new_prompt_logprobs is None


# Admission


def test_a_prompt_is_admitted_only_if_it_fits_whole():
    for whole, expected in ((True, [20]), (False, [20, 12])):
        scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=32, scheduler_reserve_full_isl=whole)
        add(scheduler, make_request("a", 20, max_tokens=2), make_request("b", 60, max_tokens=2))
        assert counts(scheduler.schedule()) == expected


def test_blocks_promised_to_a_prompt_in_chunks_are_not_given_to_another():
    scheduler = make_scheduler(num_blocks=13, max_num_batched_tokens=48, long_prefill_token_threshold=16, block_size=16)
    requests = add(scheduler, *(make_request(name, 80, max_tokens=2) for name in "abc"))
    plan, _ = step(scheduler)
    assert list(plan.num_scheduled_tokens) == ["a", "b"]  # 2 blocks used, 8 promised, 2 left
    run_to_end(scheduler)
    assert all(request.num_preemptions == 0 for request in requests)


def test_the_watermark_keeps_blocks_free_only_while_something_runs():
    scheduler = make_scheduler(num_blocks=11, watermark=0.2)  # 2 blocks
    add(scheduler, make_request("a", 150, max_tokens=2))
    assert counts(step(scheduler)[0]) == [150]  # alone, it may take all 10
    run_to_end(scheduler)
    add(scheduler, make_request("b", 80, max_tokens=8), make_request("c", 64), make_request("d", 10))
    assert list(step(scheduler)[0].num_scheduled_tokens) == ["b"]  # c would leave 1
    scheduler = make_scheduler(num_blocks=11, watermark=0.2)
    add(scheduler, make_request("b", 80, max_tokens=8), make_request("c", 48))
    assert list(step(scheduler)[0].num_scheduled_tokens) == ["b", "c"]


def test_a_refused_request_is_not_looked_up_again_until_it_may_fit(monkeypatch):
    scheduler = make_scheduler(num_blocks=15)
    add(scheduler, make_request("a", 48, max_tokens=40), make_request("b", 48, max_tokens=60))
    step(scheduler)
    add(scheduler, make_request("c", 160, max_tokens=2))
    lookups = []
    look_up = scheduler.cache_manager.get_computed_blocks
    monkeypatch.setattr(
        scheduler.cache_manager, "get_computed_blocks", lambda request: lookups.append(request) or look_up(request)
    )
    while scheduler.requests.get("a"):
        step(scheduler)
    step(scheduler)  # a's blocks are free now, but it needs more
    assert len(lookups) == 1
    while scheduler.requests.get("b"):
        step(scheduler)
    assert len(lookups) == 1
    step(scheduler)
    assert len(lookups) == 2 and [request.request_id for request in scheduler.running] == ["c"]


def test_a_refused_request_enters_as_soon_as_another_has_computed_its_beginning():
    # 13 usable blocks, of which a fills 2 a step up to 10. b needs 11 less those that a has filled, and always sees 3.
    scheduler = make_scheduler(num_blocks=14, max_num_batched_tokens=64, long_prefill_token_threshold=32)
    prompt = list(range(160))
    add(scheduler, make_request("a", prompt, max_tokens=20), make_request("b", prompt + [5], max_tokens=2))
    assert [list(step(scheduler)[0].num_scheduled_tokens) for _ in range(4)] == [["a"], ["a"], ["a"], ["a", "b"]]
    assert scheduler.requests["b"].num_cached_tokens == 128


@pytest.mark.parametrize(("num_blocks", "num_waited"), [(14, 1), (13, 1), (12, 2)])
def test_a_refused_request_enters_as_soon_as_its_cached_beginning_is_used(num_blocks, num_waited):
    prompt = list(range(80))
    scheduler = make_scheduler(num_blocks=num_blocks, max_num_batched_tokens=64, long_prefill_token_threshold=32)
    add(scheduler, make_request("earlier", prompt, max_tokens=1))
    run_to_end(scheduler)
    # a fills 2 blocks a step, up to 10. b needs 6 less those that a has filled; always 3 (or 2, or 1) are spare.
    add(scheduler, make_request("a", [*prompt, *prompt], max_tokens=9, skip_reading_prefix_cache=True))
    add(scheduler, make_request("b", [*prompt, 5], max_tokens=2))
    expected = [["a"]] * num_waited + [["a", "b"]]
    assert [list(step(scheduler)[0].num_scheduled_tokens) for _ in expected] == expected


# Prefix caching


def test_an_equal_prompt_shares_blocks_planned_in_the_same_step_and_computes_one_token():
    scheduler = make_scheduler()
    prompt = list(range(64))
    add(scheduler, make_request("a", prompt), make_request("b", prompt))
    plan, outputs = step(scheduler)
    a, b = plan.new_requests
    assert counts(plan) == [64, 1] and a.block_ids == b.block_ids
    assert (b.num_computed_tokens, b.num_cached_tokens) == (63, 64)
    assert [output.num_cached_tokens for output in outputs] == [0, 64]
    plan, _ = step(scheduler)
    assert counts(plan) == [1, 1]
    x, y = (row.new_blocks for row in plan.rows)
    assert len(x) == len(y) == 1 and x != y


def test_prefix_statistics_are_counted_once_per_admission():
    scheduler = make_scheduler(num_blocks=11)
    add(scheduler, make_request("a", list(range(80)), max_tokens=4))
    step(scheduler)
    add(scheduler, make_request("b", list(range(160))[::-1], max_tokens=1))
    for _ in range(3):  # b is refused each time
        step(scheduler)
    stats = scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (80, 0)
    run_to_end(scheduler)
    add(scheduler, make_request("c", list(range(160))[::-1], max_tokens=1))
    run_to_end(scheduler)
    stats = scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (400, 160)


@pytest.mark.parametrize("options", [{"caching": False}, {"params": {"prompt_logprobs": 0}}])
def test_prefix_statistics_leave_out_who_does_not_read(options):
    scheduler = make_scheduler(caching=options.get("caching", True))
    add(scheduler, make_request("a", 40, **options.get("params", {})))
    step(scheduler)
    assert scheduler.stats().prefix_cache_queries == 0


def test_reset_prefix_cache():
    scheduler = make_scheduler()
    prompt = list(range(64))
    add(scheduler, make_request("a", prompt, max_tokens=3))
    step(scheduler)
    assert not scheduler.reset_prefix_cache()
    run_to_end(scheduler)
    assert scheduler.reset_prefix_cache()
    add(scheduler, make_request("b", prompt))
    assert counts(step(scheduler)[0]) == [64]


def test_reset_with_running_requests_preempts_all_and_keeps_their_order():
    scheduler = make_scheduler()
    requests = add(scheduler, *(make_request(name, 40) for name in "abc"))
    step(scheduler)
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    scheduler.check_integrity()
    plan, _ = step(scheduler)
    assert sorted(plan.preempted_request_ids) == ["a", "b", "c"]
    assert [data.request_id for data in plan.new_requests] == ["a", "b", "c"] and counts(plan) == [41, 41, 41]
    assert all(request.num_preemptions == 1 for request in requests)


# Ends


def test_nothing_is_left_when_all_requests_have_ended():
    scheduler = make_scheduler(num_blocks=40, max_num_batched_tokens=50)
    add(scheduler, *(make_request(f"r{i}", 30 + i, max_tokens=10) for i in range(10)))
    run_to_end(scheduler)
    assert not scheduler.running and not len(scheduler.waiting) and not scheduler.requests and not scheduler._in_flight.steps()
    assert not scheduler.cache_manager._tables
    assert scheduler.cache_manager.pool.num_free_blocks == 39
    assert all(block.ref_count == 0 for block in scheduler.cache_manager.pool.blocks)
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.cache_usage) == (0, 0, 0.0)


def test_abort_ends_running_and_waiting_requests_and_ignores_unknown_ids():
    scheduler = make_scheduler(max_num_seqs=1)
    a, b = add(scheduler, make_request("a", 20), make_request("b", 20))
    step(scheduler)
    assert scheduler.finish_requests(["a", "x", "b", "a"], RequestStatus.FINISHED_ABORTED) == ["a", "b"]
    assert a.status == b.status == RequestStatus.FINISHED_ABORTED and not scheduler.has_requests()
    assert scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED) == []
    scheduler.check_integrity()
    assert scheduler.schedule().finished_request_ids == ["a", "b"]


def test_an_error_ends_one_request_and_what_it_computed_is_never_found_again():
    scheduler = make_scheduler()
    prompt = list(range(64))
    add(scheduler, make_request("bad", prompt), make_request("good", 30))
    plan = scheduler.schedule()
    bad, good = scheduler.update_from_output(plan, ModelRunnerOutput({"good": [1]}, errors={"bad": "it broke"}))
    assert (bad.finish_reason, bad.stop_reason, bad.new_token_ids) == (FinishReason.ERROR, "it broke", [])
    assert good.finish_reason is None and len(scheduler.requests) == 1
    scheduler.check_integrity()
    add(scheduler, make_request("again", prompt))
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {"good": 1, "again": 64} and plan.finished_request_ids == ["bad"]


def test_a_failed_step_ends_all_its_requests():
    scheduler = make_scheduler()
    add(scheduler, make_request("a", 30), make_request("b", 30))
    plan = scheduler.schedule()
    outputs = scheduler.update_from_output(plan, ModelRunnerOutput({}, errors=dict.fromkeys(plan.num_scheduled_tokens, "x")))
    assert [output.finish_reason for output in outputs] == [FinishReason.ERROR] * 2
    assert not scheduler.has_requests() and scheduler.cache_manager.pool.usage == 0.0
    assert scheduler.reset_prefix_cache()


# What is refused at the door


@pytest.mark.parametrize(
    ("prompt", "fields", "param", "numbers"),
    [
        (0, {}, "prompt", ["empty"]),
        (100, {}, "prompt", ["100 tokens", "takes 100"]),
        (101, {}, "prompt", ["101 tokens", "takes 100"]),
        (81, {"max_tokens": 1}, "prompt", ["needs up to 6 blocks", "has 5"]),
        (70, {"max_tokens": 12}, "max_tokens", ["needs up to 6 blocks", "has 5"]),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_both_numbers(prompt, fields, param, numbers):
    scheduler = make_scheduler(num_blocks=6, max_model_len=100)
    with pytest.raises(InvalidRequestError) as caught:
        scheduler.add_request(make_request("a", prompt, **fields))
    assert caught.value.param == param and all(number in str(caught.value) for number in numbers)
    assert not scheduler.has_requests()


def test_the_largest_requests_that_fit_run():
    scheduler = make_scheduler(num_blocks=6, max_model_len=100)
    add(scheduler, make_request("a", 70, max_tokens=11), make_request("b", 80, max_tokens=1))
    assert sum(len(output.new_token_ids) for output in run_to_end(scheduler)) == 12
    scheduler = make_scheduler(max_model_len=100)
    add(scheduler, make_request("a", 99, max_tokens=50), make_request("b", 90, max_tokens=None))
    assert sum(len(output.new_token_ids) for output in run_to_end(scheduler)) == 1 + 10


def test_an_id_in_use_is_refused_and_may_come_again_afterwards():
    scheduler = make_scheduler()
    add(scheduler, make_request("a", 5, max_tokens=1))
    with pytest.raises(InvalidRequestError, match="'a' is in use"):
        scheduler.add_request(make_request("a", 5))
    run_to_end(scheduler)
    add(scheduler, make_request("a", 6, max_tokens=1))
    plan, outputs = step(scheduler)
    assert plan.finished_request_ids == ["a"] and plan.num_scheduled_tokens == {"a": 6} and len(outputs) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": None},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 512},
        {"enable_chunked_prefill": False, "long_prefill_token_threshold": 10},
    ],
)
def test_contradicting_options_are_refused(options):
    with pytest.raises(ConfigError):
        make_scheduler(**{"max_model_len": 1024, **options})


def test_starting_over_keeps_the_order_of_arrival_and_the_tokens_so_far():
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add_request(make_request(name, 20))
    step(scheduler)
    scheduler.schedule()
    scheduler.start_over()
    scheduler.check_integrity()
    assert [request.request_id for request in scheduler.waiting] == ["a", "b", "c"]
    assert [scheduler.requests[name].output_token_ids for name in "abc"] == [[7], [7], []]
    assert [scheduler.requests[name].num_preemptions for name in "abc"] == [1, 1, 0]
    assert scheduler.cache_manager.pool.usage == 0.0
    assert len({output.request_id for output in run_to_end(scheduler)}) == 3


def test_a_plan_that_broke_off_changes_no_request(monkeypatch):
    scheduler = make_scheduler()
    add(scheduler, make_request("earlier", [1] * 40, max_tokens=1))
    run_to_end(scheduler)
    a, b = add(scheduler, make_request("a", [1] * 50), make_request("b", 20))
    admit = scheduler._admit
    monkeypatch.setattr(scheduler, "_admit", lambda request, prefix: admit(request, prefix) if request is a else 1 // 0)
    with pytest.raises(PlanError, match="'b'"):
        scheduler.schedule()
    monkeypatch.undo()
    scheduler.start_over()
    for request in (a, b):
        assert (request.status, request.num_cached_tokens, request.num_preemptions) == (RequestStatus.WAITING, -1, 0)
    stats = scheduler.stats()
    assert (stats.prefix_cache_queries, stats.resumed_prefix_cache_queries, stats.num_preemptions) == (40, 0, 0)
    _, outputs = step(scheduler)
    assert [output.num_cached_tokens for output in outputs] == [0, 0]  # the cache was lost


def test_limited_steps_have_fewer_requests_and_tokens():
    scheduler = make_scheduler(max_num_seqs=8, max_num_batched_tokens=64)
    for number in range(8):
        scheduler.add_request(make_request(str(number), 30))
    scheduler.limit_steps(4)
    plan, _ = step(scheduler)
    assert plan.num_tokens == 16 and len(plan.num_scheduled_tokens) == 1
    scheduler.limit_steps(1)
    plan, _ = step(scheduler)
    assert plan.num_tokens == 64


@pytest.mark.parametrize(("last", "not_finite"), [(NO_TOKEN, False), (NOT_FINITE, True)])
def test_tokens_before_one_that_could_not_be_drawn_are_reported(last, not_finite):
    """With drafts a step brings several."""
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4))
    plan = scheduler.schedule()
    result = ModelRunnerOutput({"a": [7, 8, last]}, not_finite={"a"} if not_finite else set())
    [output] = scheduler.update_from_output(plan, result)
    assert output.new_token_ids == [7, 8] and output.finish_reason == FinishReason.ERROR
    assert output.error_kind == (ErrorKind.NOT_FINITE if not_finite else ErrorKind.CONSTRAINT)

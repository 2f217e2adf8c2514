"""When the states by row of a prompt are taken and given, step by step."""

import pytest

from jaxllm.device_ops import LoadState, StoreState
from jaxllm.kv_transfer import KVTransfer
from jaxllm.request import Request, RequestStatus
from jaxllm.scheduler.prefix_states import is_of_states
from jaxllm.scheduler_output import ModelRunnerOutput, SchedulerOutput
from tests.helpers.scheduling import make_request, make_scheduler, result_of, run_to_end, step

PROMPT = list(range(60))
POSITION = 48
"""Where the last full block before the last token ends."""


def prefill(name: str, prompt: list[int] = PROMPT) -> Request:
    return make_request(name, prompt, max_tokens=1, kv_transfer=KVTransfer(keep_for_decode=True))


def parts(plan: SchedulerOutput) -> list[tuple[int, int]]:
    """The first token and the number of tokens of each row."""
    return [(row.start, row.num_tokens) for row in plan.rows]


def test_a_chunk_ends_where_states_are_taken_and_an_equal_prompt_continues_there() -> None:
    scheduler = make_scheduler(num_state_blocks=2)
    scheduler.add_request(prefill("a"))
    plan, _ = step(scheduler)
    assert parts(plan) == [(0, POSITION)] and plan.ops == ()
    plan, _ = step(scheduler)
    (op,) = plan.ops
    assert parts(plan) == [(POSITION, 12)] and isinstance(op, StoreState) and len(op.block_ids) == 2
    scheduler.add_request(make_request("b", PROMPT, max_tokens=1))
    plan, _ = step(scheduler)
    assert parts(plan) == [(POSITION, 12)] and plan.ops == (LoadState("b", op.block_ids),)
    scheduler.add_request(make_request("c", PROMPT[:40], max_tokens=1))
    plan, _ = step(scheduler)
    assert parts(plan) == [(0, 40)] and plan.ops == (), "there are no states behind a part of it"


def test_a_prompt_without_a_full_block_before_its_last_token_is_computed_at_once() -> None:
    scheduler = make_scheduler(num_state_blocks=2)
    for name, count in (("a", 3), ("b", 16)):
        scheduler.add_request(prefill(name, PROMPT[:count]))
        plan, _ = step(scheduler)
        assert parts(plan) == [(0, count)] and plan.ops == ()


@pytest.mark.parametrize("left", ["", "preempted", "aborted"])
def test_states_of_a_request_that_failed_are_not_found_again(left: str) -> None:
    scheduler = make_scheduler(num_state_blocks=2)
    scheduler.add_request(prefill("bad"))
    step(scheduler)
    plan = scheduler.schedule()
    assert [type(op) for op in plan.ops] == [StoreState]
    if left == "preempted":  # while the step that fails is in flight
        scheduler.hold_requests(["bad"])
        scheduler.release_requests(["bad"])
    elif left == "aborted":
        scheduler.finish_requests("bad", RequestStatus.FINISHED_ABORTED)
    scheduler.update_from_output(plan, ModelRunnerOutput({}, errors={"bad": "it broke"}))
    scheduler.check_integrity()
    assert not any(map(is_of_states, scheduler.cache_manager.pool.cached_hashes()))
    scheduler.add_request(make_request("again", PROMPT, max_tokens=1))
    assert parts(scheduler.schedule()) == [(0, 60)]


def test_without_chunked_prefill_prompts_are_computed_whole_and_states_are_still_given() -> None:
    """As by a decode engine, which takes none."""
    scheduler = make_scheduler(num_state_blocks=2, enable_chunked_prefill=False, max_model_len=512, max_num_batched_tokens=512)
    scheduler.add_request(make_request("a", PROMPT, max_tokens=1))
    plan, _ = step(scheduler)
    assert parts(plan) == [(0, 60)] and plan.ops == ()
    assert not run_to_end(scheduler)
    manager, request = scheduler.cache_manager, make_request("b", PROMPT, max_tokens=1)
    scheduler.num_cached_tokens(request)  # which hashes its blocks
    loaded = manager.pool.allocate(2)
    manager.publish_loaded(request, zip(loaded, manager.states.names_of(request), strict=True))
    manager.pool.free(loaded)
    scheduler.add_request(request)
    plan = scheduler.schedule()
    assert parts(plan) == [(POSITION, 12)]
    assert plan.ops == (LoadState("b", [block.block_id for block in loaded]),)
    scheduler.update_from_output(plan, result_of(scheduler, plan))

"""When the states by row of a prompt are kept and given, step by step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from jaxllm.device_ops import LoadState, StoreState
from jaxllm.kv_transfer import KVTransfer
from jaxllm.request import Request, RequestStatus
from jaxllm.scheduler.prefix_states import is_of_states
from jaxllm.scheduler.scheduler import Scheduler
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


@pytest.mark.parametrize("make", [prefill, partial(make_request, max_tokens=1)])
def test_a_chunk_ends_where_states_are_kept_and_an_equal_prompt_continues_there(make: Callable[..., Request]) -> None:
    scheduler = make_scheduler(num_state_blocks=2)
    scheduler.add_request(make("a", PROMPT))
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
    assert parts(plan) == [(0, 32)] and plan.ops == (), "there are no states behind a part of it"


def add(scheduler: Scheduler, name: str, prompt: list[int], **options: Any) -> list[tuple[int, int]]:
    """Compute a prompt. Returns the first token and the number of tokens of its chunks."""
    scheduler.add_request(make_request(name, prompt, max_tokens=1, **options))
    chunks = []
    while scheduler.has_requests():
        chunks += parts(step(scheduler)[0])
    return chunks


def test_states_are_kept_where_prompts_that_begin_alike_begin_to_differ() -> None:
    scheduler = make_scheduler(num_state_blocks=2)
    alike = list(range(100))
    assert add(scheduler, "a", [*alike, *range(200, 250)]) == [(0, 144), (144, 6)]
    assert add(scheduler, "b", [*alike, *range(300, 350)]) == [(0, 96), (96, 48), (144, 6)]
    assert add(scheduler, "c", [*alike, *range(400, 450)]) == [(96, 48), (144, 6)]
    assert add(scheduler, "turn 2", [*alike, *range(400, 480)]) == [(144, 32), (176, 4)]
    assert add(scheduler, "salted", [*alike, *range(400, 450)], cache_salt="x") == [(0, 144), (144, 6)]
    stats = scheduler.stats()
    assert (stats.num_stored_states, stats.num_loaded_states, stats.num_state_blocks) == (6, 2, 12)
    assert scheduler.reset_prefix_cache() and scheduler.stats().num_state_blocks == 0


def test_states_are_kept_at_an_interval_and_no_closer_than_worth_their_memory() -> None:
    # Rounded up to 48 tokens. 20 blocks have room for 320 tokens, so at least 40 lie between states.
    scheduler = make_scheduler(num_state_blocks=20, prefix_cache_retention_interval=33)
    assert scheduler.cache_manager.states.least_tokens == 40
    assert add(scheduler, "a", list(range(140))) == [(0, 48), (48, 48), (96, 44)], "128 is too close to 96"
    assert add(scheduler, "b", list(range(160))) == [(96, 48), (144, 16)]
    assert add(scheduler, "c", list(range(500, 540))) == [(0, 40)]


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
    plan = scheduler.schedule()
    assert parts(plan) == [(0, POSITION)] and plan.ops == ()


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

"""While requests decode, images are encoded in parts, and prompts with images get the tokens that they get without parts."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxllm.config import EngineConfig
from jaxllm.device_ops import EncodeItem, EncodeParts
from jaxllm.engine.core import EngineCore
from jaxllm.engine.fault_points import injected
from jaxllm.request import EngineCoreRequest, FinishReason
from jaxllm.scheduler_output import SchedulerOutput
from tests.end_to_end.test_image_steps import picture, request
from tests.helpers import engines, vision_checkpoint

pytestmark = pytest.mark.slow

MOST, NUM_PARTS = 70, 4
"""Patches of a step that also decodes, and parts of an image then: programs encode 256 patches."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_checkpoint.write(tmp_path_factory.mktemp("deep") / "model", variant="deep")


@pytest.fixture(scope="module")
def make_core(directory: Path) -> Iterator[Callable[[int], EngineCore]]:
    made = []

    def make(most: int) -> EngineCore:
        options = {"max_num_batched_tokens": 16, "token_buckets": (16, 112), "dtype": "float32", "mm_max_patches": 256}
        options |= {"model": str(directory), "mm_max_decode_step_patches": most}
        made.append(EngineCore(EngineConfig.from_options(**{**engines.SMALL, **options})))
        return made[-1]

    yield make
    for core in made:
        core.shutdown()


@pytest.fixture(scope="module")
def whole(make_core) -> EngineCore:
    """An engine that encodes images whole."""
    return make_core(0)


@pytest.fixture(scope="module")
def parts(make_core) -> EngineCore:
    return make_core(MOST)


def plans_of(core: EngineCore, **options) -> list[SchedulerOutput]:
    """The plans of an engine from now on, with an empty cache."""
    engines.reschedule(core, **options)
    schedule, found = core.scheduler.schedule, list[SchedulerOutput]()

    def noting(**options) -> SchedulerOutput:
        found.append(schedule(**options))
        return found[-1]

    core.scheduler.schedule = noting
    return found


def num_parts(plan: SchedulerOutput) -> int:
    return sum(op.num_parts for op in plan.ops if isinstance(op, EncodeItem | EncodeParts))


def answers(
    core: EngineCore, arriving: list[EngineCoreRequest], then: Callable[[int], None] = lambda step: None
) -> dict[str, engines.Answer]:
    """Answers to a text, and to requests that arrive while it decodes."""

    def after_step(step: int, found: dict[str, engines.Answer]) -> None:
        for each in arriving if step == 3 else ():
            core.add_request(each)
        then(step)

    return engines.run(core, [request("text", 9, max_tokens=80)], after_step=after_step)


def tokens(found: dict[str, engines.Answer]) -> dict[str, list[int]]:
    return {name: answer.tokens for name, answer in found.items()}


def arriving() -> list[EngineCoreRequest]:
    """Two images with text between; one at the very start; the first image again, in a prompt that begins alike."""
    return [
        request("two", 5, picture(1, 3, 4), 4, picture(2, 2, 2), 3),
        request("first", picture(3, 5, 2), 2),
        request("again", 5, picture(1, 3, 4), 1),
    ]


def test_a_step_that_decodes_runs_one_part_and_tokens_stay(whole, parts) -> None:
    expected, before = tokens(answers(whole, arriving())), parts.stats().num_encoded_patches
    plans = plans_of(parts)
    assert tokens(answers(parts, arriving())) == expected
    assert parts.stats().num_encoded_patches - before == 4 * (12 + 4 + 10)
    assert [num_parts(plan) for plan in plans if num_parts(plan)] == [1] * 3 * NUM_PARTS
    assert all(any(row.request_id == "text" for row in plan.rows) for plan in plans if plan.ops)
    assert len([op for plan in plans for op in plan.ops if isinstance(op, EncodeItem)]) == 3, "pixels are sent once"
    without_text = plans_of(parts)
    found = tokens(engines.run(parts, arriving()))
    assert found == {name: expected[name] for name in found}
    assert num_parts(without_text[0]) > 1, "nothing decoded yet"


def test_preempted_requests_go_on_with_images_in_parts(whole, parts) -> None:
    requests = [request(f"{i}", 3 + i, picture(i, 3, 4), 4, picture(i % 3, 2, 2), i, max_tokens=24) for i in range(1, 7)]
    expected = tokens(answers(whole, requests))
    plans = plans_of(parts, num_blocks=12)
    found = answers(parts, requests)
    assert sum(answer.num_preemptions for answer in found.values())
    assert tokens(found) == expected
    assert any(isinstance(op, EncodeParts) for plan in plans for op in plan.ops)


@pytest.mark.parametrize("sleeps", [False, True])
def test_an_image_whose_request_is_gone_is_encoded_to_its_end(whole, parts, sleeps) -> None:
    """Another request then finds it. If all requests are gone, nothing of it is left once the engine has slept."""
    expected, plans = tokens(answers(whole, arriving())), plans_of(parts)
    gone = request("gone", 5, picture(1, 3, 4), 1)

    def abort(step: int) -> None:
        if "gone" in parts.scheduler.requests and sum(map(num_parts, plans)) == 2:
            parts.abort_requests(["gone", "text"] if sleeps else ["gone"])

    found = answers(parts, [gone, *([] if sleeps else arriving())], abort)
    assert "gone" not in found or not found["gone"].tokens
    if sleeps:
        assert sum(map(num_parts, plans)) in (2, 3), "no step came"
        parts.sleep(1)
        parts.wake_up()
        found = answers(parts, arriving())
    else:
        encoded = [op for plan in plans for op in plan.ops if isinstance(op, EncodeItem)]
        assert len(encoded) == 3 and sum(map(num_parts, plans)) == 3 * NUM_PARTS
    assert {name: answer.tokens for name, answer in found.items() if name != "gone"} == expected


def test_after_an_error_in_the_middle_images_are_encoded_anew(whole, parts) -> None:
    expected = tokens(answers(whole, arriving()))
    engines.reschedule(parts)
    with injected("op:2:error"):  # EncodeParts, behind EncodeItem
        failed = answers(parts, arriving())
    ended = {name for name, answer in failed.items() if answer.finish_reason is FinishReason.ERROR}
    assert ended == {"text", "two"}, "those that the step computes, and the one that waits for the image"
    assert all(failed[name].tokens == expected[name] for name in expected.keys() - ended)
    assert tokens(answers(parts, arriving())) == expected


def test_a_plan_without_rows_encodes_its_parts_at_once(parts) -> None:
    def slab(*ops: EncodeItem | EncodeParts) -> np.ndarray:
        for op in ops:
            parts.runner.dispatch(SchedulerOutput([], [], 0, [], [], ops=(op,)))
        return np.asarray(parts.runner.row_arrays.of_features["images"])

    payload = picture(1, 3, 4).payload
    nothing = slab(EncodeItem(0, picture(2, 2, 2).payload, [5], NUM_PARTS))
    begun = slab(EncodeItem(0, payload, [5], 1), EncodeParts(0, 1))
    assert (begun != nothing).any(), "of the first of the layers behind which results are taken"
    done = slab(EncodeParts(0, NUM_PARTS - 2))
    assert (slab(EncodeItem(0, payload, [5], NUM_PARTS)) == done).all() and (
        done[5 * 64 : 5 * 64 + 12] != begun[5 * 64 : 5 * 64 + 12]
    ).any()

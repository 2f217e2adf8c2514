"""Prompts with items, whose encoder has a budget for each step. tests/scheduler/test_random_schedules.py mixes them with all else."""

import pytest

from jaxllm.device_ops import EncodeItem
from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.request import PromptItem, Request, RequestStatus
from jaxllm.scheduler.encoder_cache import EncoderCache
from tests.helpers.fake_items import PLACEHOLDER, effective_prompt, encoder, image
from tests.helpers.fake_runner import FakeEngine, RandomDrafts, oracle_tokens
from tests.helpers.scheduling import make_request, make_scheduler

VOCAB = 50


def make_engine(step: int = 8, pages: int = 8, room: EncoderCache | None = None, **options: object) -> FakeEngine:
    options = {"block_size": 4, "max_model_len": 200, **options}
    return FakeEngine(make_scheduler(rooms=(room or encoder(item=16, step=step, pages=pages),), **options), vocab_size=VOCAB)


def picture(name: str, position: int, num_tokens: int = 8, **fields: object) -> PromptItem:
    return image(name.encode(), position, num_tokens, **fields)


def add(engine: FakeEngine, name: str, *items: PromptItem, length: int = 40, **options: object) -> Request:
    prompt = [7] * length
    for item in items:
        prompt[item.position : item.end] = [PLACEHOLDER] * item.num_tokens
    request = make_request(name, prompt, items=items, max_tokens=4, **options)
    engine.runner.device.requests[name] = request
    engine.scheduler.add_request(request)
    return request


def chunks(engine: FakeEngine, name: str) -> list[tuple[int, int]]:
    return [(row.start, row.num_tokens) for plan in engine.plans for row in plan.rows if row.request_id == name]


def encoded(engine: FakeEngine) -> list[list[str]]:
    """Names of the items that each plan encodes."""
    return [[op.payload[1:].decode() for op in plan.ops if isinstance(op, EncodeItem)] for plan in engine.plans]


def check_tokens(engine: FakeEngine, *requests: Request) -> None:
    """Every request gets the tokens of its items."""
    found = engine.run()
    for request in requests:
        prompt = effective_prompt(request.spec.prompt_token_ids, request.spec.items)
        assert found[request.request_id] == oracle_tokens(prompt, 4, VOCAB)


def test_a_chunk_ends_before_an_item_that_the_step_cannot_encode() -> None:
    engine = make_engine(step=8)
    request = add(engine, "a", picture("dog", 4), picture("cat", 20), picture("emu", 28))
    check_tokens(engine, request)
    assert chunks(engine, "a")[:3] == [(0, 20), (20, 8), (28, 12)]
    assert encoded(engine)[:4] == [["dog"], ["cat"], ["emu"], []]


def test_a_request_without_budget_waits_and_others_overtake_it() -> None:
    engine = make_engine(step=8)
    first, second = add(engine, "a", picture("dog", 0)), add(engine, "b", picture("cat", 0))
    text = add(engine, "c")
    engine.dispatch()
    assert [row.request_id for row in engine.plans[0].rows] == ["a", "c"]
    assert [request.request_id for request in engine.scheduler.waiting] == ["b"]
    check_tokens(engine, first, second, text)


def test_answers_to_one_prompt_encode_its_item_once_and_share_its_blocks() -> None:
    engine = make_engine(step=8, max_num_batched_tokens=20)
    answers = [add(engine, f"{index}_a", picture("dog", 8), length=24) for index in range(3)]
    check_tokens(engine, *answers)
    assert engine.runner.device.num_encoded == 1
    assert [request.num_cached_tokens > 0 for request in answers] == [False, True, True]


def test_a_prefix_that_ends_inside_an_item_is_used_and_only_with_the_same_item() -> None:
    engine = make_engine(step=12)
    first = add(engine, "a", picture("dog", 4, 12), length=16)
    check_tokens(engine, first)
    same, other = add(engine, "b", picture("dog", 4, 12), length=16), add(engine, "c", picture("cat", 4, 12), length=16)
    check_tokens(engine, same, other)
    assert (same.num_cached_tokens, other.num_cached_tokens) == (16, 4)


def test_a_preempted_request_computes_its_item_again() -> None:
    engine = make_engine(num_blocks=13, caching=False, max_model_len=48, pages=2)
    requests = [add(engine, name, picture(name, 10), length=22) for name in "ab"]
    check_tokens(engine, *requests)
    assert requests[1].num_preemptions == 1 and engine.runner.device.num_encoded == 2


@pytest.mark.parametrize("end", ["abort", "start over"])
def test_the_slots_of_a_request_are_free_however_it_leaves_them(end: str) -> None:
    engine = make_engine(pages=2, max_num_batched_tokens=12)
    add(engine, "a", picture("dog", 8))
    engine.step()
    if end == "abort":
        engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    else:
        engine.start_over()
        engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    check_tokens(engine, add(engine, "b", picture("cat", 8)))


def test_drafts_follow_a_prompt_with_an_item() -> None:
    import random

    drafts = RandomDrafts(random.Random(1), num_drafts=3, num_lookahead=2, share_right=0.8)
    engine = make_engine(drafts=drafts, max_num_batched_tokens=12)
    check_tokens(engine, *[add(engine, name, picture(name, 20)) for name in "ab"])


def test_a_kind_that_no_room_computes_is_refused() -> None:
    for rooms, computed in (((), "text alone"), ((encoder(),), "image")):
        scheduler = make_scheduler(rooms=rooms)
        clip = PromptItem("audio", b"clip", 1, 2)
        with pytest.raises(InvalidRequestError, match=f"kind 'audio' at position 1; this engine computes {computed}"):
            scheduler.add_request(make_request("a", 8, items=(clip,)))
        assert not scheduler.requests


def test_an_item_that_its_room_can_never_compute_is_refused() -> None:
    engine = make_engine(step=8)
    with pytest.raises(InvalidRequestError, match="image at position 4 has 17 patches, this engine encodes at most 16"):
        add(engine, "a", picture("dog", 4, 17))
    assert not engine.scheduler.requests


def test_items_need_chunks() -> None:
    with pytest.raises(ConfigError, match="enable_chunked_prefill is off"):
        make_scheduler(rooms=(encoder(),), enable_chunked_prefill=False)

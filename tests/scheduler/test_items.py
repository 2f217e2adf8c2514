"""Prompts with items, whose encoder has a budget for each step. tests/scheduler/test_random_schedules.py mixes them with all else."""

import pytest

from jaxllm.data_parallel.scheduler import RanksScheduler
from jaxllm.device_ops import EncodeItem, EncodeParts
from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.request import PromptItem, Request, RequestStatus
from jaxllm.scheduler.encoder_cache import EncoderCache
from jaxllm.scheduler.scheduler import Scheduler
from tests.helpers.fake_items import PLACEHOLDER, effective_prompt, encoder, image
from tests.helpers.fake_runner import FakeEngine, FakeRanksEngine, RandomDrafts, oracle_tokens
from tests.helpers.scheduling import make_request, make_scheduler

VOCAB = 50


def make_engine(step: int = 8, pages: int = 8, room: EncoderCache | None = None, **options: object) -> FakeEngine:
    options = {"block_size": 4, "max_model_len": 200, **options}
    return FakeEngine(make_scheduler(rooms=(room or encoder(item=16, step=step, pages=pages),), **options), vocab_size=VOCAB)


def named_image(name: str, position: int, num_tokens: int = 8) -> PromptItem:
    return image(name.encode(), position, num_tokens)


def add(engine: FakeEngine, name: str, *items: PromptItem, length: int = 40, output: int = 4, **options: object) -> Request:
    prompt = [7] * length
    for item in items:
        prompt[item.position : item.end] = [PLACEHOLDER] * item.num_tokens
    request = make_request(name, prompt, items=items, max_tokens=output, **options)
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
    request = add(engine, "a", named_image("dog", 4), named_image("cat", 20), named_image("emu", 28))
    check_tokens(engine, request)
    assert chunks(engine, "a")[:3] == [(0, 20), (20, 8), (28, 12)]
    assert encoded(engine)[:4] == [["dog"], ["cat"], ["emu"], []]


def test_small_items_count_as_much_as_their_program_encodes() -> None:
    engine = make_engine(room=encoder(step=8, least=4))
    request = add(engine, "a", *(named_image(name, position, 1) for name, position in (("dog", 4), ("cat", 8), ("emu", 12))))
    check_tokens(engine, request)
    assert encoded(engine)[:3] == [["dog", "cat"], ["emu"], []]


def test_a_request_without_budget_waits_and_others_overtake_it() -> None:
    engine = make_engine(step=8)
    first, second = add(engine, "a", named_image("dog", 0)), add(engine, "b", named_image("cat", 0))
    text = add(engine, "c")
    engine.dispatch()
    assert [row.request_id for row in engine.plans[0].rows] == ["a", "c"]
    assert [request.request_id for request in engine.scheduler.waiting] == ["b"]
    check_tokens(engine, first, second, text)


def test_answers_to_one_prompt_encode_its_item_once_and_share_its_blocks() -> None:
    engine = make_engine(step=8, max_num_batched_tokens=20)
    answers = [add(engine, f"{index}_a", named_image("dog", 8), length=24) for index in range(3)]
    check_tokens(engine, *answers)
    assert engine.runner.device.num_encoded == 1
    assert [request.num_cached_tokens > 0 for request in answers] == [False, True, True]


def test_a_prefix_that_ends_inside_an_item_is_used_and_only_with_the_same_item() -> None:
    engine = make_engine(step=12)
    first = add(engine, "a", named_image("dog", 4, 12), length=16)
    check_tokens(engine, first)
    same, other = add(engine, "b", named_image("dog", 4, 12), length=16), add(engine, "c", named_image("cat", 4, 12), length=16)
    check_tokens(engine, same, other)
    assert (same.num_cached_tokens, other.num_cached_tokens) == (16, 4)


def test_a_preempted_request_computes_its_item_again() -> None:
    engine = make_engine(num_blocks=13, caching=False, max_model_len=48, pages=2)
    requests = [add(engine, name, named_image(name, 10), length=22) for name in "ab"]
    check_tokens(engine, *requests)
    assert requests[1].num_preemptions == 1 and engine.runner.device.num_encoded == 2


def test_pages_of_an_item_are_kept_until_its_last_token_is_computed_and_then_until_others_need_them() -> None:
    engine = make_engine(pages=3, max_num_batched_tokens=6)
    check_tokens(engine, add(engine, "a", named_image("dog", 2, 12)), add(engine, "b", named_image("cat", 0, 4)))
    assert [names for names in encoded(engine) if names] == [["dog"], ["cat"]]
    engine.scheduler.reset_prefix_cache()
    check_tokens(engine, add(engine, "c", named_image("cat", 8, 4)))
    stats = engine.scheduler.stats()
    assert (stats.item_cache_queries, stats.item_cache_hits, stats.num_item_evictions) == (3, 0, 1)


def test_an_item_that_left_the_prefix_cache_alone_is_not_encoded_again() -> None:
    engine = make_engine(caching=False)
    check_tokens(engine, add(engine, "a", named_image("dog", 8), named_image("cat", 16)))
    check_tokens(engine, add(engine, "b", named_image("cat", 3), named_image("dog", 20)))
    stats = engine.scheduler.stats()
    assert (stats.item_cache_queries, stats.item_cache_hits, stats.num_encoded_patches) == (4, 2, 16)
    assert (stats.num_item_pages, stats.num_used_item_pages, engine.runner.device.num_encoded) == (8, 0, 2)


def test_least_recently_used_items_go_first() -> None:
    engine = make_engine(caching=False, pages=4)
    for names in ("dog", "cat", "dog", "emu", "dog", "cat"):
        check_tokens(engine, add(engine, names, named_image(names, 8)))
    assert [name for names in encoded(engine) for name in names] == ["dog", "cat", "emu", "cat"]


def test_one_that_found_no_pages_is_not_overtaken_by_smaller_ones() -> None:
    engine = make_engine(pages=4, step=16, max_num_batched_tokens=24, long_prefill_token_threshold=8)
    first = add(engine, "a", named_image("dog", 4, 8))
    engine.step()
    large, small = add(engine, "b", named_image("elephant", 0, 12)), add(engine, "c", named_image("ant", 0, 4))
    check_tokens(engine, first, large, small)
    assert [names for names in encoded(engine) if names] == [["dog"], ["elephant", "ant"]]


def whole_engine(**options: object) -> FakeEngine:
    engine = make_engine(room=encoder(item=12, step=12, whole_tokens=12), **options)
    engine.runner.device.whole_items = True
    return engine


def test_a_step_computes_all_tokens_that_attend_to_each_other_or_stops_before_them() -> None:
    engine = whole_engine(max_num_batched_tokens=16)
    request = add(engine, "a", named_image("dog", 8, 12), named_image("cat", 24, 8))
    check_tokens(engine, request)
    assert chunks(engine, "a")[:4] == [(0, 8), (8, 16), (24, 16), (40, 1)]


@pytest.mark.parametrize(
    ("start", "count", "allowed"),
    [(0, 10, 4), (0, 15, 4), (0, 16, 16), (4, 11, 0), (4, 12, 12), (12, 3, 0), (12, 4, 4), (15, 1, 1), (16, 2, 2)],
)
def test_what_is_left_of_a_whole_item_behind_a_cached_prefix_is_computed_in_one_step_too(start, count, allowed) -> None:
    room = encoder(item=12, step=12, whole_tokens=12)
    room.begin_step(decodes=False)
    assert room.limit(make_request("a", 24, items=(named_image("dog", 4, 12),)), start, count) == allowed


def test_requests_that_keep_coming_do_not_take_the_tokens_that_a_whole_item_waits_for() -> None:
    engine = whole_engine(max_num_batched_tokens=12)
    add(engine, "0", length=5)
    engine.step()
    add(engine, "a", named_image("dog", 0, 12), length=12)
    for number in range(1, 12):
        add(engine, str(number), length=5)
        engine.step()
    assert chunks(engine, "a")[0] == (0, 12)
    order = list(dict.fromkeys(row.request_id for plan in engine.plans for row in plan.rows))
    assert order[:3] == ["0", "a", "1"]
    engine.run()


def test_limits_of_chunks_leave_room_for_a_whole_item() -> None:
    engine = whole_engine(max_num_batched_tokens=64, long_prefill_token_threshold=4)
    requests = [add(engine, name, named_image(name, 9, 12)) for name in "ab"]
    engine.scheduler.limit_steps(64)
    check_tokens(engine, *requests)
    assert engine.scheduler.limits.max_num_batched_tokens == 12 and (9, 12) in chunks(engine, "b")


def test_an_item_too_large_for_a_step_is_refused() -> None:
    engine = make_engine(room=encoder(item=12, whole_tokens=8))
    with pytest.raises(
        InvalidRequestError, match="at position 4 has 9 tokens, a step of this engine computes at most 8 of one"
    ):
        add(engine, "a", named_image("dog", 4, 9))


@pytest.mark.parametrize("end", ["abort", "start over"])
def test_the_slots_of_a_request_are_free_however_it_leaves_them(end: str) -> None:
    engine = make_engine(pages=2, max_num_batched_tokens=12)
    add(engine, "a", named_image("dog", 8))
    engine.step()
    if end == "abort":
        engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    else:
        engine.start_over()
        engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    check_tokens(engine, add(engine, "b", named_image("cat", 8)))


def test_drafts_follow_a_prompt_with_an_item() -> None:
    import random

    drafts = RandomDrafts(random.Random(1), num_drafts=3, num_lookahead=2, share_right=0.8)
    engine = make_engine(drafts=drafts, max_num_batched_tokens=12)
    check_tokens(engine, *[add(engine, name, named_image(name, 20)) for name in "ab"])


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
        add(engine, "a", named_image("dog", 4, 17))
    assert not engine.scheduler.requests


def test_items_need_chunks() -> None:
    with pytest.raises(ConfigError, match="enable_chunked_prefill is off"):
        make_scheduler(rooms=(encoder(),), enable_chunked_prefill=False)


def decoding_engine(decode_step: int) -> FakeEngine:
    """An engine with a request that decodes."""
    room = encoder(item=16, step=16, pages=12, decode_step=decode_step)
    engine = make_engine(room=room, caching=False, max_num_batched_tokens=64)
    add(engine, "text", length=4, output=60)
    engine.step()
    return engine


def parts(engine: FakeEngine) -> list[list[int]]:
    """Parts that each operation of a plan runs."""
    return [[op.num_parts for op in plan.ops if isinstance(op, EncodeItem | EncodeParts)] for plan in engine.plans]


def test_while_requests_decode_a_step_encodes_one_part_and_the_chunk_ends_before_the_item() -> None:
    engine = decoding_engine(4)
    request = add(engine, "a", named_image("dog", 4, 12), length=24)
    assert engine.scheduler.chunk_rooms[0]._sizes.num_parts(12) == 4
    check_tokens(engine, request)
    assert chunks(engine, "a")[:2] == [(0, 4), (4, 20)]
    assert parts(engine)[:6] == [[], [1], [1], [1], [1], []]
    assert engine.plans[2].num_tokens == engine.plans[3].num_tokens == 1, "they only decode and encode"
    stats = engine.scheduler.stats()
    assert (stats.item_cache_queries, stats.item_cache_hits, stats.num_encoded_patches) == (1, 0, 12)


def test_when_nothing_decodes_any_more_the_parts_left_run_at_once() -> None:
    engine = decoding_engine(4)
    request = add(engine, "a", named_image("dog", 0, 12), length=24)
    engine.step()
    engine.scheduler.finish_requests("text", RequestStatus.FINISHED_ABORTED)
    check_tokens(engine, request)
    assert parts(engine)[:4] == [[], [1], [3], []] and chunks(engine, "a")[0] == (0, 24)


def test_an_item_that_was_begun_goes_first_and_small_ones_share_what_is_left() -> None:
    engine = decoding_engine(10)
    for name, count in (("elephant", 16), ("dog", 16), ("ant", 2)):
        add(engine, name, named_image(name, 0, count), length=24)
    engine.run()
    assert [names for names in encoded(engine) if names] == [["elephant"], ["dog", "ant"]]
    assert parts(engine)[:6] == [[], [1], [1], [1, 1], [1], []]
    assert engine.runner.device.num_encoded == 3


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, None])
def test_an_item_is_encoded_to_its_end_for_all_that_ask_for_it(status) -> None:
    """Its request was aborted, or a second one asks for the same item."""
    engine = decoding_engine(4)
    first = add(engine, "a", named_image("dog", 0, 12), length=24)
    engine.step()
    if status is not None:
        engine.scheduler.finish_requests("a", status)
    second = add(engine, "b", named_image("dog", 0, 12), length=24)
    check_tokens(engine, second, *([first] if status is None else []))
    assert engine.runner.device.num_encoded == 1
    assert engine.scheduler.stats().item_cache_hits == (status is None)


def test_a_request_stays_in_the_rank_that_has_begun_its_item() -> None:
    def new_rank() -> Scheduler:
        return make_scheduler(rooms=(encoder(item=16, step=16, decode_step=4),), block_size=4, max_model_len=200)

    engine = FakeRanksEngine(RanksScheduler(new_rank, 2), vocab_size=VOCAB)
    texts = [make_request(name, [7] * 4, max_tokens=20) for name in ("first", "second")]
    prompt, item = [PLACEHOLDER] * 12 + [7] * 4, named_image("dog", 0, 12)
    request = make_request("a", prompt, items=(item,), max_tokens=4)
    for each in (*texts, request):
        engine.scheduler.add_request(each)
        engine.step()
    for runner in engine.runners:
        runner.device.requests["a"] = request
    assert engine.run()["a"] == oracle_tokens(effective_prompt(prompt, [item]), 4, VOCAB)
    assert sorted(runner.device.num_encoded for runner in engine.runners) == [0, 1]


def test_parts_are_planned_whether_or_not_a_request_asks_for_them_and_are_forgotten_with_the_slab() -> None:
    room = encoder(item=16, step=16, decode_step=4)
    request = make_request("a", 24, items=(named_image("dog", 0, 12),))
    room.begin_step(decodes=True)
    assert room.limit(request, 0, 24) == 0
    (begun,) = room.step_ops()
    assert begun == EncodeItem(0, request.spec.items[0].payload, begun.pages, 1, "a") and room.step_ops() == []
    room.begin_step(decodes=True)
    assert room.step_ops() == [EncodeParts(0, 1, "a")], "a failure names its request"
    room.forget()
    room.begin_step(decodes=True)
    assert room.step_ops() == [], "what was begun is forgotten"

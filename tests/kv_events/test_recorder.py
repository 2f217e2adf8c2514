"""Which changes are handed on: of several media, without salts, and everything again after some were dropped."""

import dataclasses
from typing import Any

import pytest

from jaxllm.cache_policy import FULL, WindowPolicy
from jaxllm.kv_events import recorder as module
from jaxllm.kv_events.messages import Batch, Change
from jaxllm.kv_events.recorder import Recorder
from jaxllm.request import PromptItem, RequestStatus
from jaxllm.scheduler.scheduler import Scheduler
from tests.helpers.kv_subscriber import Subscriber
from tests.helpers.scheduling import make_request, make_scheduler

SIZE = 4


@dataclasses.dataclass
class Sink:
    """Keeps batches, as long as there is room."""

    room: int = 1000
    batches: list[Batch] = dataclasses.field(default_factory=list)
    loses: bool = False

    def has_room(self) -> bool:
        return len(self.batches) < self.room

    def put(self, batch: Batch) -> bool:
        if self.has_room():
            self.batches.append(batch)
            return True
        return False

    def has_lost(self) -> bool:
        lost, self.loses = self.loses, False
        return lost

    def take(self) -> list[Batch]:
        taken, self.batches = self.batches, []
        return taken


def made(sink: Sink, *, has_tiers: bool = False, **options: Any) -> tuple[Scheduler, Recorder]:
    recorder = Recorder(sink, SIZE, has_tiers=has_tiers)
    scheduler = make_scheduler(block_size=SIZE, observer=recorder, **options)
    recorder.publish()
    (start,) = sink.take()
    assert start.is_whole and not start.changes, "what was said before the start is void"
    return scheduler, recorder


def compute(scheduler: Scheduler, name: str, prompt: list[int], **options: Any) -> None:
    """Compute a prompt, and end its request."""
    scheduler.add_request(make_request(name, prompt, max_tokens=1, **options))
    while scheduler.has_requests():
        plan = scheduler.schedule()
        if not plan.rows:
            break
        scheduler.finish_requests([row.request_id for row in plan.rows], RequestStatus.FINISHED_ABORTED)


def changes(sink: Sink) -> list[Change]:
    (batch,) = sink.take()
    assert not batch.is_whole
    return list(batch.changes)


def test_full_blocks_are_reported_when_they_come_and_when_they_leave() -> None:
    sink = Sink()
    scheduler, recorder = made(sink, num_blocks=6)
    compute(scheduler, "a", [1, 2, 3, 4, 5, 6, 7, 8, 9], session_id="s", cache_salt="pepper")
    recorder.publish()
    first, second = changes(sink)
    assert [list(each.block.token_ids) for each in (first, second)] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert first.block.parent is None and second.block.parent == first.block.name
    assert (first.medium, first.is_stored, first.block.session_id, first.block.adapter) == ("GPU", True, "s", None)
    assert first.block.extra_keys is second.block.extra_keys is None, "a salt is a secret"
    assert "pepper" not in repr(first)
    compute(scheduler, "b", [1, 2, 3, 4, 5, 6, 7, 8, 9], cache_salt="pepper")
    recorder.publish()
    assert not sink.batches, "nothing is new"
    compute(scheduler, "c", [9] * 20)
    recorder.publish()
    found = changes(sink)
    assert [change.block.name for change in found if not change.is_stored] == [second.block.name, first.block.name]
    assert sum(change.is_stored for change in found) == 5


def test_a_window_has_a_group_of_its_own() -> None:
    sink = Sink()
    scheduler, recorder = made(sink, policies=(FULL, WindowPolicy(6)))
    compute(scheduler, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    recorder.publish()
    found = changes(sink)
    assert [(change.block.group, change.block.token_ids[0]) for change in found] == [(0, 1), (1, 1), (0, 5), (1, 5)]
    assert found[2].block.parent == found[0].block.name and found[3].block.parent == found[0].block.name


def test_items_are_part_of_what_a_block_is() -> None:
    recorder = Recorder(Sink(), SIZE, has_tiers=False)
    items = (PromptItem("image", b"\xab\xcd", 2, 3), PromptItem("image", b"\x01", 8, 1))
    request = make_request("a", list(range(12)), items=items)
    request.block_hashes = [bytes([index]) * 32 for index in range(3)]
    blocks = [recorder._block(name, request, index) for index, name in enumerate(request.block_hashes)]
    assert [block.extra_keys for block in blocks] == [(("abcd", 2),), (("abcd", -2),), (("01", 0),)]


def test_what_was_dropped_is_followed_by_everything() -> None:
    sink = Sink(room=1)
    scheduler, recorder = made(sink, num_blocks=12)
    compute(scheduler, "a", [1] * 8)
    recorder.publish()
    compute(scheduler, "b", [2] * 8)
    recorder.publish()
    assert recorder.num_dropped == 2 and recorder.num_batches == 2
    compute(scheduler, "c", [3] * 4)
    recorder.publish()
    assert recorder.num_dropped == 3, "there is still no room"
    assert len(changes(sink)) == 2
    recorder.publish()
    (batch,) = sink.take()
    assert batch.is_whole and len(batch.changes) == 5 and recorder.num_dropped == 3
    recorder.publish()
    assert not sink.batches
    sink.loses = True
    recorder.publish()
    assert sink.take()[0].is_whole


def test_a_reset_and_a_start_over_clear_the_devices_alone() -> None:
    sink = Sink()
    scheduler, recorder = made(sink, has_tiers=True)
    compute(scheduler, "a", [1] * 8)
    recorder.publish()
    first, second = changes(sink)
    recorder.note_tier("CPU", first.block.name, True)
    scheduler.start_over()
    recorder.publish()
    (batch,) = sink.take()
    assert batch.is_whole and batch.changes == [Change(first.block, "CPU", True)]
    assert scheduler.reset_prefix_cache()
    recorder.note_tier("CPU", first.block.name, False)
    recorder.publish()
    assert sink.take() == [Batch(sink_time(), [], is_whole=True)] and recorder.num_dropped == 0
    assert second.block.name not in recorder._held


class _AnyTime:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, float)


def sink_time() -> Any:
    return _AnyTime()


def test_what_arrives_in_a_tier_after_it_left_the_devices_has_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GONE", 1)
    sink = Sink()
    scheduler, recorder = made(sink, has_tiers=True, num_blocks=4)
    compute(scheduler, "a", [1] * 4)
    compute(scheduler, "b", [2] * 12)
    recorder.publish()
    name = next(change.block.name for change in changes(sink) if not change.is_stored)
    recorder.note_tier("CPU", name, True)
    recorder.note_tier("STORAGE", b"\x07" * 32, True)
    recorder.publish()
    known, unknown = changes(sink)
    recorder.note_tier("CPU", name, True)
    recorder.note_tier("CPU", b"\x08" * 32, False)
    recorder.publish()
    assert not sink.batches, "nothing is new"
    assert list(known.block.token_ids) == [1] * 4 and known.medium == "CPU"
    assert unknown.block.token_ids == () and unknown.medium == "STORAGE"
    recorder.note_tier("STORAGE", name, True)
    recorder.note_tier("CPU", name, False)
    recorder.publish()
    assert [(change.medium, change.is_stored) for change in changes(sink)] == [("STORAGE", True), ("CPU", False)]
    compute(scheduler, "c", [3] * 12)
    assert len(recorder._gone) == 1, "only the latest are remembered"


def test_the_view_of_a_subscriber(tmp_path: object) -> None:
    """A subscriber's view of the cache, from the payloads of batches."""
    sink, subscriber = Sink(), Subscriber(block_size=SIZE)
    scheduler, recorder = made(sink, num_blocks=5)
    for number in range(4):
        compute(scheduler, str(number), [number] * 9)
        recorder.publish()
        for batch in sink.take():
            subscriber.read(batch)
        assert subscriber.on("GPU") == set(scheduler.cache_manager.pool.cached_hashes())

"""The host tier alone: what is stored, found, loaded and dropped, and when."""

from collections.abc import Sequence
from typing import Any

import pytest

from jaxllm.device_ops import FinishedCopy, GatherBlocks, LoadBlocks
from jaxllm.kv_tiers.contents import Contents
from jaxllm.kv_tiers.host_tier import HostTier
from jaxllm.kv_tiers.rates import Rates
from jaxllm.kv_tiers.slot_store import Transfer
from jaxllm.scheduler.cache_tier import TierStep
from jaxllm.scheduler_stats import SchedulerStats


class Copies:
    """Copies that are over when a test says so."""

    num_staging, max_blocks, block_bytes = 2, 2, 1000

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self.over: list[FinishedCopy] = []
        self.cancelled: list[int] = []

    def finished(self) -> list[FinishedCopy]:
        over, self.over = self.over, []
        return over

    def wait(self, seconds: float) -> None:
        raise AssertionError("nothing waits")

    def wake(self) -> None:
        """Nothing waits."""

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)


class Store:
    """A store whose transfers are over when a test says so."""

    name, writes = "test", True

    def __init__(self, *names: bytes):
        self.contents, self.listener = set(names), None
        self.under_way: dict[int, tuple[str, list[bytes], list[int]]] = {}
        self.over: list[Transfer] = []
        self.seconds_each, self.is_full, self.opens, self.was_reset = 0.0, False, False, False

    def find(self, names: Sequence[bytes]) -> set[bytes]:
        return self.contents & set(names)

    def seconds(self, num_blocks: int) -> float:
        return num_blocks * self.seconds_each

    def awaited(self, names: Sequence[bytes]) -> list[bytes]:
        return []

    def lends(self, names: Sequence[bytes]) -> list[bytes]:
        return []

    def read(self, number: int, names: Sequence[bytes], slots: Sequence[int]) -> None:
        self.under_way[number] = ("read", list(names), list(slots))

    def is_opening(self) -> bool:
        return self.opens

    def write(self, number: int, names: Sequence[bytes], slots: Sequence[int]) -> bool:
        if not self.is_full:
            self.under_way[number] = ("write", list(names), list(slots))
        return not self.is_full

    def end(self, *is_right: bool) -> list[bytes]:
        """The first transfer is over. Returns its names."""
        number, (kind, names, _) = next(iter(self.under_way.items()))
        del self.under_way[number]
        self.contents |= set(names) if kind == "write" else set()
        self.over.append(Transfer(number, is_right or (True,) * len(names), 0.001))
        return names

    def finished(self) -> list[Transfer]:
        over, self.over = self.over, []
        return over

    def discard(self, names: Sequence[bytes]) -> None:
        self.contents -= set(names)

    def reset(self, *, external: bool) -> None:
        self.was_reset = True

    def add_stats(self, stats: SchedulerStats) -> None:
        """Add nothing."""

    def close(self) -> None:
        """It has no threads."""


class Driven:
    """A tier whose steps a test makes."""

    def __init__(self, num_slots: int = 8, num_cold: int = 0, **options: Any):
        self.copies = Copies(num_slots)
        self.worth = Rates(1000)
        self.tier = HostTier(self.copies, self.worth, num_cold=num_cold, **options)
        self.step_id = 0

    def step(self, done: int | None = None) -> Any:
        """Begin a step, with all before done."""
        self.step_id += 1
        ops, loaded = self.tier.begin_step(self.step_id, self.step_id - 1 if done is None else done)
        self.tier.check_integrity()
        return TierStep([*ops, *self.tier.end_step()], loaded)

    def end(self, *ops: Any, is_right: tuple[bool, ...] = (), error: Exception | None = None) -> None:
        """The copies of operations are over."""
        for op in ops:
            verdict = is_right or (True,) * len(getattr(op, "block_ids", ()))
            self.copies.over.append(FinishedCopy(op.number, verdict, 0.001, error))

    def store(self, *names: bytes) -> list[Any]:
        found = self.tier.store(range(10, 10 + len(names)), names)
        self.tier.check_integrity()
        return found

    def stored(self, *names: bytes) -> "Driven":
        """A tier that has these."""
        for name in names:
            self.step()
            self.end(*self.store(name))
        self.step()
        self.step()
        assert sorted(self.tier.match(names)) == sorted(names)
        return self

    def run(self) -> dict[int, list[bool]]:
        """Make steps until nothing happens. Returns the loads that ended."""
        loaded: dict[int, list[bool]] = {}
        for _ in range(8):
            step = self.step()
            loaded.update(step.loaded)
            self.end(*step.ops)
        return loaded

    @property
    def stats(self) -> SchedulerStats:
        stats = SchedulerStats(0, 0, 0.0, 0, 0, 0, 0, 0)
        self.tier.add_stats(stats)
        return stats


def test_a_content_is_found_once_its_copy_is_over_and_its_step_is_done() -> None:
    driven = Driven()
    driven.step()
    (gather,) = driven.store(b"a")
    assert isinstance(gather, GatherBlocks) and gather.block_ids == [10] and driven.store(b"a") == []
    driven.step()
    assert not driven.tier.match([b"a"]), "it is not there yet"
    driven.end(gather)
    driven.step(done=0)
    assert not driven.tier.match([b"a"]), "the step that it was read before may fail"
    driven.step(done=1)
    assert driven.tier.match([b"a", b"b"]) == [b"a"]
    assert (driven.stats.num_used_host_slots, driven.stats.num_stored_blocks, driven.stats.stored_bytes) == (1, 1, 1000)


def test_a_plan_waits_for_stores_where_few_buffers_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    driven, waits = Driven(num_cold=8), list[float]()
    driven.step()
    gathers = driven.store(b"a", b"b", b"c")
    assert len(gathers) == 2

    def wait(seconds: float) -> None:
        waits.append(seconds)
        driven.end(gathers.pop(0))

    monkeypatch.setattr(driven.copies, "wait", wait)
    driven.tier.wait_for_stores(1000)
    assert not waits, "how long a step takes is not known"
    driven.worth.note_step(1000, 2.0)
    driven.tier.wait_for_stores(1000)
    assert len(waits) == 2 and max(waits) <= 0.5
    driven.step()
    driven.tier.wait_for_stores(1000)
    assert len(waits) == 2, "both buffers are free"


def test_a_load_is_a_copy_for_each_part_and_reports_each_block() -> None:
    driven = Driven().stored(b"a", b"b", b"c")
    load = driven.tier.load([5, 6, 7], [b"a", b"b", b"c"])
    first, second = driven.step().ops
    assert [type(op) for op in (first, second)] == [LoadBlocks] * 2
    assert (first.block_ids, second.block_ids) == ([5, 6], [7])
    driven.end(second)
    step = driven.step()
    assert not step.ops and not step.loaded
    driven.end(first, is_right=(True, False))
    assert driven.step().loaded == [(load, [True, False, True])]
    assert driven.tier.match([b"a", b"b", b"c"]) == [b"a", b"c"], "what was damaged is dropped"
    assert (driven.stats.num_loaded_blocks, driven.stats.num_damaged_blocks) == (2, 1)
    assert (driven.stats.loaded_bytes, driven.stats.load_seconds) == (3000, pytest.approx(0.002))
    assert sum(driven.stats.load_byte_counts) == sum(driven.stats.load_second_counts) == 2


@pytest.mark.parametrize("when", ["before it is copied", "while it is copied", "when it is over"])
def test_a_cancelled_load_ends_its_copies_and_gives_its_slots_back(when: str) -> None:
    driven = Driven(num_slots=1).stored(b"a")
    load = driven.tier.load([5], [b"a"])
    ops = driven.step().ops if when != "before it is copied" else []
    if when == "when it is over":
        driven.end(*ops)
    driven.tier.cancel(load)
    assert driven.copies.cancelled == [op.number for op in ops]
    driven.tier.check_integrity()
    assert driven.store(b"b") and not driven.tier.match([b"a"]), "the only slot is free"
    driven.end(*ops)  # it may be over in spite of that
    step = driven.step()
    assert not step.loaded and not step.ops


def test_a_content_that_is_wrong_is_never_found_nor_loaded_right() -> None:
    driven = Driven().stored(b"a")
    gathers = driven.store(b"b")
    load = driven.tier.load([5], [b"a"])
    driven.tier.discard([b"a", b"b", b"unknown"])
    driven.end(*gathers, *driven.step().ops)
    assert driven.step().loaded == [(load, [False])] and not driven.tier.match([b"a", b"b"])
    assert driven.stats.num_used_host_slots == 0 and driven.stats.num_damaged_blocks == 0


def test_a_content_that_is_wrong_is_not_loaded_right_while_it_is_copied() -> None:
    driven = Driven().stored(b"a")
    load = driven.tier.load([5], [b"a"])
    copies = driven.step().ops
    driven.tier.discard([b"a"])
    driven.end(*copies)
    assert driven.step().loaded == [(load, [False])]


def test_what_is_not_stored_is_counted() -> None:
    driven = Driven()
    driven.step()
    gathers = driven.store(*(bytes([index]) for index in range(7)))
    assert [len(op.slots) for op in gathers] == [2, 2] and driven.stats.num_skipped_stores == 3
    assert not driven.stats.num_skipped_for_slots and driven.stats.num_written_host_slots == 4
    assert (driven.stats.num_allocated_host_slots, driven.stats.host_block_counts[:3]) == (4, (0, 2, 0))
    assert driven.tier.store_ahead([9], [b"x"]) == [] and driven.stats.num_skipped_stores == 3, "it is offered again"


def test_slots_that_copies_use_are_not_given_away() -> None:
    driven = Driven(num_slots=2)
    driven.step()
    driven.end(*driven.store(b"a", b"b"))
    assert driven.store(b"c") == [], "both are written"
    driven.step(done=0)
    assert driven.store(b"c") == [], "their step is not done"
    assert (driven.stats.num_skipped_stores, driven.stats.num_skipped_for_slots) == (2, 2)
    driven.step()
    driven.tier.load([5], [b"b"])
    assert (driven.stats.num_read_host_slots, driven.stats.num_written_host_slots) == (1, 0)
    assert driven.store(b"c", b"d") and not driven.tier.match([b"a"]) and driven.tier.match([b"b"])


@pytest.mark.parametrize("stored", [True, False])
def test_forgetting_drops_what_is_under_way(stored: bool) -> None:
    driven = Driven().stored(b"a", b"b")
    driven.tier.load([5, 6], [b"a", b"b"])
    gathers = driven.store(b"c")
    copies = driven.step().ops
    driven.tier.forget(stored=stored)
    driven.tier.check_integrity()
    driven.end(*gathers, *copies, error=RuntimeError("buffers are lost") if not stored else None)
    step = driven.step()
    assert not step.loaded and not step.ops
    assert list(driven.tier.match([b"a", b"b", b"c"])) == ([] if stored else [b"a", b"b"])
    assert len(driven.store(b"d", b"e", b"f")) == 2


def test_an_error_of_a_copy_is_raised() -> None:
    driven = Driven()
    driven.step()
    driven.end(*driven.store(b"a"), error=RuntimeError("cudaMemcpy2DAsync failed"))
    with pytest.raises(RuntimeError, match="cudaMemcpy2DAsync"):
        driven.step()


@pytest.mark.parametrize("what", ["store", "load"])
def test_an_error_of_a_copy_comes_after_the_steps_before_it(what: str) -> None:
    """A step that fails takes the copies behind it with it: it is that step which is to be reported, with its requests."""
    driven = Driven().stored(b"a")
    if what == "store":
        driven.step()
        ops = driven.store(b"b")
    else:
        driven.tier.load([5], [b"a"])
        ops = driven.step().ops
    planned = driven.step_id
    driven.end(*ops, error=RuntimeError("a step before it failed"))
    driven.step(done=planned - 2)
    driven.step(done=planned - 1)
    with pytest.raises(RuntimeError, match="a step before it failed"):
        driven.step(done=planned)
    driven.end(*ops, error=RuntimeError("again"))
    driven.tier.forget(stored=False)
    driven.step()


def test_few_tokens_are_computed() -> None:
    driven = Driven(min_tokens=32).stored(b"a")
    driven.worth.note_step(1000, 1.0)
    assert [list(driven.tier.choose([b"a"], count)) for count in (31, 32)] == [[], [b"a"]]


def test_what_takes_longer_to_load_than_to_compute_is_computed() -> None:
    rates = Rates(block_bytes=1 << 20)
    assert [rates.is_worth_loading(10, 160, seconds) for seconds in (0.0, 0.1)] == [True, False], "nothing is known"
    for _ in range(100):
        rates.note_step(1000, 0.022)
        rates.note_step(64, 1.0)  # says nothing of a token
        rates.note_copy(32, 0.0012)
    assert [rates.is_worth_loading(count, 16 * count) for count in (4, 20)] == [False, True]
    assert not rates.is_worth_loading(100, 16 * 20), "blocks of windows give no tokens of their own"
    for _ in range(100):
        rates.note_copy(1, 0.001)
    assert not rates.is_worth_loading(1000, 16000)


@pytest.mark.parametrize("num_bad", [1, 8])
def test_a_few_slow_copies_and_steps_change_nothing(num_bad: int) -> None:
    """As the first of an engine, while programs compile."""
    rates = Rates(block_bytes=1 << 20)
    for _ in range(num_bad):
        rates.note_copy(32, 1.0)
        rates.note_step(1000, 0.022)
    assert rates.is_worth_loading(20, 16 * 20) == (num_bad == 1), "what is slow so often is so"
    for _ in range(3):
        rates.note_copy(32, 0.0012)
    for _ in range(num_bad):
        rates.note_step(1000, 1.0)
    assert [rates.is_worth_loading(count, 16 * count) for count in (4, 20)] == [False, True]


def test_stores_tell_that_copies_are_fast_again() -> None:
    driven = Driven()
    driven.worth.note_step(1000, 0.5)
    for _ in range(100):
        driven.worth.note_copy(2, 1.0)
    assert not driven.worth.is_worth_loading(1, 16)
    for number in range(10):
        driven.step()
        driven.end(*driven.store(b"%d" % number))
    assert driven.worth.is_worth_loading(1, 16)


def test_contents_that_were_used_outlive_new_ones_up_to_a_share() -> None:
    contents = Contents(10)
    for number in range(10):
        content = contents.add(bytes([number]))
        assert content is not None
        content.is_ready = True
        contents.release(content)
    for number in range(9):
        content = contents.get(bytes([number]))
        assert content is not None
        contents.protect([content])
    evicted = []
    for number in range(20, 25):
        before = {bytes([n]) for n in range(30) if contents.get(bytes([n]))}
        content = contents.add(bytes([number]))
        assert content is not None
        contents.release(content)
        evicted += [name[0] for name in before if contents.get(name) is None]
        contents.check_integrity({})
    assert evicted == [9, 0, 20, 21, 22], "0 was used, but longest ago of more than are protected"


def test_without_a_protected_share_the_content_used_longest_ago_makes_room() -> None:
    contents = Contents(3, protected_share=0.0)
    for name in (b"a", b"b", b"c", b"d"):
        added = contents.add(name)
        assert added is not None
        added.is_ready = True
        contents.release(added)
        contents.check_integrity({})
        if (first := contents.get(b"a")) is not None and name == b"c":
            contents.use([first])
            contents.release(first)
    assert [name for name in (b"a", b"b", b"c", b"d") if contents.get(name) is None] == [b"b"]


def test_without_a_protected_share_contents_that_were_used_on_the_devices_make_room_in_order_too() -> None:
    contents = Contents(3, protected_share=0.0)
    evicted = []
    for index, name in enumerate((b"a", b"b", b"c", b"d", b"e", b"f")):
        there = contents.ready_names()
        added = contents.add(name, was_used=index % 2 == 0)
        assert added is not None
        contents.make_ready(added)
        contents.release(added)
        contents.check_integrity({})
        evicted += sorted(there - contents.ready_names())
    assert evicted == [b"a", b"b", b"c"]


def test_contents_that_were_used_on_the_devices_outlive_others() -> None:
    driven = Driven(num_slots=3)
    driven.step()
    driven.end(*driven.tier.store([1, 2], [b"a", b"b"], {b"a"}))
    driven.step()
    driven.step()
    driven.end(*driven.store(b"c"))
    driven.step()
    driven.end(*driven.store(b"d"))
    driven.step()
    driven.step()
    assert driven.tier.match([b"a", b"b", b"c", b"d"]) == [b"a", b"c", b"d"]


def test_what_a_store_has_is_read_first_and_what_it_cannot_read_is_missing_alone() -> None:
    store = Store(b"b", b"c", b"d")
    driven = Driven(stores=[store]).stored(b"a")
    names = [b"b", b"a", b"c", b"d"]
    assert list(driven.tier.match([*names, b"unknown"])) == names
    assert driven.tier.sources(names) == [store.name, "host", store.name, store.name]
    load = driven.tier.load([5, 6, 7, 8], names)
    assert [len(slots) for _, _, slots in store.under_way.values()] == [2, 1], "at most so many as a copy"
    assert driven.run() == {}
    assert set(store.end(False, True)) == {b"b", b"c"} and driven.run() == {}
    store.end()
    assert driven.run() == {load: [False, True, True, True]}
    assert driven.stats.num_loaded_blocks == 3 and not store.under_way
    assert driven.tier.contents.get(b"b") is None and driven.tier.contents.is_ready(b"d"), "what was read stays"


def test_what_two_loads_want_is_read_once() -> None:
    store = Store(b"a")
    driven = Driven(stores=[store])
    first, second = (driven.tier.load([block], [b"a"]) for block in (5, 6))
    driven.step()
    assert len(store.under_way) == 1
    driven.tier.cancel(first)
    driven.tier.check_integrity()
    assert driven.tier.match([b"a"]), "it is on its way"
    store.end()
    assert driven.run() == {second: [True]} and not store.under_way


def test_a_load_without_a_slot_ends() -> None:
    driven = Driven(num_slots=1, stores=[Store(b"a", b"b")])
    load = driven.tier.load([5, 6], [b"a", b"b"])
    driven.tier._stores._stores[0].end()
    assert driven.run() == {load: [True, False]}
    driven.tier.load([7], [b"a"])
    refused = driven.tier.load([8], [b"b"])
    assert driven.step().loaded == [(refused, [False])]


def test_what_makes_room_next_is_written_before_it_goes() -> None:
    store = Store()
    driven = Driven(num_slots=8, stores=[store]).stored(b"0", b"1", b"2", b"3", b"4", b"5")
    assert not store.under_way, "a quarter of the slots is free"
    driven.stored(b"6")
    assert [names for _, names, _ in store.under_way.values()] == [[b"0"]]
    driven.stored(b"7")
    assert [names for _, names, _ in store.under_way.values()] == [[b"0"], [b"1"]]
    driven.step()
    driven.end(*driven.store(b"8"))
    assert driven.tier.contents.get(b"2") is None, "those that are being written have to stay"
    store.end()
    store.end()
    driven.step()
    driven.end(*driven.store(b"9"))
    assert driven.tier.contents.get(b"0") is None and sorted(driven.tier.match([b"0", b"1", b"2"])) == [b"0", b"1"]


def test_what_a_store_has_is_not_written_to_it_again_nor_lost() -> None:
    store = Store(b"x")
    driven = Driven(num_slots=4, protected_share=0.0, stores=[store])
    driven.tier.load([5], [b"x"])
    store.end()
    driven.run()
    driven.stored(b"0", b"1", b"2")
    assert not store.under_way, "x makes room next, and is there"
    driven.stored(b"3")
    assert [names for _, names, _ in store.under_way.values()] == [[b"0"]]
    assert b"x" not in driven.tier.contents and driven.stats.num_lost_blocks == 0


def test_a_store_that_is_full_is_asked_again_and_loses_nothing_else() -> None:
    store = Store()
    store.is_full = True
    driven = Driven(num_slots=4, stores=[store]).stored(b"0", b"1", b"2", b"3").stored(b"4")
    assert not store.under_way
    store.is_full = False
    driven.stored(b"5")
    assert [names for _, names, _ in store.under_way.values()] == [[b"2"]] and driven.stats.num_lost_blocks == 2
    store.end(False)
    driven.stored(b"6").stored(b"7")
    assert driven.stats.num_lost_blocks >= 3, "a write that failed keeps nothing"


def test_at_once_a_store_is_offered_what_is_ready_until_it_takes_it() -> None:
    store = Store()
    driven = Driven(num_slots=8, stores=[store], writes_at_once=True)
    ops = driven.store(b"0", b"1")
    assert driven.tier.is_storing
    driven.end(*ops)
    driven.step()
    assert [names for _, names, _ in store.under_way.values()] == [[b"0", b"1"]] and driven.tier.is_storing
    store.is_full = True
    driven.stored(b"2")
    assert driven.tier.is_storing and len(store.under_way) == 1, "the store has room once a write is over"
    store.is_full = False
    store.end()
    driven.step()
    assert [names for _, names, _ in store.under_way.values()] == [[b"2"]] and driven.tier.is_storing
    store.end()
    driven.step()
    assert not driven.tier.is_storing
    store.is_full = True
    driven.stored(b"3")
    assert not driven.tier.is_storing, "no write will end that makes room"
    driven.tier.forget(stored=False)
    store.is_full = False
    driven.stored(b"4")
    assert [names for _, names, _ in store.under_way.values()] == [[b"4"]], (
        "after a failed step the rest is written when it makes room"
    )


@pytest.mark.parametrize("when", ["before", "while it is written", "while it is read"])
def test_stores_drop_what_is_wrong(when: str) -> None:
    store = Store(*([b"0"] if when == "while it is read" else []))
    driven = Driven(num_slots=1, stores=[store])
    if when == "while it is read":
        load = driven.tier.load([5], [b"0"])
    else:
        driven.stored(b"0")
        assert store.under_way
    if when == "before":
        store.end()
        driven.step()
    driven.tier.discard([b"0"])
    if when != "before":
        store.end()
    loaded = driven.run()
    assert not driven.tier.match([b"0"]) and not store.contents
    assert when != "while it is read" or loaded == {load: [False]}


def test_stores_drop_what_was_damaged_in_host_memory() -> None:
    store = Store(b"a")
    driven = Driven(stores=[store])
    load = driven.tier.load([5], [b"a"])
    store.end()
    driven.end(*driven.step().ops, is_right=(False,))
    assert driven.step().loaded == [(load, [False])] and not store.contents


@pytest.mark.parametrize("stored", [True, False])
def test_transfers_of_stores_outlive_what_was_forgotten(stored: bool) -> None:
    store = Store(b"x")
    driven = Driven(num_slots=4, stores=[store]).stored(b"0", b"1", b"2", b"3")
    driven.tier.load([5], [b"x"])
    kinds = [kind for kind, _, _ in store.under_way.values()]
    assert sorted(kinds) == ["read", "write"]
    driven.tier.forget(stored=stored)
    driven.tier.check_integrity()
    assert store.was_reset == stored
    store.end()
    store.end()
    assert driven.run() == {}
    assert driven.tier.contents.is_ready(b"x") != stored


def test_what_takes_long_to_read_is_computed_and_the_rest_loaded() -> None:
    store = Store(b"b")
    driven = Driven(stores=[store]).stored(b"a")
    for _ in range(100):
        driven.worth.note_step(1000, 0.5)
    names = driven.tier.match([b"a", b"b"])
    assert names == [b"a", b"b"]
    store.seconds_each = 1.0
    assert driven.tier.choose(names, 32) == [b"a"] == driven.tier.choose([b"a"], 16) and not store.under_way
    store.seconds_each = 0.0
    assert driven.tier.choose(names, 32) == names


def test_what_is_read_ahead_takes_no_place_of_what_is_chosen_too() -> None:
    store = Store(b"x", b"y")
    store.is_full = True
    driven = Driven(num_slots=4, stores=[store]).stored(b"0", b"1", b"2", b"3")
    assert driven.tier.choose([b"0", b"x", b"y"], 1000)
    assert driven.tier.match([b"0", b"1", b"2", b"3", b"x", b"y"]) == [b"0", b"3", b"x", b"y"]


def test_what_is_chosen_is_read_ahead_as_far_as_there_is_room() -> None:
    names = [b"%d" % number for number in range(9)]
    store = Store(*names)
    driven = Driven(num_slots=8, stores=[store])
    assert driven.tier.choose(names, 1000) == names
    assert [read for _, read, _ in store.under_way.values()] == [names[:2], names[2:4]], "half of the slots"
    assert driven.tier.sources(names[:5]) == ["test"] * 5
    store.end()
    store.end()
    driven.step()
    load = driven.tier.load(range(5), names[:5])
    assert [read for _, read, _ in store.under_way.values()] == [names[4:5]]
    store.end()
    assert driven.run() == {load: [True] * 5}
    assert driven.tier.sources(names[:5]) == ["host"] * 5


def test_at_once_a_store_that_opens_gets_what_is_ready_once_it_is_open() -> None:
    store = Store()
    driven = Driven(num_slots=8, stores=[store], writes_at_once=True)
    store.opens = store.is_full = True
    driven.stored(b"0", b"1")
    assert not store.under_way and driven.tier.is_storing, "steps come until it is open"
    store.opens = store.is_full = False
    driven.step()
    assert [names for _, names, _ in store.under_way.values()] == [[b"0", b"1"]]
    store.end()
    driven.step()
    store.opens = True
    driven.stored(b"2")
    driven.tier.forget(stored=True)
    assert not driven.tier.is_storing, "contents of other weights are not written"

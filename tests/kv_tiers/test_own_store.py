"""Copies between slots and a user-defined store: its calls, and the cost of its failures."""

import random
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.kv_tiers import pace
from jaxllm.kv_tiers.kv_store import KVStore, StoreContext
from jaxllm.kv_tiers.own import load_class, own_store
from jaxllm.kv_tiers.own.own_store import MAX_FAILURES, OwnStore
from jaxllm.kv_tiers.slot_store import Transfer
from jaxllm.scheduler_stats import STORE_CALLS
from jaxllm.vllm_compat.kv_connectors import KVTransferConfig
from tests.helpers.fake_engine_core import fake_stats
from tests.helpers.waiting import wait_until

A, B = b"a" * 32, b"b" * 32
NO_CLASS = "model"


class DictStore(KVStore):
    """Contents in a dictionary that all share."""

    contents: dict[str, bytes] = {}
    num_threads = 2

    def __init__(self, context: StoreContext):
        super().__init__(context)
        self.fails: Exception | None = None
        self.held = threading.Event()
        self.held.set()
        self.is_closed = False

    def _step(self) -> None:
        self.held.wait()
        if self.fails is not None:
            raise self.fails

    def find(self, keys: Sequence[str]) -> Collection[str]:
        return self.contents.keys() & set(keys)

    def read(self, key: str, content: memoryview) -> bool:
        self._step()
        if key not in self.contents:
            return False
        content[:] = self.contents[key]
        return True

    def write(self, key: str, content: memoryview) -> None:
        self._step()
        assert len(content) == self.context.content_bytes
        self.contents[key] = bytes(content)

    def discard(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.contents.pop(key, None)

    def clear(self) -> None:
        self.contents.clear()

    def close(self) -> None:
        self.is_closed = True


class Memory:
    """Four slots."""

    block_bytes = 24

    def __init__(self) -> None:
        self.bytes = np.zeros((4, 32), np.uint8)
        self.sums = np.zeros((4, 2, 3), np.uint32)

    def view(self, slot: int) -> memoryview:
        return memoryview(self.bytes[slot, : self.block_bytes])

    def fill(self, slot: int, value: int) -> None:
        self.bytes[slot], self.sums[slot] = value, value * 1000

    def has(self, slot: int, value: int) -> bool:
        block = self.bytes[slot, : self.block_bytes]
        return bool((block == value).all() and (self.sums[slot] == value * 1000).all())


class Driven:
    """A store with its memory."""

    def __init__(self, kind: type[KVStore] = DictStore, role: Any = "kv_both", fingerprint: str = "model", **options: Any):
        config = KVTransferConfig(kv_connector="DictStore", kv_role=role, kv_connector_module_path=__name__)
        self.memory, self.is_over = Memory(), threading.Semaphore(0)
        self.store = OwnStore(kind, config, self.memory, lambda: {"model": fingerprint}, self.is_over.release, **options)
        self.own: Any = self.store._store

    def read(self, number: int, names: Sequence[bytes], slots: Sequence[int]) -> list[bool]:
        self.store.read(number, names, slots)
        return list(self.end(number).is_right)

    def write(self, number: int, names: Sequence[bytes], slots: Sequence[int]) -> list[bool]:
        assert self.store.write(number, names, slots)
        return list(self.end(number).is_right)

    def end(self, number: int) -> Transfer:
        assert self.is_over.acquire(timeout=60)
        (transfer,) = self.store.finished()
        assert transfer.number == number
        return transfer


@pytest.fixture(autouse=True)
def _nothing_stored() -> None:
    DictStore.contents.clear()


@pytest.fixture
def driven() -> Any:
    made = Driven()
    yield made
    made.own.held.set()
    made.store.close()


def test_a_content_comes_back_with_its_checksums_in_another_engine(driven: Driven) -> None:
    driven.memory.fill(1, 5)
    driven.memory.fill(2, 6)
    assert driven.write(1, [A, B + b"\1\0"], [1, 2]) == [True, True]
    other = Driven()
    assert other.store.find([B, B + b"\1\0", A]) == [B + b"\1\0", A] or set(other.store.find([A, B])) == {A}
    assert other.read(7, [B + b"\1\0", A, B], [0, 3, 1]) == [True, True, False]
    assert other.memory.has(0, 6) and other.memory.has(3, 5) and other.memory.has(1, 0)
    assert all(len(key) <= 128 and key.replace("-", "").isalnum() for key in DictStore.contents)
    other.store.close()


def test_contents_times_and_failures_are_counted(driven: Driven) -> None:
    driven.memory.fill(0, 7)
    assert driven.write(1, [A, B], [0, 1]) == [True, True]
    assert driven.read(2, [A, b"c" * 32], [2, 3]) == [True, False]
    driven.own.fails = OSError("it is lost")
    assert driven.read(3, [A], [2]) == [False] and driven.write(4, [b"d" * 32], [0]) == [False]
    stats = fake_stats()
    driven.store.add_stats(stats)
    assert (stats.own_store_written_bytes, stats.own_store_read_bytes) == (2 * 24, 24)
    assert stats.own_store_write_seconds > 0 and stats.own_store_read_seconds > 0
    assert dict(zip(STORE_CALLS, stats.own_store_failures, strict=True)) == {
        "find": 0,
        "read": 1,
        "write": 1,
        "discard": 0,
        "clear": 0,
    }


def test_contents_of_other_models_and_weights_are_not_found(driven: Driven) -> None:
    driven.write(1, [A], [1])
    other = Driven(fingerprint="another")
    assert not other.store.find([A]) and driven.store.find([A])
    other.store.close()
    driven.store.reset(external=False)
    assert not driven.store.find([A]), "the weights may be others"
    wait_until(lambda: bool(driven.store.find([A])))
    driven.store._describe = lambda: {"model": "new weights"}
    driven.store.reset(external=False)
    assert driven.store.is_opening() and not driven.store.write(2, [A], [1])
    wait_until(lambda: not driven.store.is_opening())
    assert not driven.store.find([A]) and DictStore.contents
    driven.store.reset(external=True)
    wait_until(lambda: not DictStore.contents)


def test_roles_say_who_reads_and_writes(driven: Driven) -> None:
    driven.write(1, [A], [1])
    consumer, producer = Driven(role="kv_consumer"), Driven(role="kv_producer")
    assert not consumer.store.writes and consumer.store.find([A])
    assert producer.store.writes and not producer.store.find([A])
    consumer.store.close()
    producer.store.close()


def test_what_is_wrong_is_dropped(driven: Driven) -> None:
    driven.write(1, [A], [1])
    driven.store.discard([A])
    wait_until(lambda: not DictStore.contents)


@pytest.mark.parametrize("damage", ["mixed up", "not written", "no answer"])
def test_a_content_that_is_another_is_not_taken(driven: Driven, damage: str) -> None:
    driven.memory.fill(1, 5)
    driven.write(1, [A], [1])
    driven.write(2, [B], [2])
    first, second = DictStore.contents
    if damage == "mixed up":
        DictStore.contents[first] = DictStore.contents[second]
    else:
        driven.read(3, [A], [0])
        driven.own.read = lambda key, content: True if damage == "not written" else None
    assert driven.read(4, [A], [3]) == [False]
    assert driven.memory.has(3, 0)


def test_failures_are_logged_once_and_end_in_a_pause(
    driven: Driven, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven.write(1, [A], [1])
    driven.own.fails = OSError("the store is away")
    for number in range(MAX_FAILURES - 1):
        assert driven.read(10 + number, [A], [2]) == [False]
    assert len(caplog.records) == 1 and "read of DictStore failed" in caplog.text and driven.store.find([A])
    assert driven.write(30, [B], [3]) == [False]
    assert "it is not used for 60 s" in caplog.records[-1].message and "the store is away" in caplog.records[-1].message
    assert not driven.store.find([A]) and not driven.store.write(31, [B], [3])
    assert driven.read(32, [A], [2]) == [False], "it was found before the pause"
    assert not driven.store.finished()
    driven.store._paused_until = 0.0
    driven.own.fails = None
    assert [(over.number, over.is_right) for over in driven.store.finished()] == [(31, ())], "it is worth another try"
    assert driven.read(33, [A], [2]) == [True] and driven.store.find([A])


@pytest.mark.parametrize("error", [SystemExit(1), TimeoutError("of a socket")], ids=str)
def test_one_failure_of_any_kind_is_no_pause(driven: Driven, error: Any) -> None:
    driven.write(1, [A], [1])
    for number in range(2, 5):  # more than there are threads
        driven.own.fails = error
        assert driven.read(number, [A], [2]) == [False]
    driven.own.fails = None
    assert driven.read(9, [A], [2]) == [True]


@pytest.mark.parametrize("answer", [None, 5, ["no key of these"], [3]], ids=str)
def test_a_wrong_answer_of_find_finds_nothing(driven: Driven, answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    driven.own.find = lambda keys: answer
    assert not driven.store.find([A]) and "find of DictStore failed" in caplog.text


def test_a_find_that_takes_long_is_said(
    driven: Driven, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_store, "SLOW_FIND_SECONDS", -1.0)
    driven.store.find([A])
    assert "DictStore.find holds steps up" in caplog.text


def test_a_transfer_that_takes_too_long_is_given_up_and_touches_no_slot_later() -> None:
    driven = Driven(patience_seconds=0.05)
    driven.memory.fill(1, 5)
    driven.write(1, [A], [1])
    driven.own.held.clear()
    driven.store.read(2, [A, A], [2, 3])
    found: list[Transfer] = []
    wait_until(lambda: bool(found.extend(driven.store.finished()) or found))
    assert [transfer.number for transfer in found] == [2] and found[0].is_right == [False, False]
    assert not driven.store.find([A]), "a store that hangs is left alone for a while"
    driven.own.held.set()
    driven.store.close()
    assert driven.own.is_closed and driven.memory.has(2, 0) and driven.memory.has(3, 0)


def test_weights_that_were_not_looked_at_because_calls_hang_are_looked_at_later(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven.write(1, [A], [1])
    driven.store.reset(external=False)
    with monkeypatch.context() as patched:
        patched.setattr(driven.store._writers, "submit", lambda task: task.end(CancelledError(), 0.0))
        assert not driven.store.find([A])
    wait_until(lambda: list(driven.store.find([A])) == [A])


def test_writes_that_pile_up_are_refused_and_hold_up_no_reads(driven: Driven) -> None:
    held = threading.Event()
    driven.own.write = lambda key, content: held.wait()
    accepted = 0
    while driven.store.write(accepted, [bytes([accepted]) * 32], [1]):
        accepted += 1
        assert accepted < 1000
    assert driven.read(1000, [A], [2]) == [False]
    held.set()
    over: list[Transfer] = []
    wait_until(lambda: over.extend(driven.store.finished()) or len([each for each in over if each.is_right]) == accepted)
    assert driven.store.write(1001, [A], [1])


def test_what_waits_at_the_end_is_given_up_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    driven = Driven()
    held = threading.Event()
    driven.own.write = lambda key, content: held.wait(0.1)
    for number in range(9):
        driven.store.write(number, [bytes([number]) * 32], [1])
    driven.own.close = lambda: 1 / 0
    driven.store.close()
    assert [record.message for record in caplog.records] == ["close of DictStore failed"]
    assert len(driven.store.finished()) == 9


def test_the_time_of_reads_is_learned_and_forgotten(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    driven.write(1, [A], [1])
    before = driven.store.seconds(4)
    assert before == 4 * driven.store.seconds(1) > 0
    for number in range(2, 30):
        driven.read(number, [A], [1])
    assert driven.store.seconds(4) != before
    monkeypatch.setattr(pace, "_KNOWN_SECONDS", -1.0)
    assert driven.store.seconds(4) == before, "slow reads would end all for ever"


class Wanting(KVStore):
    """Lacks methods."""

    def find(self, keys: Sequence[str]) -> Collection[str]:
        return ()


class Failing(DictStore):
    def __init__(self, context: StoreContext):
        raise KeyError("directory")


class ManyThreads(DictStore):
    num_threads = 0


@pytest.mark.parametrize(
    ("name", "module", "told"),
    [
        ("Wanting", __name__, "lacks discard, read, write; define what KVStore asks for"),
        ("Memory", __name__, "is no class derived from jaxllm.kv_tiers.kv_store.KVStore"),
        ("NO_CLASS", __name__, "is no class derived from"),
        ("NoSuch", __name__, "cannot be imported: AttributeError"),
        ("Store", "no_such_module", "cannot be imported: ModuleNotFoundError: .* put its directory into PYTHONPATH"),
        ("ManyThreads", __name__, "has 0 as num_threads, must be 1 to 256"),
    ],
)
def test_a_class_that_is_no_store_is_refused(name: str, module: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_class(KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_module_path=module))


def test_a_class_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_connector 'Failing' .* cannot be made: KeyError: 'directory'"):
        Driven(Failing)


class Erratic(DictStore):
    """Takes a random time, which is sometimes too long, and fails at random."""

    num_threads = 4
    contents: dict[str, bytes] = {}

    def _step(self) -> None:
        time.sleep(random.choice((0, 0, 0, 0.001, 0.02)))
        if random.random() < 0.1:
            raise OSError("at random")


def test_slots_hold_what_transfers_say_and_are_left_alone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_store, "PAUSE_SECONDS", 0.0)
    driven, rng = Driven(Erratic, patience_seconds=0.01), random.Random(1)
    names = [bytes([number]) * 32 for number in range(1, 9)]
    written: set[bytes] = set()
    under_way: dict[int, tuple[bool, list[bytes], list[int]]] = {}
    holds: dict[int, int | None] = dict.fromkeys(range(4))
    num_right = num_given_up = number = 0
    while number < 400 or under_way:
        busy = {slot for _, _, slots in under_way.values() for slot in slots}
        free = [slot for slot in range(4) if slot not in busy]
        if free and number < 400:
            number += 1
            slots = rng.sample(free, rng.randint(1, len(free)))
            chosen = rng.sample(names, len(slots))
            if rng.random() < 0.5:
                for slot, name in zip(slots, chosen, strict=True):
                    driven.memory.fill(slot, name[0])
                    holds[slot] = name[0]
                if driven.store.write(number, chosen, slots):
                    under_way[number] = (False, chosen, slots)
                    written.update(chosen)
            else:
                driven.store.read(number, chosen, slots)
                under_way[number] = (True, chosen, slots)
        for transfer in driven.store.finished():
            is_read, chosen, slots = under_way.pop(transfer.number)
            num_given_up += not any(transfer.is_right)
            for name, slot, right in zip(chosen, slots, transfer.is_right, strict=True):
                if is_read and right:
                    assert name in written and driven.memory.has(slot, name[0])
                    num_right += 1
                holds[slot] = int(driven.memory.bytes[slot, 0])
        for slot in set(range(4)) - {slot for _, _, slots in under_way.values() for slot in slots}:
            assert holds[slot] is None or driven.memory.bytes[slot, 0] == holds[slot], "a slot changed without a transfer"
        time.sleep(0.0005)
    assert num_right > 50 and num_given_up > 5
    driven.store.close()

"""The store of files: what it writes and reads, and what it makes of files that are not what was written."""

import errno
import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.engine.fault_points import injected
from jaxllm.kv_tiers import workers
from jaxllm.kv_tiers.contents import Contents
from jaxllm.kv_tiers.disk import block_file, janitor, store
from jaxllm.kv_tiers.disk.block_file import PAGE_BYTES
from jaxllm.kv_tiers.disk.folder import open_root
from jaxllm.kv_tiers.disk.store import DiskStore
from jaxllm.kv_tiers.pace import Pace
from jaxllm.kv_tiers.stores import Stores
from tests.helpers.waiting import wait_until
from tests.kv_tiers.disk_engine import BLOCK_BYTES, FILE_BYTES, MODEL, NAMES, NUM_SLOTS, Memory, files


def test_contents_come_back_whole_also_to_another_engine(make: Any, tmp_path: Path) -> None:
    first = make()
    assert first.find() == [] and first.write(1, 2) == [True, True] and first.find() == [1, 2] and first.num_wakes == 1
    assert first.read(1, 5) and first.memory.has(5, first.memory, 1)
    second = make(seed=1)
    assert second.find() == [1, 2]
    assert second.read(2, 0) and second.memory.has(0, first.memory, 2)
    assert [path.stat().st_size for path in files(tmp_path)] == [FILE_BYTES] * 2
    assert (second.stats.num_disk_reads, second.stats.disk_read_bytes, second.stats.num_bad_files) == (1, BLOCK_BYTES, 0)
    assert (first.stats.num_disk_writes, first.stats.used_disk_bytes) == (2, 2 * FILE_BYTES)
    assert first.stats.disk_write_seconds > 0 and second.stats.disk_read_seconds > 0


def test_what_is_there_is_not_written_again(make: Any) -> None:
    first, second = make(), make(seed=1)
    first.write(1)
    before = first.path(1).stat()
    assert second.find() == [] and second.write(1) == [True] and second.find() == [1]
    assert first.path(1).stat().st_mtime_ns == before.st_mtime_ns and second.stats.num_disk_writes == 0
    assert second.read(1, 1) and second.memory.has(1, first.memory, 1)


def test_engines_with_other_fingerprints_see_nothing_of_each_other(make: Any, tmp_path: Path) -> None:
    first, second = make(), make(model={"model": "b"})
    first.write(1)
    second.scan()
    assert second.find() == [] and not second.read(1, 0) and second.stats.num_bad_files == 0
    assert second.stats.used_disk_bytes == FILE_BYTES, "they have the room in common"
    second.path(1).parent.mkdir(parents=True)
    first.path(1).rename(second.path(1))
    second.scan()
    assert second.find() == [1] and not second.read(1, 0) and second.stats.num_bad_files == 1
    second.until(lambda: not second.path(1).exists())


def damage_header(offset: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[offset] ^= 1
        path.write_bytes(content)

    return damage


def replaced_by(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "torn": lambda path: os.truncate(path, 2 * PAGE_BYTES),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: os.truncate(path, FILE_BYTES + 1),
    "zeros": lambda path: path.write_bytes(bytes(FILE_BYTES)),
    "a torn end of zeros": lambda path: path.write_bytes(path.read_bytes()[: 2 * PAGE_BYTES] + bytes(PAGE_BYTES)),
    "a bit of the content": damage_header(PAGE_BYTES + 100),
    "a bit of the checksums": damage_header(block_file._FIELDS.size + 1),
    "the magic": damage_header(0),
    "the version": damage_header(8),
    "the fingerprint": damage_header(40),
    "the name": damage_header(75),
    "the checksum": damage_header(block_file._FIELDS.size - 1),
}
INSTEAD: dict[str, Callable[[Path], Any]] = {
    "symlink": replaced_by(lambda path: path.symlink_to("/etc/passwd")),
    "symlink to itself": replaced_by(lambda path: path.symlink_to(path)),
    "directory": replaced_by(lambda path: path.mkdir()),
    "fifo": replaced_by(lambda path: os.mkfifo(path)),
}


@pytest.mark.parametrize("kind", [*DAMAGE, *INSTEAD])
def test_a_bad_file_is_missing_counted_and_removed(make: Any, kind: str) -> None:
    engine = make()
    engine.write(1, 2)
    {**DAMAGE, **INSTEAD}[kind](engine.path(1))
    assert engine.find() == [1, 2] and not engine.read(1, 5)
    assert engine.stats.num_bad_files == 1 and engine.find() == [2]
    if kind != "directory":
        engine.until(lambda: not os.path.lexists(engine.path(1)))
        assert engine.write(1) == [True] and engine.read(1, 5) and engine.memory.has(5, engine.memory, 1)
    assert engine.read(2, 6) and engine.memory.has(6, engine.memory, 2)


@pytest.mark.parametrize("kind", INSTEAD)
def test_what_is_no_file_is_not_found(make: Any, kind: str) -> None:
    engine = make()
    engine.write(1, 2)
    INSTEAD[kind](engine.path(1))
    assert make(seed=1).find() == [2]


def test_a_renamed_file_is_bad(make: Any) -> None:
    engine = make()
    engine.write(1)
    engine.path(2).parent.mkdir()
    engine.path(1).rename(engine.path(2))
    engine.scan()
    assert engine.find() == [2] and not engine.read(2, 0) and engine.stats.num_bad_files == 1


def test_a_file_of_another_user_is_bad(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    engine.write(1)
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    if os.stat(engine.path(1)).st_uid == 0:  # root's files are trusted
        os.chown(engine.path(1), 1234, -1)
    assert not engine.read(1, 0) and engine.stats.num_bad_files == 1


def test_a_file_that_was_removed_is_missing_and_not_bad(make: Any) -> None:
    engine = make()
    engine.write(1)
    engine.path(1).unlink()
    assert not engine.read(1, 0) and engine.find() == [] and engine.stats.num_bad_files == 0


def test_a_file_that_is_removed_while_it_is_read_is_read(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    engine.write(1)
    read_all = block_file.read_all

    def removed(*arguments: Any) -> None:
        engine.path(1).unlink()
        read_all(*arguments)

    monkeypatch.setattr(block_file, "read_all", removed)
    assert engine.read(1, 0) and engine.memory.has(0, engine.memory, 1)


def failing(number: int, part: bool = False) -> Callable[..., None]:
    def fail(descriptor: int, buffer: memoryview, *_: int) -> None:
        if part:
            os.pwrite(descriptor, buffer[:PAGE_BYTES], 0)
        raise OSError(number, os.strerror(number))

    return fail


def test_a_file_that_cannot_be_read_is_bad(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    engine.write(1)
    monkeypatch.setattr(block_file, "read_all", failing(errno.EIO))
    assert not engine.read(1, 0) and engine.find() == [] and engine.stats.num_bad_files == 1


@pytest.mark.parametrize(("number", "stays"), [(errno.EIO, False), (errno.EMFILE, True), (errno.ESTALE, True)])
def test_a_file_stays_if_the_error_says_nothing_of_it(
    make: Any, monkeypatch: pytest.MonkeyPatch, number: int, stays: bool
) -> None:
    engine = make()
    engine.write(1)
    with monkeypatch.context() as patched:
        patched.setattr(block_file, "read_all", failing(number))
        assert not engine.read(1, 0) and engine.find() == []
    engine.scan()  # behind what removes the file
    assert engine.find() == ([1] if stays else []) and engine.path(1).exists() is stays


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_after_a_failed_write_there_is_a_pause_and_one_warning(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    engine = make()
    engine.write(7)
    monkeypatch.setattr(block_file, "write_all", failing(number, part=True))
    assert engine.write(1, 2, 3) == [False] * 3 and engine.find() == [7]
    assert [path.name for path in files(tmp_path)] == [NAMES[7].hex()], "no part of a file is left"
    assert not engine.store.write(99, [NAMES[4]], [4])
    assert len([record for record in caplog.records if "no blocks are written" in record.message]) == 1
    assert engine.read(7, 0), "what is there is read"
    monkeypatch.undo()
    engine.store._paused_until = 0.0
    assert engine.write(1) == [True]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("lacks", ["room", "time"])
def test_a_refused_write_is_offered_again_once_the_store_takes_it_and_not_before(
    make: Any, monkeypatch: pytest.MonkeyPatch, lacks: str, at_once: bool
) -> None:
    engine = make(max_bytes=6 * FILE_BYTES)
    if lacks == "room":
        engine.write(*range(6))
    contents = Contents(NUM_SLOTS)
    stores = Stores([engine.store], contents, itertools.count(100), NUM_SLOTS, writes_at_once=at_once)
    for number in range(NUM_SLOTS):
        assert (content := contents.add(b"%032d" % number)) is not None
        contents.make_ready(content)
        contents.release(content)
        stores.note_ready(content)

    offers: list[int] = []
    write, may_measure = engine.store.write, threading.Event()
    monkeypatch.setattr(engine.store, "write", lambda number, *what: (offers.append(number), write(number, *what))[1])
    measure = janitor.measure
    monkeypatch.setattr(janitor, "measure", lambda root: (may_measure.wait(60), measure(root))[1])
    engine.store._paused_until = time.monotonic() + 3600 if lacks == "time" else 0.0

    def step() -> None:
        stores.take_in()
        stores.write_ahead()

    for _ in range(50):
        step()
    assert len(offers) == 1 and not files(engine.store._root)[6:], "no step offers it in vain"
    assert stores.is_behind == (at_once and lacks == "room"), "steps come while room is made"
    may_measure.set()
    engine.store._paused_until = 0.0
    wait_until(lambda: step() or engine.store.find([b"%032d" % 0]))
    assert len(offers) < 10
    wait_until(lambda: step() or not stores.is_behind)
    assert engine.stats.used_disk_bytes <= 6 * FILE_BYTES


def test_a_disk_without_an_answer_holds_up_nothing(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    engine.write(0, 1, 2, 3)
    read_all, answer = block_file.read_all, []

    def silent(*arguments: Any) -> None:
        while not answer:
            time.sleep(0.01)
        read_all(*arguments)

    engine.store._readers._max_seconds = 0.1
    monkeypatch.setattr(block_file, "read_all", silent)
    before = engine.memory.bytes[5].copy()
    assert not engine.read(1, 5) and engine.stats.num_bad_files == 1 and engine.find() == [0, 2, 3]
    monkeypatch.setattr(block_file, "read_all", read_all)
    assert engine.read(2, 6), "another thread reads"
    answer.append(True)
    engine.until(lambda: engine.store._readers._num_lost == 0)
    assert np.all(engine.memory.bytes[5] == before), "the slot may have another use by now"


def test_with_many_threads_without_an_answer_nothing_is_found(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    engine.write(*range(NUM_SLOTS))
    answer: list[bool] = []

    def silent(*_: Any) -> None:
        while not answer:
            time.sleep(0.01)
        raise OSError(errno.EIO, "late")

    engine.store._readers._max_seconds = 0.05
    monkeypatch.setattr(workers, "MAX_LOST", 4)
    monkeypatch.setattr(block_file, "read_all", silent)
    engine.number += 1
    engine.store.read(engine.number, NAMES, range(NUM_SLOTS))
    assert engine.end(engine.number) == [False] * NUM_SLOTS
    assert engine.store._readers.is_stuck and engine.find() == []
    monkeypatch.undo()
    answer.append(True)
    engine.until(lambda: not engine.store._readers.is_stuck)
    engine.scan()
    assert engine.find() and engine.read(engine.find()[0], 0)


def test_a_thread_that_cannot_be_replaced_costs_no_more_than_its_task(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    engine = make()
    engine.write(1)
    held, read_all = threading.Event(), block_file.read_all
    monkeypatch.setattr(block_file, "read_all", lambda *arguments: held.wait(10) and read_all(*arguments))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        patched.setattr(engine.store._readers, "_max_seconds", 0.02)
        engine.store.read(100, [NAMES[1]] * 6, range(2, 8))
        engine.until(lambda: 100 in engine.over)
    assert engine.over[100].is_right == [False] * 6 and engine.store._readers.is_stuck
    held.set()
    engine.until(lambda: not engine.store._readers.is_stuck)
    engine.scan()
    assert engine.read(1, 2)


def test_closing_waits_for_no_answer(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    engine.write(1)
    is_read, answer = threading.Event(), threading.Event()
    monkeypatch.setattr(store, "READ_SECONDS", 0.1)
    monkeypatch.setattr(block_file, "read_all", lambda *_: (is_read.set(), answer.wait()))
    engine.store.read(50, [NAMES[1]], [0])
    assert is_read.wait(60)
    closing = threading.Thread(target=engine.store.close, daemon=True)
    closing.start()
    closing.join(60)
    is_closed = not closing.is_alive()
    answer.set()
    assert is_closed and engine.end(50) == [False]


def test_discarded_contents_are_removed(make: Any) -> None:
    engine = make()
    engine.write(1, 2)
    engine.store.discard([NAMES[1], NAMES[5]])
    assert engine.find() == [2]
    engine.until(lambda: not engine.path(1).exists())
    engine.scan()
    assert engine.find() == [2]


def test_discarded_contents_are_removed_also_if_their_file_is_not_known_yet(make: Any) -> None:
    engine, other = make(), make(seed=1)
    other.write(1)
    assert not engine.find()
    engine.store.discard([NAMES[1]])
    engine.scan()
    assert not engine.find() and not other.path(1).exists()


def test_other_engines_files_are_found_after_a_while(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SCAN_SECONDS", 0.05)
    first, second = make(), make(seed=1)
    first.write(1)
    second.until(lambda: second.find() == [1])
    first.store.discard([NAMES[1]])
    second.until(lambda: second.find() == [])


@pytest.mark.parametrize("fault", ["kv.disk_read:1:corrupt", "kv.disk_write:1:corrupt", "kv.disk_read:2:eio"])
def test_faults_can_be_injected(make: Any, fault: str) -> None:
    engine, is_read = make(), ":2:" in fault
    with injected(fault):
        before = engine.memory.bytes.copy()
        assert engine.write(1) == [True] and np.all(engine.memory.bytes == before)
        assert engine.read(1, 0) is is_read and engine.stats.num_bad_files == (not is_read)


def test_a_listener_is_told_what_comes_and_goes(make: Any) -> None:
    engine = make()
    engine.write(1)
    told: list[tuple[str, int, bool]] = []
    engine.store.listener = lambda medium, name, is_there: told.append((medium, NAMES.index(name), is_there))
    engine.write(2)
    engine.store.discard([NAMES[1]])
    engine.scan()
    make(seed=1).write(3)
    engine.scan()
    assert told == [("STORAGE", 1, True), ("STORAGE", 2, True), ("STORAGE", 1, False), ("STORAGE", 3, True)]
    engine.store.reset(external=True)
    engine.until(lambda: len(told) == 6)
    assert sorted(told[4:]) == [("STORAGE", 2, False), ("STORAGE", 3, False)]


def test_what_a_listener_is_to_be_told_is_bounded_by_the_files(make: Any) -> None:
    engine = make()
    told: list[bool] = []
    engine.store.listener = lambda medium, name, is_there: told.append(is_there)
    engine.write(1)
    assert told == [True]
    store = engine.store
    with store._lock:  # what other engines write while this one is idle
        for _ in range(100):
            store.known.note([NAMES[2]], True)
            store.known.note([NAMES[2]], False)
        assert not store.known._untold
        store.known.note([NAMES[1]], False)
        store.known.note([NAMES[1]], True)
    engine.write(1)
    assert told == [True], "it was there already, and is again"


# Resets


def test_a_reset_of_external_contents_begins_an_epoch_for_all_engines(make: Any, tmp_path: Path) -> None:
    first, second = make(), make(seed=1)
    first.write(1)
    second.scan()
    assert second.find() == [1]
    first.store.reset(external=True)
    assert first.find() == []
    first.until(lambda: first.store._folder is not None)
    assert first.find() == []
    second.scan()
    assert second.find() == [] and not [path for path in files(tmp_path) if path.stat().st_size], "files of before are removed"
    assert first.write(2) == [True] and make(seed=2).find() == [2]


def test_a_reset_of_the_engine_alone_reads_anew_what_contents_depend_on(make: Any) -> None:
    engine = make()
    engine.write(1)
    engine.store.reset(external=False)
    engine.model["model"] = "other weights, while it slept"
    assert engine.find() == []
    engine.until(lambda: engine.store._folder is not None)
    assert engine.find() == [] and engine.write(2) == [True]
    engine.store.reset(external=False)
    engine.model["model"] = "a"
    engine.find()
    engine.until(lambda: engine.store._folder is not None)
    assert engine.find() == [1]


def test_a_reset_before_the_directory_was_read_is_not_lost(make: Any, tmp_path: Path) -> None:
    make().write(1)
    late: list[bool] = []

    def describe() -> dict[str, Any]:
        while not late:
            time.sleep(0.005)
        return MODEL

    slow = DiskStore(open_root(tmp_path / "kv"), 1 << 30, Memory(), describe, lambda: None)
    slow.reset(external=True)
    late.append(True)
    while slow._folder is None:
        time.sleep(0.005)
    assert slow.find(NAMES) == [] and slow._folder.epoch == 1
    slow.close()


def test_weights_that_cannot_be_read_are_tried_again(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PAUSE_SECONDS", 0.05)
    failures = [OSError(errno.EIO, "no answer"), ValueError("an error of whatever kind")]

    def describe() -> dict[str, Any]:
        if failures:
            raise failures.pop()
        return MODEL

    engine = DiskStore(open_root(tmp_path / "kv2"), 1 << 30, Memory(), describe, lambda: None)
    assert engine.find(NAMES) == []
    deadline = time.monotonic() + 60
    while engine._folder is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine._folder is not None
    engine.close()


def test_a_store_is_opening_until_it_is_open_or_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, failures = threading.Event(), [OSError(errno.EIO, "no answer")]

    def describe() -> dict[str, Any]:
        assert go_on.wait(60)
        go_on.clear()
        if failures:
            raise failures.pop()
        return MODEL

    engine = DiskStore(open_root(tmp_path / "kv"), 1 << 30, Memory(), describe, lambda: None)
    assert engine.is_opening() and not engine.write(1, NAMES[:1], [0])
    go_on.set()
    wait_until(lambda: not engine.is_opening())
    assert engine._folder is None and not engine.write(1, NAMES[:1], [0]), "it is tried again after a pause"
    engine.reset(external=False)
    assert engine.is_opening()
    go_on.set()
    wait_until(lambda: not engine.is_opening())
    assert engine._folder is not None and engine.write(1, NAMES[:1], [0])
    monkeypatch.setattr(store, "WRITE_SECONDS", 0.01)
    engine.reset(external=False)
    wait_until(lambda: not engine.is_opening())
    assert engine._folder is None, "a directory that does not answer is not waited for"
    go_on.set()
    engine.close()


def test_the_pace_is_that_of_reads_and_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pace = Pace(2_000_000, 4, 2e9)
    assert pace.seconds(1) == pytest.approx(0.004) and pace.seconds(8) == pytest.approx(0.008)
    for _ in range(200):
        pace.note(1.0)
    assert pace.seconds(8) == pytest.approx(2.0)
    now[0] += 61
    assert pace.seconds(8) == pytest.approx(0.008)

"""Small blocks, of which several share a file: what is lost, removed and counted with it."""

import errno
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxllm.kv_tiers.disk import block_file, folder, janitor, store
from tests.kv_tiers.disk.test_store import failing
from tests.kv_tiers.disk_engine import FILE_BYTES, NAMES, files

CONTENT_BYTES = FILE_BYTES
"""Size of one content including its header: such a file has nothing else."""
A_FILE = 4


def test_contents_that_are_written_together_share_files(make: Any, tmp_path: Path) -> None:
    first = make(blocks_per_file=A_FILE)
    assert first.write(*range(7)) == [True] * 7
    sizes = sorted(path.stat().st_size for path in files(tmp_path))
    assert sizes == [3 * CONTENT_BYTES, 4 * CONTENT_BYTES]
    assert first.stats.num_disk_writes == 7 and first.stats.used_disk_bytes == 7 * CONTENT_BYTES
    second = make(seed=1, blocks_per_file=A_FILE)
    assert second.find() == list(range(7)) and second.stats.used_disk_bytes == 7 * CONTENT_BYTES
    for number in (6, 0, 3, 2):
        assert second.read(number, 7) and second.memory.has(7, first.memory, number)
    assert second.stats.num_disk_reads == 4 and not second.stats.num_bad_files


def test_blocks_share_files_only_if_they_are_small(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def size() -> int:
        made = store.DiskStore(engine.store._root, 1 << 30, engine.memory, lambda: dict(engine.model), lambda: None)
        made.close()
        return made.blocks_per_file

    engine = make()
    assert size() == folder.MAX_NAMES
    monkeypatch.setattr(store, "SMALL_BYTES", engine.memory.block_bytes)
    assert size() == 1


def test_file_systems_take_what_files_are_called(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With names of any group, a host of a long name, large numbers of processes and many files before."""
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="h" * 64))
    monkeypatch.setattr(os, "getpid", lambda: 4_194_304)
    monkeypatch.setattr(folder, "_numbers", iter([10**12] * 9))
    names = tuple(bytes([number]) * 40 for number in range(folder.MAX_NAMES))
    made = make().store._folder
    assert made.write(names, memoryview(mmap.mmap(-1, block_file.PAGE_BYTES))) and [path.name for path in files(tmp_path)] == [
        os.path.basename(made.path(names))
    ]
    assert list(made.files()) == [names]


def flip(offset: int) -> Callable[[Path], Any]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[offset] ^= 1
        path.write_bytes(content)

    return damage


def swap(path: Path) -> None:
    """The second and third content change places."""
    parts = [path.read_bytes()[start : start + CONTENT_BYTES] for start in range(0, A_FILE * CONTENT_BYTES, CONTENT_BYTES)]
    path.write_bytes(b"".join(parts[place] for place in (0, 2, 1, 3)))


DAMAGE: dict[str, tuple[Callable[[Path], Any], bool]] = {
    "a bit of its content": (flip(CONTENT_BYTES + block_file.PAGE_BYTES + 9), True),
    "a bit of its header": (flip(CONTENT_BYTES + 40), True),
    "swapped": (swap, True),
    "without the last content": (lambda path: os.truncate(path, 3 * CONTENT_BYTES), False),
    "longer": (lambda path: os.truncate(path, 5 * CONTENT_BYTES), False),
    "torn": (lambda path: os.truncate(path, CONTENT_BYTES + 7), False),
    "empty": (lambda path: os.truncate(path, 0), False),
}
"""Damages to a file of four contents, with whether the first one can still be read."""


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_file_with_a_bad_content_is_removed_and_counted(make: Any, kind: str) -> None:
    engine = make(blocks_per_file=A_FILE)
    engine.write(*range(8))
    damage, stays = DAMAGE[kind]
    path = engine.path(1)
    damage(path)
    if stays:
        assert engine.read(0, 4) and engine.memory.has(4, engine.memory, 0)
    assert not engine.read(1, 5) and engine.stats.num_bad_files == 1
    assert engine.find() == [4, 5, 6, 7], "the whole file goes"
    engine.until(lambda: not path.exists())
    assert not engine.read(2, 5) and engine.stats.num_bad_files == 1, "it is missing, not bad"
    assert engine.write(1, 2) == [True] * 2 and engine.read(1, 5) and engine.memory.has(5, engine.memory, 1)
    assert engine.find() == [1, 2, 4, 5, 6, 7]


def test_room_is_made_by_whole_files(make: Any, tmp_path: Path) -> None:
    engine = make(max_bytes=9 * CONTENT_BYTES, blocks_per_file=A_FILE)
    engine.write(*range(4))
    engine.write(4, 5, 6)
    assert janitor.measure(tmp_path / "kv").num_bytes == 7 * CONTENT_BYTES
    now = time.time()
    os.utime(engine.path(0), (now - 500, now - 500))
    os.utime(engine.path(4), (now - 7200, now - 7200))
    assert engine.read(6, 7), "it counts as a use of all contents of the file"
    engine.memory.bytes[7] = engine.memory.bytes[0]
    assert engine.write(7) == [True]
    engine.number += 1
    assert not engine.store.write(engine.number, NAMES[:2], [0, 1])  # to be asked again when there is room
    engine.until(lambda: engine.stats.used_disk_bytes < 8 * CONTENT_BYTES)
    assert engine.find() == [4, 5, 6, 7] and engine.stats.used_disk_bytes == 4 * CONTENT_BYTES


def test_a_failed_write_leaves_no_part_of_a_file(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(blocks_per_file=A_FILE)
    with monkeypatch.context() as patched:
        patched.setattr(block_file, "write_all", failing(errno.ENOSPC, part=True))
        assert engine.write(*range(6)) == [False] * 6
    assert not files(tmp_path) and not engine.find() and not engine.store._num_queued_writes
    engine.store._paused_until = 0.0
    assert engine.write(*range(6)) == [True] * 6 and engine.find() == list(range(6))


@pytest.mark.parametrize("is_known", [True, False])
def test_a_discarded_content_takes_its_file_along(make: Any, is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the write was given up, and ended later."""
    engine = make(blocks_per_file=A_FILE)
    told: list[tuple[int, bool]] = []
    engine.store.listener = lambda medium, name, is_there: told.append((NAMES.index(name), is_there))
    if is_known:
        engine.write(*range(4))
        path = engine.path(0)
    else:
        replace, answer = os.replace, list[bool]()

        def late(*paths: str) -> None:
            while not answer:
                time.sleep(0.01)
            replace(*paths)

        path = Path(engine.store._folder.path(tuple(NAMES[:4])))
        engine.store._writers._max_seconds = 0.05
        with monkeypatch.context() as patched:
            patched.setattr(folder.os, "replace", late)
            assert engine.write(*range(4)) == [False] * 4
            answer.append(True)
            engine.until(path.exists)
        engine.store._paused_until = 0.0
    engine.write(4, 5)
    engine.store.discard([NAMES[2]])
    engine.until(lambda: not path.exists())
    engine.scan()
    assert (
        engine.find()
        == [4, 5]
        == [number for number in range(len(NAMES)) if told.count((number, True)) > told.count((number, False))]
    )


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_content_in_two_files_is_read_from_either(make: Any, is_lost: bool) -> None:
    """is_lost: whether the file that is lost is the one from which the engine would read it."""
    first, second = make(blocks_per_file=A_FILE), make(blocks_per_file=A_FILE)
    first.write(0, 1, 2, 3)
    second.write(2, 3, 4, 5)
    third = make(seed=1)
    assert third.find() == list(range(6)) and third.stats.used_disk_bytes == 8 * CONTENT_BYTES
    (removed,) = [number for number in (0, 5) if (third.path(number) == third.path(2)) is is_lost]
    third.path(removed).unlink()
    assert not third.read(removed, 0)
    assert third.find() == ([2, 3, 4, 5] if removed == 0 else [0, 1, 2, 3])
    assert all(third.read(number, 0) and third.memory.has(0, first.memory, number) for number in third.find())


def test_a_read_from_before_a_reset_loses_no_file_of_after_it(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, opened, asked, answer = make(blocks_per_file=A_FILE), folder.open_file, list[str](), list[bool]()
    engine.write(*range(4))

    def late(path: str, flags: int) -> int:
        asked.append(path)
        while flags == os.O_RDONLY and not answer:
            time.sleep(0.01)
        return opened(path, flags)

    monkeypatch.setattr(folder, "open_file", late)
    engine.number += 1
    engine.store.read(reading := engine.number, NAMES[:1], [7])
    engine.until(lambda: asked)
    engine.store.reset(external=True)
    engine.until(lambda: engine.store._folder is not None)
    engine.write(*range(4))
    answer.append(True)
    assert engine.end(reading) == [False] and engine.find() == [0, 1, 2, 3]


@pytest.mark.parametrize("is_read", [True, False])
def test_a_content_in_several_files_is_discarded_from_all(make: Any, is_read: bool, tmp_path: Path) -> None:
    """is_read: whether an engine found the files, or wrote one of them while it did not know the other."""
    first, second, third = (make(blocks_per_file=size) for size in (A_FILE, A_FILE, 1))
    first.write(0, 1, 2, 3)
    third.write(2)
    second.write(2, 4)
    if is_read:
        second = make(seed=1)
    else:
        second.scan()
    assert second.find() == [0, 1, 2, 3, 4] and len(files(tmp_path)) == 3
    second.store.discard([NAMES[2]])
    assert not second.find()
    second.until(lambda: not files(tmp_path))
    second.scan()
    assert not second.find()


def test_a_file_that_is_written_next_to_another_is_known_with_it(make: Any, tmp_path: Path) -> None:
    engine = make(blocks_per_file=A_FILE)
    engine.write(0, 1)
    engine.write(1, 2)
    (paths := files(tmp_path)).remove(engine.path(2))
    engine.path(2).unlink()
    assert not engine.read(2, 5) and engine.find() == [0, 1] and engine.path(1) == paths[0]
    assert engine.read(1, 5) and engine.memory.has(5, engine.memory, 1)


@pytest.mark.parametrize(
    "name",
    [
        "a.b",
        "notes.of.somebody",
        "A" * 43 + "." + "A" * 41,
        "A" * 43 + "." + "A" * 42 + "B",
        "A" * 43 + ".",
        "." * 40,
        "é" * 43 + "." + "A" * 43,
    ],
)
def test_other_files_are_none_of_blocks(make: Any, tmp_path: Path, name: str) -> None:
    engine = make(blocks_per_file=A_FILE)
    engine.write(0, 1)
    (engine.path(0).parent / name).write_bytes(b"x")
    engine.scan()
    assert engine.find() == [0, 1] and set(engine.store.known.files) == set(NAMES[:2])
    assert janitor.measure(tmp_path / "kv").num_bytes == 2 * CONTENT_BYTES

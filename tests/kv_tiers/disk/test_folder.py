"""The directory of files: its room, its janitor, several processes, and who may use it."""

import errno
import importlib.util
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxllm.errors import ConfigError
from jaxllm.kv_tiers.disk import folder, janitor
from jaxllm.kv_tiers.disk.folder import open_root
from tests.kv_tiers.disk_engine import FILE_BYTES, NAMES, files

# Room


def test_room_is_made_for_new_files_by_the_oldest(make: Any) -> None:
    engine = make(max_bytes=5 * FILE_BYTES)
    for number in range(4):
        engine.write(number)
        os.utime(engine.path(number), (1000 + number, 1000 + number))
    os.utime(engine.path(0), (2000, 2000))  # it was read
    assert not engine.store.write(90, NAMES[4:6], [4, 5])
    engine.until(lambda: engine.store.write(91, NAMES[4:6], [4, 5]))
    assert engine.end(91) == [True, True]
    engine.scan()
    assert engine.find() == [0, 3, 4, 5] and engine.stats.used_disk_bytes == 4 * FILE_BYTES


def test_reads_count_as_uses_once_an_hour(make: Any) -> None:
    engine = make()
    engine.write(1, 2)
    old, recent = time.time() - 7200, time.time() - 600
    os.utime(engine.path(1), (old, old))
    os.utime(engine.path(2), (recent, recent))
    assert engine.read(1, 0) and engine.read(2, 0)
    assert engine.path(1).stat().st_mtime > recent and engine.path(2).stat().st_mtime == pytest.approx(recent)


def test_a_clock_that_was_moved_makes_no_file_stay_for_ever(make: Any, tmp_path: Path) -> None:
    engine = make()
    engine.write(0, 1, 2)
    future = time.time() + 1e8
    os.utime(engine.path(0), (future, future))
    os.utime(engine.path(1), (0, 0))
    assert janitor.make_room(tmp_path / "kv", 3 * FILE_BYTES - 1)
    assert not engine.path(1).exists() and engine.path(0).stat().st_mtime < future - 1e7
    assert engine.path(2).exists() and engine.path(0).exists()


def test_of_two_janitors_one_waits_for_no_other(make: Any, tmp_path: Path) -> None:
    engine = make()
    engine.write(0)
    with folder.locked(tmp_path / "kv") as is_ours:
        assert is_ours and not janitor.make_room(tmp_path / "kv", 0)
        assert engine.path(0).exists()
    assert janitor.make_room(tmp_path / "kv", 0) and not engine.path(0).exists()


@pytest.mark.parametrize("name", ["00.tmp", "notes", "00" * 32])
def test_what_is_no_whole_file_does_not_change_how_much_room_there_is(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    engine = make()
    engine.write(1, 2)
    (engine.path(1).parent / name).write_bytes(b"x")
    monkeypatch.setattr(folder, "_listed", lambda path: sorted(os.scandir(path), key=lambda entry: entry.name))
    assert janitor.measure(tmp_path / "kv").num_bytes == (3 if len(name) == 64 else 2) * FILE_BYTES


def test_an_epoch_that_cannot_be_read_now_is_not_the_first_one(make: Any, tmp_path: Path) -> None:
    engine, other = make(), make(seed=1, model={"model": "b"})
    engine.write(1)
    other.write(2)
    engine.store.reset(external=True)
    engine.until(lambda: engine.store._folder is not None)
    epoch = folder.folder_of(tmp_path / "kv", engine.store._folder.format.fingerprint) / "epoch"
    epoch.unlink()
    epoch.mkdir()  # cannot be read as a file
    engine.scan()
    assert engine.store._folder.epoch == 1
    assert janitor.measure(tmp_path / "kv").num_bytes == FILE_BYTES


def test_old_temporary_files_are_removed_and_new_ones_stay(make: Any) -> None:
    engine = make()
    engine.write(0)
    old, new = (Path(folder.temporary_of(str(engine.path(0)))) for _ in range(2))
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (1, 1))
    engine.scan()
    assert not old.exists() and new.exists() and engine.find() == [0]


WRITER = """
import sys, time
from pathlib import Path
from jaxllm.kv_tiers.disk import block_file
from tests.kv_tiers.disk_engine import Engine, MODEL
slow = block_file.write_all
def torn(descriptor, buffer):
    slow(descriptor, buffer[: len(buffer) // 3 // 4096 * 4096])
    print("torn", flush=True)
    time.sleep(100)
if sys.argv[2] == "torn":
    block_file.write_all = torn
engine = Engine(Path(sys.argv[1]), 0, 1 << 30, MODEL, blocks_per_file=int(sys.argv[3]))
for number in range(0, 8, int(sys.argv[3])):
    engine.write(*range(number, number + int(sys.argv[3])))
print("done", flush=True)
engine.store.close()
"""


def other_process(root: Path, kind: str, blocks_per_file: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", WRITER, str(root), kind, str(blocks_per_file)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_writes_leaves_nothing_that_is_found(make: Any, tmp_path: Path) -> None:
    process = other_process(tmp_path / "kv", "torn", 4)
    assert process.stdout is not None and process.stdout.readline() == "torn\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (left,) = files(tmp_path)
    engine = make()
    assert left.name.endswith(".tmp") and engine.find() == []
    assert engine.write(0) == [True] and engine.read(0, 1)
    os.utime(left, (1, 1))
    engine.scan()
    assert not left.exists()


@pytest.mark.slow
def test_processes_that_write_the_same_contents_leave_whole_files(make: Any, tmp_path: Path) -> None:
    processes = [other_process(tmp_path / "kv", "whole", count) for count in (1, 4, 4)]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["done\n"] * 3
    engine = make()
    assert engine.find() == list(range(8)) and len(files(tmp_path)) == 8 + 2
    assert all(engine.read(number, number) for number in range(8)) and engine.stats.num_bad_files == 0


# The directory


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda root: root.write_text("x"), "cannot be used"),
        (lambda root: root.mkdir(0o777) or root.chmod(0o777), "can be written by others .*chmod g?o-w"),
        (lambda root: root.mkdir() or os.chown(root, 12345, -1), "belongs to user 12345"),
    ],
    ids=["a file", "open to all", "of another user"],
)
def test_a_directory_that_is_not_ones_own_is_refused(tmp_path: Path, prepare: Callable[[Path], Any], message: str) -> None:
    prepare(tmp_path / "kv")
    with pytest.raises(ConfigError, match=f"kv_offloading_disk is .*{message}"):
        open_root(tmp_path / "kv")


def test_a_directory_is_made_but_not_what_is_above_it(tmp_path: Path) -> None:
    assert open_root(tmp_path / "kv") == tmp_path / "kv" and (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="is no directory; make it, or mount"):
        open_root(tmp_path / "missing" / "kv")


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "touch", fail)
    with pytest.raises(ConfigError, match=f"cannot be used: {os.strerror(number)}"):
        open_root(tmp_path / "kv")


def test_processes_with_one_host_name_and_number_write_different_files(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("of_another_process", folder.__file__)
    assert spec is not None and spec.loader is not None
    other = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    monkeypatch.setattr(folder, "_numbers", itertools.count())
    assert folder.temporary_of("x") != other.temporary_of("x")


def test_a_full_disk_is_not_filled_with_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*paths: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        folder.prepare(tmp_path, bytes(32), {})
    assert not files(tmp_path)

"""Keeps a directory of blocks within its size: what was not used for longest goes first. One process at a time does it."""

import contextlib
import os
import re
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxllm.kv_tiers.disk.folder import TEMPORARY, entries_of, locked, names_in, read_epoch

ROOM_SHARE = 0.9
"""Share of the limit to which usage is reduced, so that files need not be deleted before each write."""
TEMPORARY_SECONDS = 600
"""A temporary file that was last written so long ago is of a process that is no more."""
_NUM_MEASURED = 16
"""Files of an epoch whose size is looked at: a crash may leave some shorter than the others."""
_EARLY_SECONDS = 60
"""Clocks of machines may differ so much."""


class Usage(NamedTuple):
    """Disk usage of a directory."""

    num_bytes: int
    has_waste: bool
    """Whether there are files of earlier epochs, or old temporary ones."""


def measure(root: Path) -> Usage:
    """Count the contents of all fingerprints: those of a folder have equal sizes. Raises OSError."""
    num_bytes, has_waste = 0, False
    for epoch_path, is_current in _epochs(root):
        size = num_files = num_contents = 0
        for entry in entries_of(epoch_path):
            if names := names_in(entry):
                if num_files < _NUM_MEASURED:
                    with contextlib.suppress(OSError):
                        size = max(size, entry.stat(follow_symlinks=False).st_size // len(names))
                num_files += 1
                num_contents += len(names)
            has_waste |= not is_current or (entry.name.endswith(TEMPORARY) and _is_old(entry))
        num_bytes += num_contents * size
    return Usage(num_bytes, has_waste)


def make_room(root: Path, max_bytes: int) -> bool:
    """Remove temporary files that are old and those of earlier epochs, and if the others take more than `max_bytes`, those that were not
    used for longest. Returns False if another process does it. Raises OSError."""
    with locked(root, wait=False) as is_ours:
        if not is_ours:
            return False
        now, total = time.time(), 0
        last_uses, sizes, paths = array("d"), array("q"), list[str]()
        for epoch_path, is_current in _epochs(root):
            for entry in entries_of(epoch_path):
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                last_use = status.st_mtime
                if entry.name.endswith(TEMPORARY):
                    if _is_old(entry):
                        _unlink(entry.path)
                elif not is_current:
                    _unlink(entry.path)
                elif names_in(entry):
                    if last_use > now + _EARLY_SECONDS:  # the clock was moved: it would never be the oldest
                        last_use = now
                        with contextlib.suppress(OSError):
                            os.utime(entry.path)
                    total += status.st_size
                    last_uses.append(last_use)
                    sizes.append(status.st_size)
                    paths.append(entry.path)
            if not is_current:
                _remove_folders(epoch_path)
        if total > max_bytes:
            for index in np.argsort(last_uses):  # unlike `sorted`, it lets other threads run Python
                if total <= ROOM_SHARE * max_bytes:
                    break
                _unlink(paths[index])
                total -= sizes[index]
        return True


def _epochs(root: Path) -> Iterator[tuple[str, bool]]:
    """The paths of all epochs of all fingerprints, and whether each is the current one."""
    for folder in root.iterdir():
        if re.fullmatch(r"[0-9a-f]{16}", folder.name) and folder.is_dir() and not folder.is_symlink():
            try:
                current = read_epoch(folder)
            except OSError:  # its files can be neither counted nor removed now
                continue
            for epoch in folder.iterdir():
                if epoch.name.isdigit() and epoch.is_dir() and not epoch.is_symlink():
                    yield str(epoch), int(epoch.name) >= current


def _is_old(temporary: "os.DirEntry[str]") -> bool:
    """In either direction, if the clock was moved."""
    try:
        return abs(time.time() - temporary.stat(follow_symlinks=False).st_mtime) > TEMPORARY_SECONDS
    except FileNotFoundError:
        return False


def _remove_folders(epoch_path: str) -> None:
    with contextlib.suppress(OSError):
        for folder in os.listdir(epoch_path):
            os.rmdir(os.path.join(epoch_path, folder))
        os.rmdir(epoch_path)


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)

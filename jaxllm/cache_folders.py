"""Folders of the cache directory: bounded by bytes, where what was not used for longest is removed first."""

import contextlib
import functools
import shutil
from pathlib import Path

from jaxllm.log import logger


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone. Raises OSError."""
    for missing in reversed((folder, *folder.parents)):
        missing.mkdir(mode=0o700, exist_ok=True)


def keep_recent(folder: Path, max_bytes: int, in_use: Path | None = None) -> None:
    """Remove files and folders that lie in `folder` until the rest takes at most `max_bytes`; what is in use stays, however large.

    They were used when one of their files was last written, or read as far as the file system notes it. Raises OSError.
    """
    entries = [(*_use_and_size(entry), entry) for entry in folder.iterdir()]
    total_bytes = sum(num_bytes for _, num_bytes, _ in entries)
    for _, num_bytes, entry in sorted(entries):
        if total_bytes <= max_bytes:
            return
        if entry != in_use:
            total_bytes -= num_bytes
            _remove(entry)


@functools.cache
def tell_not_kept(reason: str) -> None:
    """Say, once for each reason, that the cache directory cannot be used."""
    logger.warning("compiled programs are not kept, so each start compiles them anew: %s", reason)


def _use_and_size(entry: Path) -> tuple[float, int]:
    """When it was last used, and its bytes."""
    last_use, num_bytes = 0.0, 0
    for file in (entry, *entry.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # another process may remove it
            status = file.lstat()
            if not file.is_dir():  # looking into a folder is no use of it
                last_use = max(last_use, status.st_mtime, status.st_atime)
                num_bytes += status.st_size
    return last_use, num_bytes


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)

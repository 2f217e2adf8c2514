"""The files of blocks below a directory that several engines share: `DIR/<fingerprint>/<epoch>/<hh>/<names>`.

The fingerprint is cut to 16 digits, and hh are the first two digits of the first name. What a file is called says what is in it, so that
none need be opened to find a content: the digits of its only name, or several names in base64 with dots between. An epoch ends when
contents are to be dropped: all engines of the fingerprint go on to the next one, as soon as they see it.
"""

import base64
import binascii
import contextlib
import fcntl
import itertools
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxllm import trusted_files
from jaxllm.errors import ConfigError
from jaxllm.kv_tiers.disk import block_file
from jaxllm.kv_tiers.disk.block_file import FileFormat, check_file, open_file

TEMPORARY = ".tmp"
MAX_NAMES = 4
"""In a file: so many names, of up to 40 bytes each, fit into what file systems let it be called."""
Names = tuple[bytes, ...]
"""The contents of a file, in their order in it."""
REFRESH_SECONDS = 3600
"""A file that is read counts as used then, if that is so much later than the last time."""
_ENTRIES_AT_ONCE, _REST_SECONDS = 100, 0.0002
_EPOCH, _LOCK, META = "epoch", "lock", "meta.json"
_numbers = itertools.count()
_PROCESS = secrets.token_hex(4)
"""Containers may have the same host name and process ids."""


def open_root(path: Path) -> Path:
    """The directory of the option, made if only it is missing. Raises ConfigError unless it can be used, by this user and root alone."""
    named = f"kv_offloading_disk is {str(path)!r}"
    path = Path(os.path.abspath(path.expanduser()))
    if not path.parent.is_dir():
        raise ConfigError(f"{named}, but {path.parent} is no directory; make it, or mount what is missing")
    try:
        with trusted_files.open_directory(path, make=True) as opened:
            probe = Path(temporary_of(str(opened.path / "probe")))
            probe.touch(mode=0o600)
            probe.unlink()
            return opened.path
    except ConfigError as error:
        raise ConfigError(f"{named}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{named}, which cannot be used: {error.strerror}; give a directory that can be written") from error


def folder_of(root: Path, fingerprint: bytes) -> Path:
    """Where the files of a fingerprint lie."""
    return root / fingerprint.hex()[:16]


def prepare(root: Path, fingerprint: bytes, described: dict[str, Any]) -> None:
    """Make the folder of a fingerprint, with a description of its contents. Raises OSError."""
    folder = folder_of(root, fingerprint)
    folder.mkdir(mode=0o700, exist_ok=True)
    if not (folder / META).exists():
        text = json.dumps({"fingerprint": fingerprint.hex(), **described}, indent=1)
        _replace(folder / META, text)


def read_epoch(folder: Path) -> int:
    """The current epoch of a fingerprint's folder. Raises OSError if it cannot be read now: to take it for the first one would bring back
    what was dropped."""
    try:
        return int((folder / _EPOCH).read_text(encoding="ascii")[:20])
    except (FileNotFoundError, ValueError):
        return 0


def next_epoch(folder: Path) -> None:
    """Begin the next epoch. Raises OSError."""
    with locked(folder):
        _replace(folder / _EPOCH, str(read_epoch(folder) + 1))


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[bool]:
    """Keep other processes out of a block that does the same for a folder. Without `wait`, False if one is in it. Raises OSError."""
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


def _replace(path: Path, text: str) -> None:
    temporary = temporary_of(str(path))
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def temporary_of(path: str) -> str:
    """A name for a file that becomes `path` once it is complete: no other process, on any host, has it."""
    return f"{path}.{os.uname().nodename[:32]}.{os.getpid()}.{_PROCESS}.{next(_numbers)}{TEMPORARY}"


class BlockFolder:
    """The files of a fingerprint in one epoch. Any thread may call it."""

    def __init__(self, root: Path, format: FileFormat):
        self.format = format
        self.folder = folder_of(root, format.fingerprint)
        self.epoch = read_epoch(self.folder)
        self._path = str(self.folder / str(self.epoch))

    def path(self, names: Names) -> str:
        """Where the file with these contents lies."""
        return f"{self._path}/{names[0].hex()[:2]}/{_called(names)}"

    def read(self, name: bytes, names: Names, buffer: memoryview) -> tuple[memoryview, memoryview]:
        """Read a content of the file with these names into a buffer. Returns it and the checksums, in the buffer. Raises OSError or
        BadFileError."""
        size = self.format.content_bytes
        descriptor = open_file(self.path(names), os.O_RDONLY)
        try:
            status = check_file(descriptor, len(names) * size)
            block_file.read_all(descriptor, buffer[:size], names.index(name) * size)
            found = self.format.unpack(buffer[:size], name)
            if abs(time.time() - status.st_mtime) > REFRESH_SECONDS:
                with contextlib.suppress(OSError):
                    os.utime(descriptor)
            return found
        finally:
            os.close(descriptor)

    def write(self, names: Names, buffer: memoryview) -> bool:
        """Write a file, unless there is one. Others see all of it or nothing. Not synced to the disk: what a crash leaves of it fails
        its checks. Returns whether it was written. Raises OSError."""
        path = self.path(names)
        if os.path.lexists(path):
            return False
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        temporary = temporary_of(self.path(names[:1]))
        try:
            descriptor = open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                block_file.write_all(descriptor, buffer)
            finally:
                os.close(descriptor)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return True

    def unlink(self, names: Names) -> None:
        """Remove a file, whatever is in its place."""
        with contextlib.suppress(OSError):
            os.unlink(self.path(names))

    def files(self) -> Iterator[Names]:
        """The contents of each file. Raises OSError."""
        return filter(None, map(names_in, entries_of(self._path)))


def _called(names: Names) -> str:
    return (
        names[0].hex() if len(names) == 1 else ".".join(base64.urlsafe_b64encode(name).decode().rstrip("=") for name in names)
    )


_DIGITS = re.compile(r"(?:[0-9a-f]{2}){8,64}")
_SEVERAL = re.compile(r"[\w-]{11,86}(?:\.[\w-]{11,86})+", re.ASCII)


def names_in(entry: "os.DirEntry[str]") -> Names:
    """The contents that the file of an entry should have; none if it is no file of blocks."""
    try:
        if not entry.is_file(follow_symlinks=False):
            return ()
        if _DIGITS.fullmatch(entry.name):
            return (bytes.fromhex(entry.name),)
        if _SEVERAL.fullmatch(entry.name):
            names = tuple(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)) for part in entry.name.split("."))
            return names if _called(names) == entry.name else ()
    except (OSError, binascii.Error):
        pass
    return ()


def entries_of(epoch_path: str) -> "Iterator[os.DirEntry[str]]":
    """All entries of the folders of an epoch. There may be a million: other threads run Python in between. Raises OSError."""
    for folder in _listed(epoch_path):
        if folder.is_dir(follow_symlinks=False):
            for number, entry in enumerate(_listed(folder.path)):
                if number % _ENTRIES_AT_ONCE == 0:
                    time.sleep(_REST_SECONDS)
                yield entry


def _listed(path: str) -> "list[os.DirEntry[str]]":
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except FileNotFoundError:  # another process may remove it
        return []

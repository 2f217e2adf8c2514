"""Reads files that are trusted like code, such as compiled programs: only those that no other user could have written or replaced.

A path is opened part by part, each within the directory opened before it, and each descriptor is checked, so that nothing can be
exchanged between the check and the reading. Every directory from the root on must belong to this user or root, and no other user
may write to it, unless its sticky bit keeps what is in it (as that of /tmp does). The owner of the root directory is not checked,
because whoever owns it can replace Python itself. A private group, of which only this user is a member, may write. Symbolic links
on the way are followed if they belong to this user or root; a file itself must not be a link.
"""

import contextlib
import errno
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jaxllm.errors import ConfigError

_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # so that a pipe does not hold the caller
_MAX_LINKS = 40


class Opened(NamedTuple):
    """An open directory, and its path without links."""

    descriptor: int
    path: Path


@contextlib.contextmanager
def open_directory(path: Path, *, make: bool = False) -> Iterator[Opened]:
    """Open a directory for as long as the block lasts; `make` it, and those above, if it is missing.

    Raises ConfigError if another user could have written to it or exchanged it, OSError if it cannot be opened.
    """
    names: list[str] = []
    ahead = _parts(os.path.join(os.getcwd(), path))
    opened = [os.open("/", _DIRECTORY)]
    num_links = 0
    try:
        _check_mode(Path("/"), os.fstat(opened[0]), may_be_sticky=True)
        while ahead:
            name, here = ahead.pop(), opened[-1]
            if name == "..":
                if names:
                    names.pop()
                    os.close(opened.pop())
                continue
            where = Path("/", *names, name)
            status = _status(name, here, make)
            if stat.S_ISLNK(status.st_mode):
                check_owner(where, status)
                if (num_links := num_links + 1) > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                target = os.readlink(name, dir_fd=here)
                ahead += _parts(target)
                if target.startswith("/"):
                    while names:
                        names.pop()
                        os.close(opened.pop())
                continue
            opened.append(os.open(name, _DIRECTORY, dir_fd=here))
            names.append(name)
            status = os.fstat(opened[-1])
            check_owner(where, status)
            _check_mode(where, status, may_be_sticky=bool(ahead))
        yield Opened(opened[-1], Path("/", *names))
    finally:
        for descriptor in opened:
            os.close(descriptor)


def read(path: Path, *, max_bytes: int | None = None) -> bytes:
    """The bytes of a file. Raises ConfigError if another user could have written them or the file is larger than `max_bytes`, OSError
    if it cannot be read."""
    with open_directory(path.parent) as directory:
        try:
            descriptor = os.open(path.name, _FILE, dir_fd=directory.descriptor)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ConfigError(
                    f"{path} is a symbolic link, and what it has is trusted like code: copy the file it points to there"
                ) from None
            raise
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} is no regular file")
        check_owner(path, status)
        _check_mode(path, status)
        if max_bytes is not None and status.st_size > max_bytes:
            raise ConfigError(f"{path} has {status.st_size} bytes, at most {max_bytes} are read")
        return file.read(status.st_size)


def check_owner(path: Path, status: os.stat_result) -> None:
    """Raise ConfigError if what has this status belongs to another user."""
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{path} belongs to user {status.st_uid}, this process runs as {os.geteuid()}, and what it has is trusted like code: it must "
            f"be one's own or root's, and so must the directories above it: chown {os.geteuid()} {path}, or use another directory"
        )


def _parts(path: str) -> list[str]:
    """The parts of a path, the last one first."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _status(name: str, directory: int, make: bool) -> os.stat_result:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):  # another process makes it too
        os.mkdir(name, 0o700, dir_fd=directory)
    return os.stat(name, dir_fd=directory, follow_symlinks=False)


def _check_mode(path: Path, status: os.stat_result, *, may_be_sticky: bool = False) -> None:
    mode = stat.S_IMODE(status.st_mode)
    by_group = mode & stat.S_IWGRP and not _is_private(status.st_gid)
    if not by_group and not mode & stat.S_IWOTH or may_be_sticky and mode & stat.S_ISVTX:
        return
    remedy = f"chmod {'g' * bool(by_group)}{'o' * bool(mode & stat.S_IWOTH)}-w {path}"
    raise ConfigError(f"{path} can be written by others (mode {mode:o}), and what it has is trusted like code: {remedy}")


def _is_private(group: int) -> bool:
    """Whether only this user and root are in a group: one that has the user's name, or that this machine has no name for and this
    process is in, as that of a Kubernetes volume."""
    user = os.geteuid()
    try:
        entry = grp.getgrgid(group)
    except KeyError:
        return group in (os.getegid(), *os.getgroups())
    try:
        name = pwd.getpwuid(user).pw_name
    except KeyError:
        return False
    others = (other for other in pwd.getpwall() if other.pw_gid == group)
    return entry.gr_name == name and {*entry.gr_mem} <= {name} and all(other.pw_uid in (0, user) for other in others)

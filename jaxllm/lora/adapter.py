"""An adapter that was added to an engine, the files it was added with, and the requests that name it. Does not import JAX."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.errors import AdapterError
from jaxllm.request import Request
from jaxllm.scheduler.waiting_queue import PriorityQueue
from jaxllm.scheduler_output import NO_ADAPTER

if TYPE_CHECKING:
    from jaxllm.lora.checkpoint import AdapterFiles

Reader = Callable[[str], "AdapterFiles"]
"""Reads and checks the adapter in a directory, or of a hub id. Raises AdapterError."""
Order = tuple[int, float, str]
"""See `Request.sort_key`."""
_FIRST: Order = (-(2**63) - 1, 0.0, "")


@dataclass(frozen=True)
class AdapterVersion:
    """The files of an adapter as they were when it was read."""

    directory: Path
    rank: int
    files: dict[str, tuple[int, int]]
    """Size and time of change by name."""
    digest: str
    """See `AdapterFiles.digest`."""


@dataclass(eq=False)
class Adapter:
    """One registration: an adapter that is added again under its name is another one. A RequestAdapter."""

    number: int
    name: str
    path: str
    version: AdapterVersion | None = None
    """None until it was read for the first time. All its requests must get these weights."""
    slot: int = NO_ADAPTER
    last_used: int = 0
    """Number of its latest use among those of all adapters."""
    waiting: PriorityQueue = field(default_factory=PriorityQueue)
    """Its requests that are not admitted."""
    running: set[Request] = field(default_factory=set)
    """Its requests that are admitted."""
    first_waiting: Order | None = None
    """Order of its first waiting request before the latest step, if it was in a slot then."""
    is_pinned: bool = False
    passes_pin: bool = False
    """Whether the adapter that replaced it is pinned when its own last request has ended."""
    is_retired: bool = False
    """Whether it was removed or replaced: its last requests end with it."""

    @property
    def cache_key(self) -> str:
        """See RequestAdapter. Registrations of equal files have the same, in every engine."""
        assert self.version is not None, "a request names an adapter that was never read"
        return self.version.digest

    @property
    def has_requests(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    @property
    def is_wanted(self) -> bool:
        """Whether it should have a slot."""
        return self.is_pinned or len(self.waiting) > 0

    @property
    def order(self) -> Order:
        """Order of its first waiting request: lower is sooner."""
        return self.waiting.peek().sort_key() if len(self.waiting) else _FIRST

    def gives_way_to(self, other: "Adapter") -> bool:
        """Whether its slot may go to another adapter once none of its requests runs."""
        return not self.is_pinned and (not len(self.waiting) or other.order < self.order)


def read(
    adapter: Adapter, reader: Reader, pack: "Callable[[AdapterFiles], np.ndarray] | None"
) -> tuple[AdapterVersion, np.ndarray | None]:
    """Read an adapter, in a thread. pack: makes of its files what is returned with the version; None: they are only checked.

    Raises AdapterError, also if files are not what they were when the adapter was added.
    """
    if adapter.version is not None:
        _check_unchanged(adapter.name, adapter.version)
    files = reader(adapter.path)
    found = _files_in(files.directory)
    version = AdapterVersion(files.directory, files.rank, found, adapter.version.digest if adapter.version else files.digest())
    packed = None if pack is None else pack(files)
    if version.files != _files_in(files.directory) or version != (adapter.version or version):
        raise AdapterError(
            f"the files of adapter {adapter.name!r} in {files.directory} changed while they were read; try again"
        )
    return version, packed


def _check_unchanged(name: str, version: AdapterVersion) -> None:
    found = _files_in(version.directory)
    for file, expected in version.files.items():
        if found.get(file) != expected:
            what = "has changed" if file in found else "is gone"
            raise AdapterError(
                f"{file} of adapter {name!r} in {version.directory} {what} since the adapter was added, and its weights are not in memory "
                "any longer; restore the file, or add the adapter again"
            )


def _files_in(directory: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of an adapter's files by name; empty if there are none."""
    try:
        return {
            file.name: (stat.st_size, stat.st_mtime_ns) for file in sorted(directory.glob("adapter_*")) if (stat := file.stat())
        }
    except OSError:
        return {}

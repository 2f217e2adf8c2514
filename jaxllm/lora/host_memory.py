"""Adapters in host memory, ready for the device, and how they get there from their files. Does not import JAX."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxllm.errors import AdapterError
from jaxllm.lora.adapter import Adapter


class AdapterFiles(Protocol):
    """The checked files of an adapter."""

    @property
    def rank(self) -> int: ...
    @property
    def directory(self) -> Path: ...

    def tensor(self, name: str) -> np.ndarray:
        """The tensor of this name, PEFT's without prefix. Raises AdapterError."""


Reader = Callable[[str], AdapterFiles]
"""Reads and checks the adapter in a directory, or of a hub id. Raises AdapterError."""


@dataclass(frozen=True)
class Reading:
    """An adapter as it was read."""

    rank: int
    directory: Path
    files: dict[str, tuple[int, int]]
    """Size and time of change by name."""
    packed: np.ndarray | None
    """None: only checked."""


def read(adapter: Adapter, reader: Reader, pack: Callable[[AdapterFiles], np.ndarray] | None) -> Reading:
    """Read an adapter, in a thread. pack: None: only check it.

    Raises AdapterError, also if files are not what they were when the adapter was added: its requests must all get the same weights.
    """
    if adapter.directory is not None:
        _check_unchanged(adapter, adapter.directory)
    files = reader(adapter.path)
    found = _files_in(files.directory)
    packed = None if pack is None else pack(files)
    if found != _files_in(files.directory) or found != (adapter.files or found):
        raise AdapterError(
            f"the files of adapter {adapter.name!r} in {files.directory} changed while they were read; try again"
        )
    return Reading(files.rank, files.directory, found, packed)


def _check_unchanged(adapter: Adapter, directory: Path) -> None:
    found = _files_in(directory)
    for name, expected in adapter.files.items():
        if found.get(name) != expected:
            what = "has changed" if name in found else "is gone"
            raise AdapterError(
                f"{name} of adapter {adapter.name!r} in {directory} {what} since the adapter was added, and its weights are not in memory "
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


class HostMemory:
    """Holds a number of packed adapters, and drops the least recently used one that is not needed now."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.packed: OrderedDict[Adapter, np.ndarray] = OrderedDict()
        self.expected: set[Adapter] = set()
        """Adapters that are being read, for which places are kept."""

    @property
    def has_place(self) -> bool:
        """Whether another adapter fits in addition to all that are there or expected."""
        return len(self.packed) + len(self.expected) < self.capacity

    def touch(self, adapter: Adapter) -> None:
        """The adapter is used."""
        if adapter in self.packed:
            self.packed.move_to_end(adapter)

    def expect(self, adapter: Adapter, is_needed: Callable[[Adapter], bool]) -> bool:
        """Keep a place for an adapter, if need be that of another one that is not needed. Returns whether there is one."""
        if not self.has_place:
            unneeded = next((other for other in self.packed if not is_needed(other)), None)
            if unneeded is None:
                return False
            del self.packed[unneeded]
        self.expected.add(adapter)
        return True

    def arrive(self, adapter: Adapter, packed: np.ndarray | None) -> None:
        """Use the place that was kept for an adapter, or give it up (None)."""
        if packed is not None:
            assert adapter in self.expected
            self.packed[adapter] = packed
        self.expected.discard(adapter)

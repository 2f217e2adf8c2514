"""Slots of two engines without devices, and a prefill engine's server over them."""

import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from jaxllm.kv_tiers.peers.client import Connection, Mapping, Target
from jaxllm.kv_tiers.peers.identity import Identity
from jaxllm.kv_tiers.peers.leases import Lease, Leases
from jaxllm.kv_tiers.peers.server import Server

BLOCK_BYTES = 1000
SLOT_BYTES = 4096


class FakeMemory:
    """Slots of BLOCK_BYTES, in memory that other processes may map."""

    block_bytes, slot_bytes = BLOCK_BYTES, SLOT_BYTES

    def __init__(self, num_slots: int):
        self.num_bytes = num_slots * SLOT_BYTES
        self.descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, self.num_bytes)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self._bytes = np.frombuffer(mmap.mmap(self.descriptor, self.num_bytes), np.uint8)
        self.sums = np.zeros((num_slots, 2, 3), np.uint32)

    def offset(self, slot: int) -> int:
        return slot * SLOT_BYTES

    def view(self, slot: int, count: int = 1) -> memoryview:
        return memoryview(self._bytes[slot * SLOT_BYTES : (slot + count - 1) * SLOT_BYTES + BLOCK_BYTES])  # type: ignore[arg-type]

    def fill(self, slot: int, seed: int) -> None:
        """Write a content."""
        rng = np.random.default_rng(seed)
        self.view(slot)[:] = rng.bytes(BLOCK_BYTES)
        self.sums[slot] = rng.integers(0, 2**32, self.sums.shape[1:], np.uint32)

    def content(self, slot: int) -> tuple[bytes, bytes]:
        return bytes(self.view(slot)), self.sums[slot].tobytes()

    def close(self) -> None:
        os.close(self.descriptor)
        del self._bytes


def identity(engine_id: str = "decode", **options: Any) -> Identity:
    return Identity(**{"engine_id": engine_id, "facts": {"model": "one"}, "block_bytes": BLOCK_BYTES, **options})


def names_of(count: int) -> list[bytes]:
    return [bytes([index]) * 32 for index in range(count)]


class Prefill:
    """A prefill engine: memory, leases and server."""

    def __init__(self, num_slots: int = 8, *, is_shared: bool = False, clock: Any = None, **options: Any):
        self.memory = FakeMemory(num_slots)
        for slot in range(num_slots):
            self.memory.fill(slot, slot)
        self.identity = identity(f"prefill-{os.urandom(4).hex()}", **options)
        self.leases = Leases(num_slots, *(() if clock is None else (clock,)))
        served: Any = self.memory
        if not is_shared:
            served = type(
                "Served", (), {name: getattr(self.memory, name) for name in ("block_bytes", "sums", "view", "offset")}
            )
            served.descriptor = None
        self.server = Server(self.identity, self.leases, served)
        self.server.open("127.0.0.1", 0)
        self.target = Target(self.identity.engine_id, "127.0.0.1", self.server.port)

    def lease(self, count: int = 4, *, stored: Sequence[int] | None = None) -> Lease:
        """A lease of so many contents, of which these are stored, each in the slot of its number."""
        names = names_of(count)
        lease = self.leases.open(names)
        assert lease is not None
        self.leases.note(lease, [(names[index], index) for index in (range(count) if stored is None else stored)])
        return lease

    def close(self) -> None:
        self.server.close()
        self.memory.close()


@contextmanager
def prefill(**options: Any) -> Iterator[Prefill]:
    engine = Prefill(**options)
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def connected(engine: Prefill, memory: FakeMemory, seconds: float = 60, **options: Any) -> Iterator[Connection]:
    """A connection of a decode engine."""
    mapping = Mapping()
    connection = Connection.to(engine.target, identity(**options), memory, None, seconds, mapping)
    try:
        yield connection
    finally:
        connection.close()
        mapping.close()

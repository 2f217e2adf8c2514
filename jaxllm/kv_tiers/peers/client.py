"""A connection of a decode engine to a prefill engine."""

import contextlib
import fcntl
import mmap
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from jaxllm.errors import JaxLLMError
from jaxllm.framing import ClosedError, WireError
from jaxllm.kv_tiers.peers import addresses, messages
from jaxllm.kv_tiers.peers.channel import Channel
from jaxllm.kv_tiers.peers.identity import Identity
from jaxllm.kv_tiers.peers.server import socket_name
from jaxllm.kv_tiers.slot_store import Regions, SlotMemory
from jaxllm.kv_tiers.transfers import copy
from jaxllm.log import logger

T = TypeVar("T")
_TOUCHED_PAGES = 1 << 16
"""Pages that are touched at a time."""


class RefusedError(JaxLLMError):
    """The prefill engine refuses; `code` is a `Code`."""

    def __init__(self, code: str, text: str):
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Target:
    """Where a prefill engine is."""

    engine_id: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"prefill engine {self.engine_id} at {self.host}, port {self.port}"


class Mapping:
    """The memory of a prefill engine on this host, for all connections to it."""

    def __init__(self, regions: Regions | None = None) -> None:
        """regions: has devices read it where it is, if they can."""
        self._regions = regions
        self.region: int | None = None
        """The number of its region, once devices can read it."""
        self._lock = threading.Lock()
        self._memory: mmap.mmap | None = None
        self._touching: threading.Thread | None = None
        self._closing = threading.Event()

    def open(self, channel: Channel, seconds: float) -> mmap.mmap:
        """Map it, if no other connection has. Raises WireError."""
        with self._lock:
            if self._memory is None:
                self._memory = memory = _map(channel, seconds)
                self._touching = threading.Thread(target=self._touch, args=(memory,), name="kv-touch", daemon=True)
                with contextlib.suppress(RuntimeError):  # there are too many threads: copies are slower at first
                    self._touching.start()
            return self._memory

    def _touch(self, memory: mmap.mmap) -> None:
        """Have the system map every page now: copies from pages that are not mapped yet take twice as long."""
        pages = np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE]
        for start in range(0, len(pages), _TOUCHED_PAGES):
            if self._closing.is_set():
                return
            pages[start : start + _TOUCHED_PAGES].max()  # other threads run Python meanwhile
        del pages  # or it cannot be closed
        if self._regions is not None:
            began = time.monotonic()
            try:
                self.region = self._regions.add_region(memory, self._closing)
            except RuntimeError as error:
                logger.info("blocks of a prefill engine on this host are copied to this engine's memory first: %s", error)
                return
            logger.info(
                "blocks of a prefill engine on this host are read where they are from now on; to lock its memory took %.1f s",
                time.monotonic() - began,
            )

    def close(self) -> None:
        """Give it back. No connection is used any more."""
        self._closing.set()
        with self._lock:
            if self._touching is not None and self._touching.ident is not None:
                self._touching.join()
            if self._regions is not None and self.region is not None:
                self._regions.remove_region(self.region)
                self.region = None
            if self._memory is not None:
                self._memory.close()
                self._memory = None


class Connection:
    """A connection whose handshake is over. For one thread at a time. Methods raise WireError if the other end closes it or breaks the
    protocol, and RefusedError; after the first the connection is of no use."""

    def __init__(self, channel: Channel, memory: SlotMemory, seconds: float):
        self._channel, self._memory, self._seconds = channel, memory, seconds
        self._shared: mmap.mmap | None = None

    @classmethod
    def to(
        cls,
        target: Target,
        own: Identity,
        memory: SlotMemory,
        peers: Sequence[str] | None,
        seconds: float,
        mapping: Mapping | None = None,
    ) -> "Connection":
        """Connect. seconds: longest wait for each answer. mapping: for contents, if the engine is on this host. Raises also OSError and
        `addresses.NotAllowedError`."""
        found = addresses.allowed(target.host, target.port, peers)
        channel = _connect(target, found, seconds)
        try:
            _greet(channel, target, own, seconds)
            connection = cls(channel, memory, seconds)
            if channel.is_local and mapping is not None:
                connection._shared = mapping.open(channel, seconds)
            return connection
        except BaseException:
            channel.close()
            raise

    def attach(self, lease: str) -> messages.Attached:
        """The names of the contents that are kept under a lease, which this connection keeps alive from now on."""
        self._channel.send(messages.Attach(lease), self._seconds)
        answer = self._channel.receive(self._seconds)
        if isinstance(answer, messages.Refused):
            raise RefusedError(answer.code, answer.text)
        if not isinstance(answer, messages.Attached) or answer.lease != lease:
            raise WireError("the answer to Attach is another one")
        return answer

    def follow(self, known: dict[str, tuple[int, int, bool]]) -> dict[str, messages.Change | None]:
        """Wait until leases grow; see `messages.Follow`."""
        self._channel.send(messages.Follow(known), self._seconds)
        answer = self._channel.receive(self._seconds)
        if not isinstance(answer, messages.Grown):
            raise WireError(f"the answer to Follow is a {type(answer).__name__}")
        return answer.leases

    def renew(self, leases: Sequence[str]) -> None:
        """Leases are still needed."""
        self._channel.send(messages.Renew(list(leases)), self._seconds)

    def end(self, lease: str) -> None:
        """A lease is no longer needed."""
        self._channel.send(messages.Done(lease), self._seconds)

    def pull(self, lease: str, names: Sequence[bytes], slots: Sequence[int]) -> list[bool]:
        """Fetch contents into slots. Returns which came."""
        slot_of = dict(zip(names, slots, strict=True))
        came: set[bytes] = set()
        self._channel.send(messages.Pull(lease, list(names)), self._seconds)
        while slot_of:
            match self._channel.receive(self._seconds):
                case messages.Missing(missing):
                    for name in missing:
                        _take(slot_of, name)
                case messages.Block(name, length, sums):
                    slot = _take(slot_of, name)
                    if length != self._memory.block_bytes:
                        raise WireError(f"a block of {length} bytes was sent, it must have {self._memory.block_bytes}")
                    self._channel.receive_into(self._memory.view(slot), self._seconds)
                    self._set_sums(slot, sums)
                    came.add(name)
                case messages.Slots(found, offsets, all_sums):
                    _check_lengths(found, offsets, all_sums)
                    taken = [_take(slot_of, name) for name in found]
                    self._copy(taken, offsets)
                    for slot, sums in zip(taken, all_sums, strict=True):
                        self._set_sums(slot, sums)
                    came.update(found)
                case messages.Refused(code, text):
                    raise RefusedError(code, text)
                case other:
                    raise WireError(f"the answer to Pull is a {type(other).__name__}")
        return [name in came for name in names]

    def locate(self, lease: str, names: Sequence[bytes], region: int, regions: Regions) -> list[int | None]:
        """The slots of contents in the region of the memory that is shared; None: it has not come. Raises ClosedError for a connection
        over TCP, which was made when the prefill engine could not be reached on this host: another one must take its place."""
        if self._shared is None:
            raise ClosedError("the connection does not share memory")
        left, place_of = set(names), dict[bytes, tuple[int, np.ndarray]]()
        self._channel.send(messages.Pull(lease, list(names)), self._seconds)
        while left:
            match self._channel.receive(self._seconds):
                case messages.Missing(missing):
                    for name in missing:
                        _remove(left, name)
                case messages.Slots(found, offsets, all_sums):
                    _check_lengths(found, offsets, all_sums)
                    for name, offset, sums in zip(found, offsets, all_sums, strict=True):
                        _remove(left, name)
                        index, rest = divmod(offset, self._memory.slot_bytes)
                        if rest or self._shared is None or not 0 <= offset <= len(self._shared) - self._memory.slot_bytes:
                            raise WireError("a slot lies outside of the memory that is shared")
                        place_of[name] = index, self._checksums(sums)
                case messages.Refused(code, text):
                    raise RefusedError(code, text)
                case other:
                    raise WireError(f"the answer to Pull is a {type(other).__name__}")
        return [regions.slot(region, *place_of[name]) if name in place_of else None for name in names]

    def _copy(self, slots: Sequence[int], offsets: Sequence[int]) -> None:
        """Copy contents from the memory that is shared, neighbours in both at once: threads wait for each other after each copy."""
        memory, shared = self._memory, self._shared
        for first, count in _runs(slots, offsets, memory.slot_bytes):
            slot, offset = slots[first], offsets[first]
            size = (count - 1) * memory.slot_bytes + memory.block_bytes
            if shared is None or not 0 <= offset <= len(shared) - size:
                raise WireError("a slot lies outside of the memory that is shared")
            copy(memoryview(shared)[offset : offset + size], to=memory.view(slot, count))

    def _set_sums(self, slot: int, sums: bytes) -> None:
        self._memory.sums[slot] = self._checksums(sums)

    def _checksums(self, sums: bytes) -> np.ndarray:
        own = self._memory.sums[0]
        if len(sums) != own.nbytes:
            raise WireError(f"checksums of {len(sums)} bytes were sent, they must have {own.nbytes}")
        return np.frombuffer(sums, np.uint32).reshape(own.shape)

    @property
    def is_left(self) -> bool:
        """See Channel."""
        return self._channel.is_left

    def interrupt(self) -> None:
        """See Channel."""
        self._channel.interrupt()

    def close(self) -> None:
        """Close it. No other thread uses it."""
        self._channel.close()


def _runs(slots: Sequence[int], offsets: Sequence[int], slot_bytes: int) -> Iterator[tuple[int, int]]:
    """The first index and the length of runs of consecutive slots whose offsets are as far from each other."""
    start = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or (slots[index] - slots[index - 1], offsets[index] - offsets[index - 1]) != (1, slot_bytes):
            yield start, index - start
            start = index


def _check_lengths(*lists: Sequence[Any]) -> None:
    if len(set(map(len, lists))) > 1:
        raise WireError("Slots has lists of different lengths")


def _remove(names: set[bytes], name: bytes) -> None:
    if name not in names:
        raise WireError("a content was sent that was not asked for, or twice")
    names.remove(name)


def _take(slot_of: dict[bytes, int], name: bytes) -> int:
    if name not in slot_of:
        raise WireError("a content was sent that was not asked for, or twice")
    return slot_of.pop(name)


def _connect(target: Target, found: "Sequence[addresses.Address]", seconds: float) -> Channel:
    """Connect to a process of this host, or else to the first address that answers. Raises OSError."""
    with contextlib.suppress(OSError):  # it is on another host, or in another container
        return _connect_on_host(target, seconds)
    deadline, error = time.monotonic() + seconds, OSError("no address is known")
    for family, address in found:
        stream = socket.socket(family, socket.SOCK_STREAM)
        try:
            stream.settimeout(max(0.01, deadline - time.monotonic()))
            stream.connect(address)
            return Channel(stream, messages.FIRST_OF_PREFILL)
        except OSError as new:
            stream.close()
            error = new
    raise error


def _connect_on_host(target: Target, seconds: float) -> Channel:
    """Raises OSError if there is no such engine on this host, or one of another user."""
    local = socket.socket(socket.AF_UNIX)
    try:
        local.settimeout(seconds)
        local.connect(socket_name(target.engine_id))
        channel = Channel(local, messages.FIRST_OF_PREFILL)
        if channel.user_id not in (os.geteuid(), 0):
            raise PermissionError("it is of another user")
        return channel
    except OSError:
        local.close()
        raise


def _greet(channel: Channel, target: Target, own: Identity, seconds: float) -> None:
    """The handshake. Raises WireError or RefusedError."""
    nonce = messages.new_nonce()
    channel.send(messages.Hello(messages.PROTOCOL, target.engine_id, dict(own.facts), own.block_bytes, nonce), seconds)
    hello = _answer(channel, messages.Hello, seconds)
    channel.send(messages.Proof(messages.proof("decode", own.token, nonce, hello.nonce)), seconds)
    proof = _answer(channel, messages.Proof, seconds)
    if not messages.is_proven(proof.hmac, "prefill", own.token, hello.nonce, nonce):
        raise RefusedError(
            messages.Code.TOKEN, "the prefill engine has another token; set the same JAXLLM_KV_TOKEN for both, or for neither"
        )
    if hello.engine_id != target.engine_id:
        raise RefusedError(messages.Code.ENGINE, f"it is engine {hello.engine_id}")
    if (difference := own.difference(hello.facts, hello.block_bytes)) is not None:
        raise RefusedError(messages.Code.DIFFERS, difference)
    channel.accept(messages.OF_PREFILL)


def _answer(channel: Channel, kind: type[T], seconds: float) -> T:
    answer = channel.receive(seconds)
    if isinstance(answer, messages.Refused):
        raise RefusedError(answer.code, answer.text)
    if not isinstance(answer, kind):
        raise WireError(f"it sent a {type(answer).__name__} in place of a {kind.__name__}")
    return answer


def _map(channel: Channel, seconds: float) -> mmap.mmap:
    """The memory of an engine on this host, to be read. Raises WireError."""
    channel.send(messages.Map(), seconds)
    answer = channel.receive(seconds)
    if not isinstance(answer, messages.Mapped):
        raise WireError("the answer to Map is another one")
    descriptor = channel.receive_descriptor(seconds)
    try:
        # A file that could shrink would end this process when it reads what is no longer there.
        is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if not is_sealed or not 0 < answer.num_bytes <= os.fstat(descriptor).st_size:
            raise WireError("the memory that it shares may be shorter than it says")
        return mmap.mmap(descriptor, answer.num_bytes, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise WireError(f"the memory that it shares cannot be mapped ({error})") from error
    finally:
        os.close(descriptor)

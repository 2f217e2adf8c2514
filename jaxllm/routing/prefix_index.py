"""Which replica has which block in its prefix cache."""

from collections.abc import Iterable, Sequence

import numpy as np

from jaxllm.cache_events import KEY_BYTES, CacheEvents

_FEW = 8
"""Up to so many bits of a mask are found one by one; NumPy takes a few microseconds for any number."""


class PrefixIndex:
    """Holders by block: a bit for each replica, so that one walk along a prompt finds the cached prefixes of all.

    Holds at most `max_blocks` blocks, of about 150 bytes each. Where there are more, it drops every second block by its key, which all
    replicas and prompts share, so a walk only becomes coarser: it sees every second block, every fourth, and so on.
    """

    def __init__(self, num_replicas: int, max_blocks: int = 4_000_000):
        self._max_blocks = max_blocks
        self._holders: dict[int, int] = {}
        """Mask of bits by key of a block."""
        self._skipped = 0
        """Blocks with one of these bits in their key are not indexed."""
        # A replica that forgets all gets a new bit: the old one stays in the masks, is ignored, and is cleared in all of them at a time.
        self._bits = [1 << number for number in range(num_replicas)]
        self._owners = np.arange(num_replicas)
        """Replica of each bit."""
        self._live = (1 << num_replicas) - 1
        self._stale = 0
        self._has_stored = [False] * num_replicas

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def share(self) -> float:
        """The share of blocks that it knows."""
        return 1 / (1 + self._skipped)

    def apply(self, replica: int, events: CacheEvents) -> None:
        """Take in what a replica published."""
        if events.cleared:
            self.forget(replica)
        bit, holders = self._bits[replica], self._holders
        if events.stored:
            self._has_stored[replica] = True
            for key in self._keys(events.stored):
                before = holders.get(key)
                holders[key] = bit if before is None else before | bit
        for key in self._keys(events.removed):
            before = holders.get(key)
            if before == bit:
                del holders[key]
            elif before is not None:
                holders[key] = before & ~bit
        if len(holders) > self._max_blocks:
            self._thin_out()

    def forget(self, replica: int) -> None:
        """Forget all blocks of a replica. Takes constant time, but for one sweep over all blocks in as many calls as there are replicas."""
        if not self._has_stored[replica]:
            return
        self._has_stored[replica] = False
        self._stale |= self._bits[replica]
        if self._stale.bit_count() > len(self._bits):
            self._sweep()
        number = (~(self._live | self._stale) & -~(self._live | self._stale)).bit_length() - 1  # the lowest bit that is free
        self._live ^= self._bits[replica]
        self._bits[replica] = 1 << number
        self._live |= 1 << number
        if number >= len(self._owners):
            self._owners = np.append(self._owners, replica)
        self._owners[number] = replica

    def prefixes(self, keys: Iterable[int]) -> np.ndarray:
        """Number of leading blocks that each replica has, of a prompt with these keys. Asks for no more keys than it needs."""
        found = np.zeros(len(self._bits), np.int64)
        get, skipped, held, length = self._holders.get, self._skipped, self._live, 0
        for index, key in enumerate(keys, 1):
            if key & skipped:
                continue
            holders = get(key, 0) & held
            if holders != held:
                if length:
                    found[self._replicas(held)] = length
                held = holders
                if not held:
                    return found
            length = index
        if length:
            found[self._replicas(held)] = length
        return found

    def _keys(self, packed: bytes) -> list[int]:
        keys = np.frombuffer(packed, "<u8")
        if self._skipped:
            keys = keys[keys & np.uint64(self._skipped) == 0]
        return keys.tolist()  # type: ignore[no-any-return]

    def _replicas(self, mask: int) -> Sequence[int] | np.ndarray:
        """The replicas of live bits."""
        if mask.bit_count() > _FEW:
            in_bytes = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
            return self._owners[np.flatnonzero(np.unpackbits(in_bytes, bitorder="little"))]
        replicas = []
        while mask:
            lowest = mask & -mask
            replicas.append(int(self._owners[lowest.bit_length() - 1]))
            mask ^= lowest
        return replicas

    def _thin_out(self) -> None:
        self._sweep()
        while len(self._holders) > self._max_blocks:
            self._skipped = 2 * self._skipped + 1
            self._holders = {key: mask for key, mask in self._holders.items() if not key & self._skipped}

    def _sweep(self) -> None:
        """Clear the bits that replicas left behind."""
        if stale := self._stale:
            kept = ((key, mask & ~stale if mask & stale else mask) for key, mask in self._holders.items())
            self._holders = {key: mask for key, mask in kept if mask}
            self._stale = 0


def keys_of(hashes: Iterable[bytes]) -> Iterable[int]:
    """The keys of blocks, as events name them."""
    return (int.from_bytes(name[:KEY_BYTES], "little") for name in hashes)

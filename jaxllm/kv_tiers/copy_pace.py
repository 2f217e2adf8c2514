"""How many blocks a step copies to the devices, so that requests that decode meanwhile wait little longer for their tokens."""

from collections import deque
from statistics import median

SHARE = 0.1
"""Largest part of a decode step's time that copies may add to it."""
_NUM_RECENT = 32
_GROWTH = 2
"""So many times as many blocks as in any step before, at most: what more of them take is not known yet."""


class CopyPace:
    """Learns from steps of decodes alone, with and without copies: programs that write blocks take the device's time, and the host's to
    start, as do transfers."""

    def __init__(self, least: int):
        """least: blocks that a step may have in any case."""
        self._least = self._most_seen = least
        self._plain_seconds: deque[float] = deque(maxlen=_NUM_RECENT)
        self._added_seconds: deque[float] = deque(maxlen=_NUM_RECENT)
        """By block, in recent steps that copied some."""

    def note(self, num_blocks: int, seconds: float) -> None:
        """A step of decodes took so long that began copies of so many blocks, or wrote them."""
        if not num_blocks:
            self._plain_seconds.append(seconds)
        elif self._plain_seconds:
            self._added_seconds.append((seconds - median(self._plain_seconds)) / num_blocks)
            self._most_seen = max(self._most_seen, num_blocks)

    @property
    def most(self) -> int:
        """Most blocks of the next step, if requests decode."""
        if not self._added_seconds:
            return self._least
        limit, added = _GROWTH * self._most_seen, median(self._added_seconds)
        if added > 0:
            limit = min(limit, int(SHARE * median(self._plain_seconds) / added))
        return max(self._least, limit)

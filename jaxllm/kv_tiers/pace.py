"""Estimates how long reads of a store take."""

import time

_NEW_SHARE = 0.1
"""Weight of a new observation in the average."""
_KNOWN_SECONDS = 60.0
"""So long after a read nothing is known any more: were it, a few slow reads would end all for ever."""


class Pace:
    """A running average of the time of a content, of which some are read at once."""

    def __init__(self, block_bytes: int, num_at_once: int, bytes_per_second: float):
        """bytes_per_second: of all that are read at once, before the first read."""
        self._first_seconds = num_at_once * block_bytes / bytes_per_second
        self._num_at_once = num_at_once
        self._seconds = self._first_seconds
        self._noted_at = 0.0

    def note(self, seconds: float) -> None:
        """A content took so long."""
        self._seconds += _NEW_SHARE * (seconds - self._seconds)
        self._noted_at = time.monotonic()

    def seconds(self, num_contents: int) -> float:
        """Estimated time of so many."""
        if time.monotonic() - self._noted_at > _KNOWN_SECONDS:
            self._seconds = self._first_seconds
        return self._seconds * max(1.0, num_contents / self._num_at_once)

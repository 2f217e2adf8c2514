"""Estimates how long reads take."""

import time

_BYTES_PER_SECOND = 2e9
"""Before the first read."""
_NEW_SHARE = 0.1
"""Weight of a new observation in the average."""
_KNOWN_SECONDS = 60.0
"""So long after a read nothing is known any more: were it, a few slow reads would end all for ever."""


class Pace:
    """A running average of the time of a file, of which some are read at once."""

    def __init__(self, block_bytes: int, num_at_once: int):
        self._first_seconds = num_at_once * block_bytes / _BYTES_PER_SECOND
        self._num_at_once = num_at_once
        self._seconds = self._first_seconds
        self._noted_at = 0.0

    def note(self, seconds: float) -> None:
        """A file took so long."""
        self._seconds += _NEW_SHARE * (seconds - self._seconds)
        self._noted_at = time.monotonic()

    def seconds(self, num_files: int) -> float:
        """Estimated time of so many."""
        if time.monotonic() - self._noted_at > _KNOWN_SECONDS:
            self._seconds = self._first_seconds
        return self._seconds * max(1.0, num_files / self._num_at_once)

"""Unguessable ids, without a system call for each."""

import os

_BYTES = 16
_AT_ONCE = 256


class Ids:
    """Random ids of 32 hexadecimal digits. Used by one thread."""

    def __init__(self) -> None:
        self._ids: list[str] = []

    def take(self) -> str:
        """A new id."""
        if not self._ids:
            digits = os.urandom(_AT_ONCE * _BYTES).hex()
            self._ids = [digits[start : start + 2 * _BYTES] for start in range(0, len(digits), 2 * _BYTES)]
        return self._ids.pop()

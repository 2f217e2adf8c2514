"""Common parts of stores with threads (`Workers`): transfers with one task per content, and copies of bytes."""

import time

import numpy as np

from jaxllm.kv_tiers.slot_store import Transfer


class PendingTransfer:
    """A transfer under way. Its contents end in any order."""

    def __init__(self, number: int, num_contents: int):
        self._number, self._num_left, self._began = number, num_contents, time.monotonic()
        self._is_right = [False] * num_contents

    def end(self, index: int, is_right: bool) -> Transfer | None:
        """A content is over. Returns the transfer once all are. Called by one thread at a time."""
        self._is_right[index] = is_right
        self._num_left -= 1
        return None if self._num_left else Transfer(self._number, self._is_right, time.monotonic() - self._began)


def copy(source: memoryview, *, to: memoryview) -> None:
    """Copy bytes while other threads run Python, which an assignment to a slice would keep from it."""
    np.copyto(np.frombuffer(to, np.uint8), np.frombuffer(source, np.uint8))

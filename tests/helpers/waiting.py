"""Wait for what other threads and processes do."""

import time
from collections.abc import Callable
from typing import Any


def wait_until(condition: Callable[[], Any], message: str = "it does not happen", seconds: float = 120) -> None:
    """Return once the condition holds. The limit is long, as only a test that fails waits for it, and machines may be slow."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.005)

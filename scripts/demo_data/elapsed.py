"""Output of the training scripts: lines after the seconds since their start."""

import time

STARTED = time.monotonic()


def report(line: str) -> None:
    """Prints a line after the seconds since the start."""
    print(f"[{time.monotonic() - STARTED:6.1f} s] {line}", flush=True)

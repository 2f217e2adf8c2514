"""Measures the parts of an engine's start, for the log and for scripts."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path


class StartTimes:
    """Seconds by part, in the order in which the parts began. Parts that run side by side add up to more than has passed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time within as this part's. May be used by several threads."""
        self.add(name, 0.0)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add time to a part."""
        with self._lock:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def describe(self) -> str:
        """`imports 1.6, weights 0.2, tracing 3.0`, in seconds."""
        with self._lock:
            return ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())


def process_age_seconds() -> float | None:
    """How long ago this process began, in seconds; None where /proc does not show it."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
        return max(0.0, uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return None

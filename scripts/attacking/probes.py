"""Answers of the probes while the server is under attack."""

import threading
import time

from scripts.attacking import wire
from scripts.attacking.target import Attacked


class Probes:
    """What `/ready` and `/health` say, five times a second, during the `with` block."""

    def __init__(self, server: Attacked):
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.not_ready_after: float | None = None
        """Seconds until `/ready` was first not 200."""
        self.statuses: list[tuple[float, int, int]] = []

    def __enter__(self) -> "Probes":
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(15)

    @property
    def is_not_ready(self) -> bool:
        return self.not_ready_after is not None

    def _run(self) -> None:
        while not self._stop.is_set():
            ready = wire.get(self._server, "/ready", seconds=5).status
            health = wire.get(self._server, "/health", seconds=5).status
            now = time.monotonic() - self._began
            self.statuses.append((now, ready, health))
            if ready != 200 and self.not_ready_after is None:
                self.not_ready_after = now
            self._stop.wait(0.2)

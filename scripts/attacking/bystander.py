"""Someone else who uses the server while it is attacked: what they wait, and what goes wrong for them."""

import threading
import time
from collections import Counter

from scripts.attacking import wire
from scripts.attacking.attack import Seen
from scripts.attacking.target import Attacked

INTERVAL_SECONDS = 0.2
GIVES_UP_AFTER_SECONDS = 60.0
_FIRST = 3
"""Requests before the attack begins."""


class Bystander:
    """Small completions, each on a separate connection, during the `with` block."""

    def __init__(self, server: Attacked, key: str = ""):
        self._server, self._headers = server, wire.bearer(key)
        self._stop = threading.Event()
        self._asked_at: float | None = None
        self.waits: list[float] = []
        self.usual = 0.0
        """Their wait in seconds before the attack began."""
        self.errors: Counter[str] = Counter()

    def __enter__(self) -> "Bystander":
        for _ in range(_FIRST):
            self._ask()
        self.usual = sorted(self.waits)[_FIRST // 2]
        self.waits.clear()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        time.sleep(2 * INTERVAL_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(GIVES_UP_AFTER_SECONDS)

    @property
    def worst(self) -> float:
        """The longest wait so far in seconds, that for an answer which has not come yet among them."""
        open_since = self._asked_at
        return max([*self.waits, 0.0 if open_since is None else time.monotonic() - open_since])

    def judge(self, seen: Seen, limit_seconds: float = 3.0) -> None:
        """Nobody waits longer than this for four tokens, and nothing fails."""
        seen.seconds(f"others wait (before {self.usual:.1f} s)", self.worst, limit_seconds)
        seen.none_of("their errors", list(self.errors.elements()), len(self.waits) + self.errors.total())

    def _run(self) -> None:
        while not self._stop.is_set():
            self._ask()
            self._stop.wait(INTERVAL_SECONDS)

    def _ask(self) -> None:
        self._asked_at = time.monotonic()
        answer = wire.post(self._server, wire.COMPLETIONS, wire.PLAIN, self._headers, seconds=GIVES_UP_AFTER_SECONDS)
        self._asked_at = None
        self.waits.append(answer.seconds)
        if answer.status != 200:
            self.errors[str(answer.status or "no answer")] += 1

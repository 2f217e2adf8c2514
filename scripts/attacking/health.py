"""Whether the probes tell the truth while the engine does not go on."""

import os
import signal
import threading
import time

from scripts.attacking import wire
from scripts.attacking.attack import Seen, attack
from scripts.attacking.target import Attacked, Target

TOLD_WITHIN_SECONDS = 15.0


class Probes:
    """What `/ready` and `/health` say, five times a second."""

    def __init__(self, server: Attacked):
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.not_ready_after: float | None = None
        """Seconds until `/ready` was first not 200."""
        self.statuses: list[tuple[float, int, int]] = []

    def start(self) -> None:
        self._began = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
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


@attack(2, "high", "an engine process that is stopped (SIGSTOP), with a request running")
def stopped_engine(target: Target, seen: Seen) -> None:
    from scripts.attacking.unread import Stream

    server = target.server()
    [engine] = server.pids("engine.process")
    probes = Probes(server)
    with Stream(server, num_tokens=1000) as stream:
        time.sleep(0.5)
        os.kill(engine, signal.SIGSTOP)
        probes.start()
        try:
            until = time.monotonic() + 2 * TOLD_WITHIN_SECONDS
            while not probes.is_not_ready and time.monotonic() < until:
                time.sleep(0.2)
        finally:
            os.kill(engine, signal.SIGCONT)
            probes.stop()
        told = probes.not_ready_after
        seen.seconds("/ready is not 200 after", 2 * TOLD_WITHIN_SECONDS if told is None else told, TOLD_WITHIN_SECONDS)
        stream.read_all(60)
        seen.equal("then the stream goes on", stream.is_whole, True)
        until = time.monotonic() + 10
        while (status := wire.get(server, "/ready").status) != 200 and time.monotonic() < until:
            time.sleep(0.2)
        seen.equal("/ready again", status, 200)

"""Whether the probes tell the truth while the engine does not go on."""

import os
import signal
import time

from scripts.attacking import wire
from scripts.attacking.attack import Seen, attack
from scripts.attacking.probes import Probes
from scripts.attacking.target import Target
from scripts.attacking.unread import Stream

TOLD_WITHIN_SECONDS = 15.0


@attack("high", "an engine process that is stopped (SIGSTOP), with a request running")
def stopped_engine(target: Target, seen: Seen) -> None:
    server = target.server()
    [engine] = server.pids("engine.process")
    with Stream(server, num_tokens=1000) as stream:
        time.sleep(0.5)
        os.kill(engine, signal.SIGSTOP)
        try:
            with Probes(server) as probes:
                until = time.monotonic() + 2 * TOLD_WITHIN_SECONDS
                while not probes.is_not_ready and time.monotonic() < until:
                    time.sleep(0.2)
        finally:
            os.kill(engine, signal.SIGCONT)
        told = probes.not_ready_after
        seen.seconds("/ready is not 200 after", 2 * TOLD_WITHIN_SECONDS if told is None else told, TOLD_WITHIN_SECONDS)
        stream.read_all(60)
        seen.equal("then the stream goes on", stream.is_whole, True)
        until = time.monotonic() + 10
        while (status := wire.get(server, "/ready").status) != 200 and time.monotonic() < until:
            time.sleep(0.2)
        seen.equal("/ready again", status, 200)

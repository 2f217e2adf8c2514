"""A process of the server that is killed under clients who connect at that moment."""

import os
import signal
import threading
import time
from collections import Counter

from scripts.attacking import wire
from scripts.attacking.attack import Seen, attack
from scripts.attacking.target import Target

_CONNECTIONS, _INTERVAL_SECONDS = 60, 0.1


@attack("low", "kill -9 of one of two API servers, and 60 new connections in the 6 s after it")
def killed_api_server(target: Target, seen: Seen) -> None:
    server = target.server("--api-server-count", "2", fresh=True)
    wire.post(server, wire.COMPLETIONS, wire.PLAIN)
    answers: list[wire.Answer] = []
    os.kill(server.pids("server.api_server")[0], signal.SIGKILL)
    time.sleep(0.05)

    def ask() -> None:
        answers.append(wire.post(server, wire.COMPLETIONS, wire.PLAIN, seconds=30))

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(_CONNECTIONS)]
    for thread in threads:
        thread.start()
        time.sleep(_INTERVAL_SECONDS)
    for thread in threads:
        thread.join(40)
    counts = Counter(answer.status for answer in answers)
    wrong = [str(status or "no answer") for status in counts.elements() if status != 200]
    seen.none_of("not answered with 200", wrong, len(threads))
    seen.seconds("the longest wait", max((answer.seconds for answer in answers), default=0.0), 3.0)

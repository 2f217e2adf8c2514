"""One client that takes all places: in the batch, in the queue, and of connections."""

import contextlib
import time

from scripts.attacking import wire
from scripts.attacking.attack import Seen, attack
from scripts.attacking.bystander import Bystander
from scripts.attacking.target import Target
from scripts.attacking.unread import Stream

TWO_KEYS = ("--api-key", "one", "--api-key", "two")
FEW_ROWS = ("--max-num-seqs", "8", "--decode-buckets", "8")


def _judge(target: Target, seen: Seen, flags: tuple[str, ...], num_streams: int, hold_seconds: float) -> None:
    server = target.server(*flags)
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(Bystander(server, "two"))
        for _ in range(num_streams):
            stack.enter_context(Stream(server, 1900, "one", buffer_bytes=4096, logprobs=5))
        until = time.monotonic() + hold_seconds
        while time.monotonic() < until and other.worst < 30:
            time.sleep(0.2)
        worst, waits = other.worst, len(other.waits)
        refused = wire.get(server, "/metrics")
    seen.seconds("another's four tokens", worst, 10.0)
    seen.none_of("their errors", list(other.errors.elements()), waits + other.errors.total())
    seen.equal("/metrics answers", refused.status, 200)


@attack(8, "medium", "40 streams that nobody reads fill 8 rows; another key asks for four tokens")
def unread_streams(target: Target, seen: Seen) -> None:
    _judge(target, seen, (*TWO_KEYS, *FEW_ROWS), 40, 40.0)


@attack(8, "medium", "2,000 requests wait at once, with default limits")
def long_queue(target: Target, seen: Seen) -> None:
    server = target.server(*TWO_KEYS, *FEW_ROWS)
    body = {**wire.PLAIN, "max_tokens": 1000}
    statuses: list[int] = []
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(wire.connect(server)) for _ in range(2000)]
        data = wire.head_and_body(server, "POST", wire.COMPLETIONS, body, wire.bearer("one"))
        for stream in sockets:
            stream.sendall(data)
        time.sleep(5)
        for stream in sockets:
            stream.setblocking(False)
            with contextlib.suppress(OSError):
                statuses += [int(found) for found in wire.STATUS.findall(stream.recv(4096))]
    refused = sum(status in (429, 503) for status in statuses)
    seen.equal("some are refused (429 or 503)", refused > 0, True)
    seen.checks[-1] = type(seen.checks[-1])("refused with 429 or 503", str(refused), "> 0", refused > 0)

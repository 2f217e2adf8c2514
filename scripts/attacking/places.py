"""One client that takes all places: in the batch, in the queue, and of connections."""

import contextlib
import re
import time
from collections import Counter

from scripts.attacking import wire
from scripts.attacking.attack import Seen, attack
from scripts.attacking.bystander import Bystander
from scripts.attacking.target import Target
from scripts.attacking.unread import Stream

TWO_KEYS = ("--api-key", "one", "--api-key", "two")


@attack("medium", "64 streams that nobody reads fill all 32 rows; another key asks for four tokens")
def unread_streams(target: Target, seen: Seen) -> None:
    server = target.server(*TWO_KEYS)
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(Bystander(server, "two"))
        for _ in range(64):
            stack.enter_context(Stream(server, 1900, "one", buffer_bytes=4096, logprobs=5))
        _wait(40, other)
        _judge(seen, other)


@attack("medium", "1,000 requests of one key wait; another key asks for four tokens")
def long_queue(target: Target, seen: Seen) -> None:
    server = target.server(*TWO_KEYS)
    data = wire.head_and_body(server, "POST", wire.COMPLETIONS, {**wire.PLAIN, "max_tokens": 500}, wire.bearer("one"))
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(Bystander(server, "two"))
        for _ in range(1000):
            stack.enter_context(wire.connect(server)).sendall(data)
        _wait(20, other)
        _judge(seen, other)


def _wait(seconds: float, other: Bystander) -> None:
    """So long, or until it is known that others wait too long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and other.worst < 30:
        time.sleep(0.2)


def _judge(seen: Seen, other: Bystander) -> None:
    """The places are still taken."""
    seen.seconds("another's four tokens", other.worst, 10.0)
    seen.none_of("their errors", list(other.errors.elements()), len(other.waits) + other.errors.total())


@attack("medium", "a stream of 20 MB that nobody reads, with --unread-stream-timeout 3")
def unread_for_long(target: Target, seen: Seen) -> None:
    server = target.server(*TWO_KEYS, "--unread-stream-timeout", "3")
    with Stream(server, 1900, "one", buffer_bytes=4096, logprobs=20, n=8, temperature=1) as stream:
        until = time.monotonic() + 60
        num_running = 1.0
        while time.monotonic() < until and num_running:
            time.sleep(1)
            found = re.search(rb"num_requests_running{[^}]*} ([0-9.]+)", wire.get(server, "/metrics").body)
            num_running = float(found[1]) if found else 0.0
        stream.read_all(10)
    seen.equal("nothing runs any more", num_running, 0.0)
    seen.equal("it was ended", stream.is_closed and not stream.is_whole, True)


@attack("medium", "20 requests of one key at once, with --max-concurrent-requests-per-key 4")
def many_at_once(target: Target, seen: Seen) -> None:
    server = target.server(*TWO_KEYS, "--max-concurrent-requests-per-key", "4")
    data = wire.head_and_body(server, "POST", wire.COMPLETIONS, {**wire.PLAIN, "max_tokens": 200}, wire.bearer("one"))
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(wire.connect(server)) for _ in range(20)]
        for stream in streams:
            stream.sendall(data)
        own = wire.post(server, wire.COMPLETIONS, wire.PLAIN, wire.bearer("one"))
        other = wire.post(server, wire.COMPLETIONS, wire.PLAIN, wire.bearer("two"))
        answers = [stream.recv(1 << 16) for stream in streams]
    counts = Counter(int(status) for answer in answers for status in wire.STATUS.findall(answer))
    seen.equal("answered with 200", counts[200], 4)
    seen.equal("refused with 429", counts[429], 16)
    seen.equal("the next of that key, with Retry-After", (own.status, "retry-after" in own.headers), (429, True))
    seen.equal("one of another key", other.status, 200)

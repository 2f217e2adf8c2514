"""Both ends of `Follow`, where the other one sends what it should not."""

import threading
from concurrent.futures import Future
from typing import Any

from jaxllm.kv_tiers.peers.following import Following, Lease
from jaxllm.kv_tiers.peers.messages import Attach, Change, Follow, Grown
from tests.kv_tiers.peers.test_server import greet, prefill

A, B, C = b"a", b"b", b"c"


class Peer:
    """A prefill engine whose answers a test makes."""

    is_closed = False

    def __init__(self) -> None:
        self.answers: list[Future[Any]] = []

    def follow(self, known: dict[str, tuple[int, int, bool]]) -> "Future[Any]":
        self.answers.append(Future())
        return self.answers[-1]


def test_names_that_are_not_of_the_lease_and_names_that_come_twice_are_ignored() -> None:
    peer: Any = Peer()
    failed: list[Lease] = []
    following = Following(threading.RLock(), lambda: None, lambda lease, error: failed.append(lease))
    lease = Lease("one", peer, {"r1"})
    following.begin(lease, [A, B, C])
    peer.answers[0].set_result({"one": Change([A, A, b"x"], [b"y"], True, False), "unknown": Change([A], [], False, True)})
    peer.answers[1].set_result({"one": Change([A, B], [A, b"x", A], True, False)})
    first, second = (change for _, change in following.take(60.0))
    assert (first.stored, first.lost) == ([A], []) and (second.stored, second.lost) == ([B], [A])
    assert list(following.awaited([A, B, C, b"x"])) == [C] and not failed
    peer.answers[2].set_result({"one": Change([], [], False, True)})
    assert len(following.take(60.0)) == 1 and not following.awaited([C])
    following.forget(lease)
    following.check_integrity([])


def test_numbers_and_leases_that_cannot_be_are_answered() -> None:
    with prefill() as engine:
        lease = engine.lease()
        channel = greet(engine)
        channel.send(Attach(lease.number), 60)
        channel.receive(60)
        for numbers in ((-(2**62), -1), (2**62, 2**62), (0, 0)):
            channel.send(Follow({lease.number: (*numbers, True), "unknown": (0, 0, False)}), 60)
            answer = channel.receive(60)
            assert isinstance(answer, Grown) and answer.leases["unknown"] is None
            change = answer.leases[lease.number]
            assert change is None or set(change.stored) <= set(lease.names)
        channel.close()

"""Holders and expiry of leases, with a fake clock."""

import random
import threading

import pytest

from jaxllm.kv_tiers.peers.leases import CLOSED_SECONDS, LEASE_SECONDS, Lease, Leases, NoLeaseError
from tests.kv_tiers.fake_memory import names_of


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(max_blocks: int = 8) -> tuple[Leases, Clock]:
    clock = Clock()
    return Leases(max_blocks, clock), clock


def opened(leases: Leases, count: int = 3) -> Lease:
    lease = leases.open(names_of(count))
    assert lease is not None
    return lease


def slot(leases: Leases, lease: Lease, name: bytes, seconds: float = 0.0) -> int | None:
    with leases.reading(lease.number) as slot_of:
        return slot_of(name, seconds)


def test_a_lease_ends_unless_it_is_renewed() -> None:
    leases, clock = make()
    lease = opened(leases)
    clock.now += LEASE_SECONDS - 1
    leases.renew([lease.number, "unknown"], "connection")
    clock.now += LEASE_SECONDS - 1
    assert leases.take_ended() == []
    clock.now += 1
    with pytest.raises(NoLeaseError):
        leases.attach(lease.number, "connection")
    assert leases.num_expired == 1 and len(leases) == 0, "also while no step asks for what has ended"
    leases.end(lease.number)
    assert leases.take_ended() == [lease] and leases.num_expired == 1


def test_a_lease_that_is_over_cannot_be_renewed() -> None:
    leases, clock = make()
    lease = opened(leases)
    clock.now += LEASE_SECONDS
    leases.renew([lease.number], "connection")
    assert leases.take_ended() == [lease]


def test_done_ends_a_lease_at_once() -> None:
    leases, _ = make()
    lease = opened(leases)
    leases.end(lease.number)
    leases.end("unknown")
    with pytest.raises(NoLeaseError):
        leases.attach(lease.number, "connection")
    assert len(leases) == 0, "an engine without requests takes no step that would take them"
    assert leases.take_ended() == [lease] and leases.num_expired == 0


def test_a_lease_ends_soon_after_its_last_connection_was_closed() -> None:
    leases, clock = make()
    lease = opened(leases)
    assert leases.attach(lease.number, "one") == lease.names
    leases.attach(lease.number, "two")
    leases.leave("one")
    leases.leave("other")
    clock.now += CLOSED_SECONDS
    assert leases.take_ended() == []
    leases.leave("two")
    clock.now += CLOSED_SECONDS - 0.1
    assert leases.take_ended() == []
    clock.now += 0.1
    assert leases.take_ended() == [lease]


def test_leases_keep_no_more_than_their_share() -> None:
    leases, _ = make(max_blocks=4)
    first = opened(leases, 3)
    second = opened(leases, 4)  # three of them are kept already
    assert leases.open([bytes(32)[:31] + b"x"]) is None and leases.num_refused == 1
    leases.end(second.number)
    assert leases.open([b"x" * 32]) is None, "its slots are in use until take_ended"
    assert leases.take_ended() == [second]
    assert leases.open([b"x" * 32]) is not None
    assert len(leases) == 2 and not first.is_over


def test_a_reader_keeps_the_slots_of_a_lease_that_ends() -> None:
    leases, clock = make()
    lease = opened(leases)
    leases.note(lease, [(name, index) for index, name in enumerate(lease.names)])
    with leases.reading(lease.number) as slot_of:
        assert slot_of(lease.names[1], 0.0) == 1
        leases.end(lease.number)
        clock.now += 10 * LEASE_SECONDS
        assert leases.take_ended() == []
        assert slot_of(lease.names[2], 0.0) is None, "no further content is read"
    assert leases.take_ended() == [lease]


def test_a_reader_waits_for_what_is_being_stored() -> None:
    leases, _ = make()
    lease = opened(leases)
    found: list[int | None] = []
    reader = threading.Thread(target=lambda: found.append(slot(leases, lease, lease.names[0], 10.0)))
    reader.start()
    leases.note(lease, [(lease.names[0], 5)])
    reader.join(10.0)
    assert found == [5]
    assert slot(leases, lease, lease.names[1], 0.01) is None
    leases.note(lease, (), lost={lease.names[1]})
    assert slot(leases, lease, lease.names[1], 10.0) is None, "what is lost is not waited for"
    assert slot(leases, lease, b"another", 10.0) is None


def test_wrong_contents_are_lost_in_all_leases() -> None:
    leases, _ = make()
    one, two = opened(leases), opened(leases)
    for lease in (one, two):
        leases.note(lease, [(lease.names[0], 5)])
    leases.lose({one.names[0], one.names[1]})
    assert slot(leases, one, one.names[0]) is None and slot(leases, two, two.names[0]) is None
    assert one.pending == {one.names[2]} and leases.pending() == [one, two]
    leases.end_all()
    assert leases.pending() == [] and leases.take_ended() == [one, two]


def test_random_use_leaves_no_lease() -> None:
    rng = random.Random(1)
    leases, clock = make(max_blocks=40)
    known: list[Lease] = []
    names = [rng.randbytes(32) for _ in range(80)]  # several leases may have one
    ended = 0
    for _ in range(3000):
        clock.now += rng.choice([0.0, 0.1, 5.0])
        match rng.randrange(6):
            case 0:
                if (lease := leases.open(rng.sample(names, rng.randint(1, 15)))) is not None:
                    known.append(lease)
            case 1 if known:
                leases.note(lease := rng.choice(known), [(name, 1) for name in lease.pending])
            case 2 if known:
                leases.renew([rng.choice(known).number], rng.randrange(3))
            case 3:
                leases.leave(rng.randrange(3))
            case 4 if known:
                leases.end(rng.choice(known).number)
            case _:
                for lease in leases.take_ended():
                    known.remove(lease)
                    ended += 1
        kept = {name for lease in known for name in lease.names}
        live = [lease for lease in known if not lease.is_over and clock.now < lease.expires_at]
        assert len(kept) <= 40 and len(leases) == len(live) and leases._kept.keys() == kept
    clock.now += LEASE_SECONDS
    assert len(leases.take_ended()) == len(known) and not leases._leases and not leases._kept
    assert ended > 100 and leases.num_refused > 10

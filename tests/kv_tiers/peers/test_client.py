"""The decode engine's side of a connection, against prefill engines that break the protocol."""

import gc
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jaxllm.framing import ClosedError, WireError, frame
from jaxllm.kv_tiers.peers import addresses, messages, peer_store
from jaxllm.kv_tiers.peers.addresses import NotAllowedError
from jaxllm.kv_tiers.peers.channel import Channel
from jaxllm.kv_tiers.peers.client import Connection, Mapping, RefusedError, Target
from jaxllm.kv_tiers.peers.identity import is_signed, signature
from jaxllm.kv_tiers.peers.messages import Attached, Block, Code, Hello, Mapped, Missing, Proof, Refused, Slots
from jaxllm.kv_tiers.peers.peer import Peer
from jaxllm.kv_tiers.peers.peer_store import PeerStore
from jaxllm.kv_tiers.peers.server import socket_name
from jaxllm.kv_transfer import KVTransfer
from tests.kv_tiers.fake_memory import BLOCK_BYTES, FakeMemory, Prefill, identity, names_of, prefill

SUMS = b"\1" * 24
NAMES = names_of(3)
Script = Callable[[Channel], None]


@pytest.fixture
def memory() -> Iterator[FakeMemory]:
    made = FakeMemory(8)
    yield made
    made.close()


def welcome(channel: Channel, **options: Any) -> None:
    """The handshake of a prefill engine."""
    own = identity("prefill", **options)
    hello = channel.receive(60)
    nonce = b"m" * 16
    channel.send(Hello(messages.PROTOCOL, own.engine_id, dict(own.facts), own.block_bytes, nonce), 60)
    channel.receive(60)
    channel.accept(messages.OF_DECODE)
    channel.send(Proof(messages.proof("prefill", own.token, nonce, hello.nonce)), 60)


@contextmanager
def scripted(script: Script, *, is_local: bool = False) -> Iterator[Target]:
    """A prefill engine that follows a script, and then waits until the other end has closed."""
    engine_id = f"scripted-{os.urandom(4).hex()}" if is_local else "prefill"
    listener = socket.socket(socket.AF_UNIX if is_local else socket.AF_INET)
    listener.bind(socket_name(engine_id) if is_local else ("127.0.0.1", 0))
    listener.listen()

    def serve() -> None:
        try:
            stream, _ = listener.accept()
        except OSError:
            return  # without a connection
        channel = Channel(stream, messages.FIRST_OF_DECODE)
        try:
            script(channel)
            while channel.receive(60):
                pass
        except (WireError, OSError):
            pass  # the other end has closed
        finally:
            channel.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Target(engine_id, "127.0.0.1", 1 if is_local else listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # ends `accept`, which `close` does not
        thread.join()
        listener.close()


def connect(target: Target, memory: FakeMemory, seconds: float = 60, **options: Any) -> Connection:
    return Connection.to(target, identity(**options), memory, None, seconds)


def raw(data: bytes) -> Script:
    """Send these bytes in place of an answer."""
    return lambda channel: channel._socket.sendall(data)


def drip(channel: Channel) -> None:
    for _ in range(8):
        channel._socket.sendall(b"\0")
        time.sleep(0.05)


FIRSTS: dict[str, Script] = {
    "garbage": raw(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "4 GiB": raw(struct.pack(">I", 2**32 - 1)),
    "closed": lambda channel: channel.close(),
    "silent": lambda channel: None,
    "truncated": raw(bytes(frame(Hello(1, "prefill", {"model": "one"}, BLOCK_BYTES, b""), 1000))[:-1]),
    "one byte after the other": drip,
    "proof first": raw(bytes(frame(Proof(b""), 1000))),
    "later message": raw(bytes(frame(Attached("x", [], True), 1000))),
}


@pytest.mark.parametrize("script", FIRSTS.values(), ids=FIRSTS.keys())
def test_what_is_no_prefill_engine_is_left(memory: FakeMemory, script: Script) -> None:
    began = time.monotonic()
    with scripted(script) as target, pytest.raises(WireError):
        connect(target, memory, 0.15)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ({"token": b"other"}, "has another token"),
        ({"facts": {"model": "two", "dtype": "f"}}, "differ in model: one and two; dtype: none and f"),
        ({"block_bytes": 1}, "they differ in bytes of a block: 1000 and 1"),
    ],
    ids=str,
)
def test_prefill_engines_that_differ_are_refused(memory: FakeMemory, own: dict[str, Any], text: str) -> None:
    with scripted(lambda channel: welcome(channel, **own)) as target, pytest.raises(RefusedError, match=text):
        connect(target, memory)


def test_another_engine_is_refused(memory: FakeMemory) -> None:
    with scripted(welcome) as target, pytest.raises(RefusedError, match="it is engine prefill"):
        connect(Target("other", target.host, target.port), memory)


def block(name: bytes, length: int = BLOCK_BYTES, sums: bytes = SUMS, content: int = BLOCK_BYTES) -> bytes:
    return bytes(frame(Block(name, length, sums), 1000)) + b"\7" * content


ANSWERS: dict[str, tuple[bytes, str]] = {
    "closed": (b"", "was closed"),
    "truncated block": (block(NAMES[0], content=BLOCK_BYTES - 1), "was closed"),
    "unasked": (block(b"unasked"), "not asked for, or twice"),
    "twice": (block(NAMES[0]) + block(NAMES[0]), "not asked for, or twice"),
    "missing twice": (bytes(frame(Missing([NAMES[0], NAMES[0]]), 1000)), "not asked for, or twice"),
    "too long": (block(NAMES[0], length=BLOCK_BYTES + 1), "a block of 1001 bytes was sent"),
    "4 GiB": (block(NAMES[0], length=2**32), "a block of 4294967296 bytes was sent"),
    "negative": (block(NAMES[0], length=-1), "a block of -1 bytes was sent"),
    "too few sums": (block(NAMES[0], sums=SUMS[:-1]), "checksums of 23 bytes"),
    "slot without memory": (bytes(frame(Slots([NAMES[0]], [0], [SUMS]), 1000)), "outside of the memory"),
    "slots of other lengths": (bytes(frame(Slots(NAMES[:2], [0], [SUMS, SUMS]), 1000)), "lists of different lengths"),
    "slots twice": (bytes(frame(Slots([NAMES[0]] * 2, [0, 0], [SUMS] * 2), 1000)), "not asked for, or twice"),
    "another answer": (bytes(frame(Attached("lease", [], True), 1000)), "the answer to Pull is a Attached"),
    "long message": (struct.pack(">I", messages.MAX_BYTES + 1), "was announced"),
}


@pytest.mark.parametrize(("data", "text"), ANSWERS.values(), ids=ANSWERS.keys())
def test_pulls_that_break_the_protocol_fail(memory: FakeMemory, data: bytes, text: str) -> None:
    def script(channel: Channel) -> None:
        welcome(channel)
        channel.receive(60)
        channel._socket.sendall(data)
        channel.interrupt()

    memory.fill(7, 7)
    untouched = memory.content(7)
    with scripted(script) as target:
        connection = connect(target, memory)
        with pytest.raises(WireError, match=text):
            connection.pull("lease", NAMES, [0, 1, 2])
        connection.close()
    assert memory.content(7) == untouched, "another slot was written"


def test_blocks_may_come_in_any_order(memory: FakeMemory) -> None:
    def script(channel: Channel) -> None:
        welcome(channel)
        channel.receive(60)
        channel._socket.sendall(block(NAMES[2]) + bytes(frame(Missing([NAMES[1]]), 1000)) + block(NAMES[0]))

    with scripted(script) as target:
        connection = connect(target, memory)
        assert connection.pull("lease", NAMES, [0, 1, 2]) == [True, False, True]
        assert bytes(memory.view(2)) == b"\7" * BLOCK_BYTES and memory.sums[2].tobytes() == SUMS
        connection.close()


def test_a_dripping_prefill_engine_is_left(memory: FakeMemory) -> None:
    def script(channel: Channel) -> None:
        welcome(channel)
        channel.receive(60)
        data = block(NAMES[0])
        channel._socket.sendall(data[:-900])
        for _ in range(600):
            channel._socket.sendall(b"\7")
            time.sleep(0.1)

    began = time.monotonic()
    with scripted(script) as target:
        connection = connect(target, memory)
        connection._seconds = 0.3
        with pytest.raises(WireError, match="in time"):
            connection.pull("lease", NAMES, [0, 1, 2])
        assert time.monotonic() - began < 30
        connection.close()


def maps(descriptor: Callable[[], int | None], num_bytes: int) -> Script:
    def script(channel: Channel) -> None:
        hello = channel.receive(60)
        channel.send(Hello(messages.PROTOCOL, hello.engine_id, {"model": "one"}, BLOCK_BYTES, b"m"), 60)
        channel.receive(60)
        channel.accept(messages.OF_DECODE)
        channel.send(Proof(messages.proof("prefill", b"", b"m", hello.nonce)), 60)
        channel.receive(60)
        channel.send(Mapped(num_bytes), 60)
        if (made := descriptor()) is None:
            channel._socket.sendall(b"\0")
        else:
            channel.send_descriptor(made, 60)
            os.close(made)

    return script


def unsealed() -> int:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 4096)
    return descriptor


@pytest.mark.parametrize(
    ("descriptor", "num_bytes", "text"),
    [
        (lambda: None, 4096, "no descriptor came"),
        (unsealed, 4096, "may be shorter than it says"),
        (lambda: os.dup(FakeMemory(1).descriptor), 8192, "may be shorter than it says"),
        (lambda: os.dup(FakeMemory(1).descriptor), -1, "may be shorter than it says"),
        (lambda: os.open("/proc/self/status", os.O_RDONLY), 10, "cannot be mapped"),
    ],
    ids=["none", "unsealed", "short", "negative", "no memory"],
)
def test_memory_that_could_end_this_process_is_not_mapped(
    memory: FakeMemory, descriptor: Callable[[], int | None], num_bytes: int, text: str
) -> None:
    with scripted(maps(descriptor, num_bytes), is_local=True) as target, pytest.raises(WireError, match=text):
        Connection.to(target, identity(), memory, None, 60, Mapping())


def test_refusals_keep_their_code(memory: FakeMemory) -> None:
    def script(channel: Channel) -> None:
        channel.receive(60)
        channel.send(Refused("protocol", "version 2"), 60)

    with scripted(script) as target, pytest.raises(RefusedError, match="version 2") as error:
        connect(target, memory)
    assert error.value.code == "protocol"


def resolver(*found: str) -> Callable[..., list[Any]]:
    return lambda host, port, type: [(socket.AF_INET, type, 0, "", (address, port)) for address in found]


@pytest.mark.parametrize(
    ("host", "peers", "found"),
    [
        ("127.0.0.1", None, ["127.0.0.1"]),
        ("10.1.2.3", None, []),
        ("10.1.2.3", ["10.1.0.0/16"], ["10.1.2.3"]),
        ("127.0.0.1", ["10.1.0.0/16"], []),
        ("169.254.169.254", ["10.1.0.0/16"], []),
        ("prefill-1", ["10.1.0.0/16"], ["10.1.2.3"]),
        ("rebound", ["10.1.0.0/16"], []),
        ("both", ["10.1.0.0/16"], ["10.1.2.3"]),
        ("Rebound", ["rebound"], ["169.254.169.254"]),
        ("::ffff:127.0.0.1", None, ["::ffff:127.0.0.1"]),
    ],
)
def test_only_peers_are_connected_to(
    host: str, peers: Sequence[str] | None, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"prefill-1": ["10.1.2.3"], "rebound": ["169.254.169.254"], "both": ["10.1.2.3", "169.254.169.254"]}
    monkeypatch.setattr(addresses.socket, "getaddrinfo", resolver(*known.get(host.lower(), [host])))
    if not found:
        with pytest.raises(NotAllowedError, match=f"{host} is not among the peers of this engine"):
            addresses.allowed(host, 5, peers)
    else:
        assert [address for _, address in addresses.allowed(host, 5, peers)] == [(each, 5) for each in found]


def test_signatures_cover_all_that_is_used() -> None:
    transfer = KVTransfer(remote_engine_id="a", lease_id="b", host="c", port=1, num_blocks=2, num_tokens=3, num_cached_tokens=4)
    signed = {**{name: getattr(transfer, name) for name in transfer.__struct_fields__}, "signature": signature(b"t", transfer)}
    assert is_signed(b"t", KVTransfer(**signed)) and is_signed(b"", transfer)
    assert not is_signed(b"other", KVTransfer(**signed)) and not is_signed(b"t", transfer)
    changes: dict[str, Any] = {
        "remote_engine_id": "x",
        "lease_id": "x",
        "host": "x",
        "port": 9,
        "num_blocks": 9,
        "num_tokens": 9,
    }
    for name, value in changes.items():
        assert not is_signed(b"t", KVTransfer(**{**signed, name: value}))
    assert not is_signed(b"t", KVTransfer(**{**signed, "signature": "ü"}))


# PeerStore


class Woken:
    """Counts calls, and waits for them."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self) -> None:
        self.event.set()

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline
            self.event.wait(0.05)
            self.event.clear()


@contextmanager
def stored(memory: FakeMemory, seconds: float = 60, **options: Any) -> Iterator[tuple[PeerStore, Woken]]:
    woken = Woken()
    store = PeerStore(identity(**options), memory, woken, None, seconds)
    try:
        yield store, woken
    finally:
        store.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name in ("kv-renew", "kv-peer")]


def read(store: PeerStore, woken: Woken, names: Sequence[bytes], slots: Sequence[int]) -> Sequence[bool]:
    store.read(5, names, slots)
    found: list[Any] = []
    woken.until(lambda: bool(found.extend(store.finished()) or found))
    (transfer,) = found
    assert transfer.number == 5
    return transfer.is_right  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_shared", [False, True], ids=["tcp", "shared memory"])
def test_a_store_reads_what_leases_have(memory: FakeMemory, is_shared: bool) -> None:
    with prefill(is_shared=is_shared) as engine, stored(memory) as (store, woken):
        lease = engine.lease(6)
        attaching = store.attach("r", engine.target, lease.number)
        assert attaching.result(60) == lease.names
        woken.until(lambda: len(store.find([*lease.names, b"other"])) == 6)
        assert read(store, woken, [*lease.names[:5], b"other"], range(6)) == [True] * 5 + [False]
        assert all(memory.content(slot) == engine.memory.content(slot) for slot in range(5))
        store.discard(lease.names[:1])
        assert list(store.find(lease.names)) == lease.names[1:] and "damaged" in str(store.fault_of("r"))
        store.reset(external=False)
        assert not store.find(lease.names)
        store.detach("r")
        woken.until(lambda: lease.is_over)
        store.check_integrity()


def test_a_lease_ends_after_its_last_user_and_read(memory: FakeMemory) -> None:
    with prefill() as engine, stored(memory) as (store, woken):
        lease = engine.lease(3, stored=[0])
        for request_id in ("one", "two"):
            store.attach(request_id, engine.target, lease.number).result(60)
        woken.until(lambda: bool(store.take_news() or store.find(lease.names)))
        assert list(store.awaited(lease.names)) and list(store.find(lease.names)) == lease.names[:1]
        (known,) = store._leases.values()
        store._add(known, lease.names[1:])  # as if they were stored: the prefill engine waits for them
        store.detach("one")
        store.read(1, lease.names, [0, 1, 2])
        store.detach("two")
        time.sleep(0.1)
        assert not lease.is_over, "a read is under way"
        engine.leases.note(lease, [(lease.names[1], 1)], lost={lease.names[2]})
        found: list[Any] = []
        woken.until(lambda: bool(found.extend(store.finished()) or found))
        assert found[0].is_right == [True, True, False]
        woken.until(lambda: lease.is_over)


def test_a_failure_that_comes_late_does_not_end_the_next_use_of_a_lease(memory: FakeMemory) -> None:
    with prefill() as engine, stored(memory) as (store, woken):
        lease = engine.lease(3)
        store.attach("one", engine.target, lease.number).result(60)
        (earlier,) = store._leases.values()
        for request_id in ("one", "two"):
            store._note_failure(earlier, RefusedError(Code.LEASE, "late"))
            store.attach(request_id, engine.target, lease.number).result(60)
            woken.until(lambda: len(store.find(lease.names)) == 3)
        store.detach("one")
        store.detach("two")
        woken.until(lambda: lease.is_over)
        store.check_integrity()


def test_an_engine_that_ends_takes_its_leases_along(memory: FakeMemory) -> None:
    engine, other = Prefill(), Prefill()
    with stored(memory) as (store, woken):
        first, second = engine.lease(3), engine.lease(4)
        kept = other.leases.open([b"kept" * 8])
        assert kept is not None
        other.leases.note(kept, [(kept.names[0], 1)])
        for request_id, owner, lease in (("a", engine, first), ("b", engine, second), ("c", other, kept)):
            store.attach(request_id, owner.target, lease.number).result(60)
        woken.until(lambda: len(store.find([*second.names, *kept.names])) == 5)
        engine.close()
        assert read(store, woken, [*second.names, *kept.names], range(5)) == [False] * 4 + [True]
        assert list(store.find([*second.names, *kept.names])) == list(kept.names)
        assert store.fault_of("a") and store.fault_of("b") and not store.fault_of("c")
        with pytest.raises((OSError, ClosedError)):
            store.attach("d", engine.target, first.number).result(60)
        woken.until(lambda: store.fault_of("d") is not None)
        for request_id in "abcd":
            store.detach(request_id)
        store.check_integrity()
    other.close()


def test_engines_that_cannot_be_reached_to_end_a_lease_keep_no_others_out(memory: FakeMemory) -> None:
    with socket.socket() as taken, prefill() as engine, stored(memory) as (store, woken):
        taken.bind(("127.0.0.1", 0))  # not listening
        for index in range(peer_store.MAX_PEERS):
            store.end_lease(Target(f"engine {index}", *taken.getsockname()), "x")
        woken.until(lambda: not store._peers)
        lease = engine.lease()
        assert store.attach("a", engine.target, lease.number).result(60) == lease.names
        store.end_lease(Target("another", engine.target.host, engine.target.port), "x")  # is refused
        store.detach("a")
        woken.until(lambda: lease.is_over and list(store._peers) == [engine.target])


def test_an_engine_that_is_lost_while_a_lease_is_ended_raises_nothing(
    memory: FakeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step loop ends leases, other threads let engines go."""
    with prefill() as engine, stored(memory) as (store, _):
        end, losing = Peer.end, threading.Thread(target=store.close)

        def lost_meanwhile(peer: Peer, lease: str) -> Any:
            losing.start()
            losing.join(0.2)
            return end(peer, lease)

        monkeypatch.setattr(Peer, "end", lost_meanwhile)
        store.end_lease(engine.target, engine.lease().number)
        losing.join(60)
        assert not losing.is_alive()


def test_a_prefill_engine_that_differs_is_asked_once(memory: FakeMemory) -> None:
    with prefill() as engine, stored(memory, facts={"model": "two"}) as (store, woken):
        with pytest.raises(RefusedError, match="differ in model"):
            store.attach("a", engine.target, "x").result(60)
        woken.until(lambda: store.fault_of("a") is not None)
        with pytest.raises(RefusedError, match="differ in model"):
            store.attach("b", engine.target, "x")
        store.detach("a")


def test_a_decode_engine_with_other_weights_is_compared_anew(memory: FakeMemory) -> None:
    facts = {"weights": "old"}
    with prefill(facts={"weights": "old"}) as engine, stored(memory, facts=lambda: dict(facts)) as (store, woken):
        lease = engine.lease()
        names = store.attach("a", engine.target, lease.number).result(60)
        woken.until(lambda: len(store.find(names)) == 4)
        facts["weights"] = "new"
        store.reset(external=False)
        assert not store.find(names) and store.fault_of("a") is None
        assert read(store, woken, names, range(4)) == [False] * 4
        with pytest.raises(RefusedError, match="differ in weights: .*old"):
            store.attach("b", engine.target, lease.number).result(60)
        facts["weights"] = "old"
        store.reset(external=False)
        again = engine.lease()
        assert store.attach("c", engine.target, again.number).result(60) == names
        for request_id in "abc":
            store.detach(request_id)
        store.check_integrity()


def test_leases_are_renewed_while_another_engine_hangs(memory: FakeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_store, "RENEW_SECONDS", 0.02)
    connect, hangs = Connection.to, threading.Event()

    def hang(target: Target, **options: Any) -> Connection:
        if target.engine_id == "hangs":
            hangs.wait()
            raise OSError("no route")
        return connect(target, **options)

    monkeypatch.setattr(Connection, "to", hang)
    with prefill() as engine, stored(memory) as (store, woken):
        lease = engine.lease()
        store.attach("a", engine.target, lease.number).result(60)
        other = Target("hangs", "127.0.0.1", 1)
        store.attach("b", other, "x")
        with store._lock:
            store._drop(store._peers[other][0])
        time.sleep(0.1)
        lease.expires_at -= 10.0
        expires_at = lease.expires_at
        woken.until(lambda: lease.expires_at > expires_at + 5.0)
        hangs.set()
        woken.until(lambda: not store._closing)
        for request_id in "ab":
            store.detach(request_id)
        store.check_integrity()


def test_requests_cannot_have_an_engine_connect_everywhere(memory: FakeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_store, "MAX_PEERS", 2)
    with scripted(lambda channel: None) as target, stored(memory, 0.3) as (store, _):
        for port in (target.port, target.port):
            store.attach("a", Target("x", target.host, port), "x")
        store.attach("a", Target("y", target.host, target.port), "x")
        with pytest.raises(RefusedError, match="connected to 2 prefill engines already"):
            store.attach("a", Target("z", target.host, target.port), "x")


IN_A_PROCESS = """
import sys, time
from tests.kv_tiers.fake_memory import Prefill
engine = Prefill(is_shared=sys.argv[1] == "shared memory")
lease = engine.lease(6)
print(engine.target.engine_id, engine.target.port, lease.number, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("transport", ["shared memory", "tcp"])
@pytest.mark.slow
def test_a_prefill_engine_in_another_process_that_is_killed(memory: FakeMemory, transport: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", IN_A_PROCESS, transport], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    engine_id, port, number = process.stdout.readline().split()
    try:
        with stored(memory) as (store, woken):
            names = store.attach("a", Target(engine_id, "127.0.0.1", int(port)), number).result(60)
            woken.until(lambda: len(store.find(names)) == 6)
            assert read(store, woken, names[:3], [0, 1, 2]) == [True] * 3
            expected = FakeMemory(3)
            for slot in range(3):
                expected.fill(slot, slot)
                assert memory.content(slot) == expected.content(slot)
            expected.close()
            assert maps_another() == (transport == "shared memory")
            process.kill()
            process.wait()
            assert read(store, woken, names[3:], [3, 4, 5]) == [False] * 3
            assert not store.find(names) and store.fault_of("a") is not None
            store.detach("a")
            store.check_integrity()
        gc.collect()
        assert not maps_another(), "its memory is given back"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_memory_of_an_engine_that_ends_unused_is_given_back(memory: FakeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_store, "RENEW_SECONDS", 0.02)
    engine = Prefill(is_shared=True)
    with stored(memory) as (store, woken):
        lease = engine.lease(2)
        names = store.attach("a", engine.target, lease.number).result(60)
        woken.until(lambda: len(store.find(names)) == 2)
        assert read(store, woken, names, [0, 1]) == [True] * 2
        store.detach("a")
        woken.until(lambda: lease.is_over)
        time.sleep(0.1)
        assert maps_another(), "the next request needs it"
        engine.close()
        woken.until(lambda: not maps_another())


def maps_another() -> bool:
    """Whether this process maps memory of another to read it."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return any("memfd:test" in line and " r--s " in line for line in lines)

"""The server of a prefill engine, against a decode engine and against strangers."""

import gc
import os
import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from jaxllm.errors import ConfigError
from jaxllm.framing import WireError, frame
from jaxllm.kv_tiers.peers import messages, server
from jaxllm.kv_tiers.peers.channel import Channel
from jaxllm.kv_tiers.peers.client import Connection, RefusedError
from jaxllm.kv_tiers.peers.messages import Attach, Code, Done, Hello, Map, Proof, Pull, Renew
from tests.helpers.waiting import wait_until
from tests.kv_tiers.fake_memory import BLOCK_BYTES, SLOT_BYTES, FakeMemory, Prefill, connected, identity, names_of, prefill


@pytest.fixture(autouse=True)
def nothing_leaks(little_to_collect: None) -> Iterator[None]:
    """No thread of a server and no descriptor is left."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("kv-")])
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.fixture(autouse=True)
def nothing_ends_by_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is closed is closed for another reason, however long a test waits or a busy machine takes."""
    monkeypatch.setattr(server, "FIRST_SECONDS", 600.0)
    monkeypatch.setattr(server, "SILENCE_SECONDS", 600.0)


@pytest.fixture
def memory() -> Iterator[FakeMemory]:
    made = FakeMemory(8)
    yield made
    made.close()


@pytest.mark.parametrize("is_shared", [False, True], ids=["tcp", "shared memory"])
@pytest.mark.parametrize("token", [b"", b"secret"], ids=["no token", "token"])
def test_contents_come_with_their_checksums(memory: FakeMemory, is_shared: bool, token: bytes) -> None:
    with prefill(is_shared=is_shared, token=token) as engine:
        lease = engine.lease(6, stored=[0, 1, 2, 4])
        engine.leases.note(lease, (), lost={lease.names[3], lease.names[5]})
        with connected(engine, memory, token=token) as connection:
            assert connection._channel.is_local == is_shared
            assert connection.attach(lease.number).names == lease.names
            wanted = [lease.names[index] for index in (4, 0, 3, 2)]
            assert connection.pull(lease.number, wanted, [7, 6, 5, 4]) == [True, True, False, True]
            for slot, source in ((7, 4), (6, 0), (4, 2)):
                assert memory.content(slot) == engine.memory.content(source)
            assert connection.pull(lease.number, [lease.names[index] for index in (0, 1, 2, 4)], [1, 2, 3, 4]) == [True] * 4
            for slot, source in ((1, 0), (2, 1), (3, 2), (4, 4)):  # the first three are neighbours here and there
                assert memory.content(slot) == engine.memory.content(source)
            assert connection.pull(lease.number, [b"of another prompt"], [0]) == [False]
            connection.renew([lease.number])
            connection.end(lease.number)
            wait_until(lambda: lease.is_over)
            assert connection.pull(lease.number, lease.names[:2], [0, 1]) == [False, False]
            with pytest.raises(RefusedError, match="there is no such lease"):
                connection.attach(lease.number)
            connection.renew([])  # the connection is still of use
            assert connection.pull("of another engine", lease.names[:2], [0, 1]) == [False, False]


@pytest.mark.parametrize("first", [-1, 7, 8, 2**50], ids=["before", "the second behind", "behind", "far behind"])
def test_nothing_is_read_outside_of_the_memory_that_is_shared(
    memory: FakeMemory, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with prefill(is_shared=True) as engine:
        lease = engine.lease(2)
        monkeypatch.setattr(engine.memory, "offset", lambda slot: (first + slot) * SLOT_BYTES)
        with connected(engine, memory) as connection:
            connection.attach(lease.number)
            before = [memory.content(slot) for slot in range(8)]
            with pytest.raises(WireError, match="outside of the memory"):
                connection.pull(lease.number, lease.names, [3, 4])
        assert [memory.content(slot) for slot in range(8)] == before


def test_a_lease_ends_after_its_connection(memory: FakeMemory) -> None:
    with prefill() as engine:
        lease = engine.lease()
        with connected(engine, memory) as connection:
            connection.attach(lease.number)
            before = lease.expires_at
        wait_until(lambda: lease.expires_at < before)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"token": b"other"}, "different tokens"),
        ({"facts": {"model": "two"}}, "they differ in model: one and two"),
        ({"block_bytes": 999}, "they differ in bytes of a block: 1000 and 999"),
    ],
    ids=str,
)
def test_engines_that_differ_are_refused(memory: FakeMemory, options: dict[str, Any], text: str) -> None:
    with prefill() as engine, pytest.raises(RefusedError, match=text), connected(engine, memory, **options):
        pass


def test_a_prefill_engine_with_other_weights_is_compared_anew(memory: FakeMemory) -> None:
    facts = {"model": "one"}
    with prefill(facts=lambda: dict(facts)) as engine:
        lease = engine.lease()
        with connected(engine, memory) as connection:
            assert connection.pull(lease.number, lease.names, range(4)) == [True] * 4
            facts["model"] = "two"
            engine.server.reset()
            with pytest.raises(WireError):
                connection.attach(lease.number)
        with pytest.raises(RefusedError, match="differ in model: two and one"), connected(engine, memory):
            pass


def test_facts_that_cannot_be_found_close_the_connection(memory: FakeMemory, caplog: pytest.LogCaptureFixture) -> None:
    def find() -> dict[str, str]:
        raise FileNotFoundError("the weights are gone")

    with prefill(facts=find) as engine, pytest.raises(WireError), connected(engine, memory):
        pass
    assert "cannot be compared with this one: the weights are gone" in caplog.text


def test_another_engine_at_the_port_is_refused(memory: FakeMemory) -> None:
    with prefill() as engine:
        target = engine.target.__class__("of before", engine.target.host, engine.target.port)
        with pytest.raises(RefusedError, match="not of before"):
            Connection.to(target, identity(), memory, None, 60)


def dial(engine: Prefill) -> socket.socket:
    return socket.create_connection(("127.0.0.1", engine.target.port), timeout=60)


def is_closed(stream: socket.socket) -> bool:
    """Whether the server closes it, whatever it sends before."""
    try:
        while stream.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


HELLO = Hello(messages.PROTOCOL, "", {"model": "one"}, BLOCK_BYTES, b"n" * 16)
FIRSTS: dict[str, bytes] = {
    "garbage": b"GET / HTTP/1.1\r\n\r\n",
    "4 GiB": struct.pack(">I", 2**32 - 1),
    "more than a stranger may": struct.pack(">I", messages.FIRST_BYTES + 1),
    "no msgpack": struct.pack(">I", 4) + b"\xc1\xc1\xc1\xc1",
    "another message": bytes(frame(Attach("lease"), 1000)),
    "proof first": bytes(frame(Proof(b""), 1000)),
    "wrong types": struct.pack(">I", 9) + b"\x96\xa5hello\x01\x02",
    "nested": struct.pack(">I", 1001) + b"\x91" * 1001,
    "other protocol": bytes(frame(Hello(messages.PROTOCOL + 1, "", {"model": "one"}, BLOCK_BYTES, b""), 1000)),
    "wrong proof": bytes(frame(HELLO, 1000)) + bytes(frame(Proof(b"x" * 32), 1000)),
    "hello twice": bytes(frame(HELLO, 1000)) * 2,
}


@pytest.mark.parametrize("data", FIRSTS.values(), ids=FIRSTS.keys())
def test_strangers_are_closed(memory: FakeMemory, data: bytes) -> None:
    with prefill() as engine:
        lease = engine.lease()
        with dial(engine) as stream:
            stream.sendall(data)
            assert is_closed(stream)
        with connected(engine, memory) as connection:  # others are served
            assert connection.pull(lease.number, lease.names, range(4)) == [True] * 4
        wait_until(lambda: engine.server.num_connections == 0)


def test_silent_strangers_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "FIRST_SECONDS", 0.1)
    with prefill() as engine, dial(engine) as silent, dial(engine) as truncated, dial(engine) as dripping:
        truncated.sendall(bytes(frame(HELLO, 1000))[:-3])
        dripping.sendall(b"\0\0")
        assert is_closed(silent) and is_closed(truncated) and is_closed(dripping)


def test_a_thousand_connections_keep_nobody_out(memory: FakeMemory) -> None:
    with prefill() as engine:
        lease = engine.lease()
        streams = [dial(engine) for _ in range(1000)]
        wait_until(lambda: engine.server.num_connections <= server.MAX_STRANGERS)
        with connected(engine, memory) as connection:
            assert connection.pull(lease.number, lease.names, range(4)) == [True] * 4
        for stream in streams:
            stream.close()
        wait_until(lambda: engine.server.num_connections == 0)


def greet(engine: Prefill) -> Channel:
    """A connection whose handshake is over."""
    channel = Channel(dial(engine), messages.FIRST_OF_PREFILL)
    channel.send(Hello(messages.PROTOCOL, engine.identity.engine_id, {"model": "one"}, BLOCK_BYTES, b"n" * 16), 60)
    hello = channel.receive(60)
    channel.send(Proof(messages.proof("decode", b"", b"n" * 16, hello.nonce)), 60)
    assert isinstance(channel.receive(60), Proof)
    channel.accept(messages.OF_PREFILL)
    return channel


def test_a_proof_cannot_be_sent_back() -> None:
    """A stranger without the token learns nothing from the server that serves as its own proof."""
    with prefill(token=b"secret") as engine:
        channel = Channel(dial(engine), messages.FIRST_OF_PREFILL)
        channel.send(Hello(messages.PROTOCOL, engine.identity.engine_id, {"model": "one"}, BLOCK_BYTES, b"n" * 16), 60)
        hello = channel.receive(60)
        channel.send(Proof(messages.proof("prefill", b"secret", b"n" * 16, hello.nonce)), 60)
        refused = channel.receive(60)
        assert refused.code == Code.TOKEN
        channel.close()


LATERS: dict[str, bytes] = {
    "garbage": b"\0" * 3 + b"\7" + b"garbage",
    "4 GiB": struct.pack(">I", 2**32 - 1),
    "hello again": bytes(frame(HELLO, 1000)),
    "map over TCP": bytes(frame(Map(), 1000)),
    "truncated": bytes(frame(Pull("lease", names_of(3)), 1000))[:-1],
}


@pytest.mark.parametrize("data", LATERS.values(), ids=LATERS.keys())
def test_faults_of_decode_engines_close_their_connection(memory: FakeMemory, data: bytes) -> None:
    with prefill() as engine:
        lease = engine.lease()
        channel = greet(engine)
        channel.send(Attach(lease.number), 60)
        channel.receive(60)
        channel._socket.sendall(data)
        channel._socket.shutdown(socket.SHUT_WR)
        assert is_closed(channel._socket)
        wait_until(lambda: not lease.connections)
        channel.close()
        with connected(engine, memory) as connection:
            assert connection.pull(lease.number, lease.names, range(4)) == [True] * 4


def test_resets_after_each_message(memory: FakeMemory) -> None:
    with prefill() as engine:
        lease = engine.lease()
        steps = [Attach(lease.number), Pull(lease.number, list(lease.names)), Renew([lease.number])]
        for count in range(len(steps) + 1):
            channel = greet(engine)
            for message in steps[:count]:
                channel.send(message, 60)
            channel._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            channel._socket.close()
        wait_until(lambda: engine.server.num_connections == 0 and not lease.connections and not lease.num_readers)
        engine.leases.end(lease.number)
        assert engine.leases.take_ended() == [lease]


def test_a_slow_reader_holds_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BLOCK_SECONDS", 0.2)
    with prefill() as engine:
        lease = engine.lease()
        channel = greet(engine)
        names = list(lease.names) * 10_000  # more than the sockets' buffers hold
        channel.send(Pull(lease.number, names), 60)
        wait_until(lambda: lease.num_readers == 1)
        wait_until(lambda: lease.num_readers == 0)
        channel.close()


def test_a_silent_decode_engine_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SILENCE_SECONDS", 0.1)
    with prefill() as engine:
        lease = engine.lease()
        channel = greet(engine)
        channel.send(Attach(lease.number), 60)
        channel.receive(60)
        assert is_closed(channel._socket)  # half open: this end may be gone without a word
        wait_until(lambda: not lease.connections)
        channel.close()


def test_a_pull_waits_for_what_is_being_stored(memory: FakeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    with prefill() as engine:
        lease = engine.lease(3, stored=[0])
        with connected(engine, memory, seconds=60) as connection:
            timer = threading.Timer(0.1, lambda: engine.leases.note(lease, [(lease.names[1], 5)]))
            timer.start()
            assert connection.pull(lease.number, lease.names[:2], [0, 1]) == [True, True]
            assert memory.content(1) == engine.memory.content(5)
            monkeypatch.setattr(server, "STORE_SECONDS", 0.05)
            assert connection.pull(lease.number, lease.names[2:], [2]) == [False]
            timer.join()


def test_a_server_that_closes_ends_pulls(memory: FakeMemory) -> None:
    engine = Prefill()
    lease = engine.lease(2, stored=[0])
    with connected(engine, memory, seconds=60) as connection:
        closing = threading.Timer(0.1, engine.close)
        closing.start()
        with suppress(WireError):
            assert connection.pull(lease.number, lease.names, [0, 1]) == [True, False]
        closing.join()
        wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("kv-")])
        with pytest.raises(WireError):
            connection.attach(lease.number)


def test_random_bytes(memory: FakeMemory) -> None:
    rng = random.Random(1)
    whole = b"".join(bytes(frame(each, 1000)) for each in (Attach("x"), Pull("x", names_of(2)), Renew(["x"]), Done("x")))
    with prefill() as engine:
        for _ in range(60):
            channel = greet(engine)
            data = bytearray(whole)
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            channel._socket.sendall(data[: rng.randint(1, len(data))])
            channel.close()
        lease = engine.lease()
        with connected(engine, memory) as connection:
            assert connection.pull(lease.number, lease.names, range(4)) == [True] * 4
        wait_until(lambda: engine.server.num_connections == 0)


def test_a_port_that_is_taken_is_named() -> None:
    with prefill() as engine:
        other = server.Server(identity("other"), engine.leases, engine.memory)
        with pytest.raises(
            ConfigError, match=f"kv_host is 127.0.0.1 and kv_port {engine.target.port}, where this engine cannot"
        ):
            other.open("127.0.0.1", engine.target.port)
        with pytest.raises(ConfigError, match="kv_host is 203.0.113.1"):
            other.open("203.0.113.1", 0)
        other.close()


def test_a_name_that_cannot_be_one_is_told() -> None:
    with (
        prefill() as engine,
        pytest.raises(ConfigError, match=r"kv_host is a\.\.b and kv_port 0, where this engine cannot listen"),
    ):
        engine.server.open("a..b", 0)


def test_a_server_without_threads_goes_on(memory: FakeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    with prefill() as engine:
        with monkeypatch.context() as patch:

            def fail(thread: threading.Thread) -> None:
                raise RuntimeError("can't start new thread")

            patch.setattr(threading.Thread, "start", fail)
            with dial(engine) as stream:
                assert is_closed(stream)
        assert not engine.server.num_connections
        with connected(engine, memory) as connection:
            lease = engine.lease()
            assert connection.attach(lease.number).names == lease.names

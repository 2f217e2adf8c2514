"""Messages over real sockets: what subscribers get, what they can ask for again, and what fails."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from jaxllm.errors import ConfigError
from jaxllm.kv_events import publisher as module
from jaxllm.kv_events.messages import Batch
from jaxllm.kv_events.publisher import Publisher
from jaxllm.options.kv_events import KVEventsConfig
from tests.helpers.waiting import wait_until

ANY = "tcp://127.0.0.1:*"
WAIT_MS = 60_000


@contextmanager
def publisher(*, rank: int = 0, encode: Callable[[Batch], bytes] | None = None, **options: Any) -> Iterator[Publisher]:
    """A publisher at free ports, whose payloads are the times of batches."""
    config = KVEventsConfig.of({"endpoint": ANY, "replay_endpoint": ANY, "topic": "kv@pod@model", **options})
    made = Publisher(config, rank)
    made.start(encode or (lambda batch: str(batch.time).encode()))
    try:
        yield made
    finally:
        made.close()


@contextmanager
def peer(kind: int, endpoint: str | None, **options: Any) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(kind) as made:
        made.linger, made.rcvtimeo = 0, WAIT_MS
        for name, value in options.items():
            setattr(made, name, value)
        assert endpoint is not None
        made.connect(endpoint)
        yield made


def batch(number: int) -> Batch:
    return Batch(float(number), ())


def seen_by(subscriber: "zmq.Socket[bytes]", made: Publisher) -> None:
    """Wait until the subscription has arrived, by messages sent until one comes."""
    subscriber.subscribe(b"kv@")
    while not subscriber.poll(20):
        assert made.put(batch(0))
    while subscriber.poll(100):
        subscriber.recv_multipart()


def replayed(client: "zmq.Socket[bytes]", first: int) -> list[list[bytes]]:
    """The answer to a request, without its end."""
    client.send_multipart([b"", first.to_bytes(8, "big")])
    found = []
    while True:
        empty, *frames = client.recv_multipart()
        assert empty == b""
        if frames[1] == b"\xff" * 8:
            assert frames == [b"", b"\xff" * 8, b""]
            return found
        found.append(frames)


def test_a_subscriber_gets_all_in_order_and_asks_for_what_it_missed() -> None:
    with publisher() as made, peer(zmq.SUB, made.endpoint) as subscriber, peer(zmq.DEALER, made.replay_endpoint) as client:
        seen_by(subscriber, made)
        for number in (1, 2, 3):
            assert made.put(batch(number))
        got = [subscriber.recv_multipart() for _ in range(3)]
        assert [frames[0] for frames in got] == [b"kv@pod@model"] * 3
        numbers = [int.from_bytes(frames[1], "big") for frames in got]
        assert numbers == list(range(numbers[0], numbers[0] + 3)) and [frames[2] for frames in got] == [b"1.0", b"2.0", b"3.0"]
        # it lost the second of the three
        assert replayed(client, numbers[1]) == got[1:]
        assert len(replayed(client, 0)) == numbers[2] + 1
        assert replayed(client, numbers[2] + 1) == [] == replayed(client, 2**64 - 1)


def test_only_the_latest_are_kept() -> None:
    with publisher(buffer_steps=2) as made, peer(zmq.DEALER, made.replay_endpoint) as client:
        for number in range(5):
            made.put(batch(number))
        wait_until(lambda: made._next_number == 5)
        assert [frames[2] for frames in replayed(client, 0)] == [b"3.0", b"4.0"]


def test_a_client_of_type_req_gets_the_first_message_of_an_answer() -> None:
    with publisher() as made, peer(zmq.REQ, made.replay_endpoint) as client:
        made.put(batch(7))
        wait_until(lambda: made._next_number == 1)
        client.send((0).to_bytes(8, "big"))
        assert client.recv_multipart() == [b"kv@pod@model", bytes(8), b"7.0"]


@pytest.mark.parametrize(
    "garbage", [[b""], [b"x"], [b"", b"x"], [b"", bytes(9)], [b"y", bytes(8)], [b"", bytes(8), b""], [b"", b"z" * 5000]]
)
def test_garbage_gets_no_answer_and_does_no_harm(garbage: list[bytes]) -> None:
    with publisher() as made, peer(zmq.DEALER, made.replay_endpoint) as client, peer(zmq.DEALER, made.replay_endpoint) as other:
        client.send_multipart(garbage)
        assert replayed(other, 0) == []
        assert not client.poll(20)


def test_a_subscriber_that_never_reads_holds_up_nobody() -> None:
    with (
        publisher(hwm=100, encode=lambda batch: bytes(50_000)) as made,
        peer(zmq.SUB, made.endpoint, rcvhwm=1, rcvbuf=1024) as lazy,
        peer(zmq.SUB, made.endpoint) as subscriber,
    ):
        seen_by(lazy, made)
        seen_by(subscriber, made)
        first = made._next_number
        for number in range(first, first + 250):
            assert made.put(batch(0))
            assert subscriber.recv_multipart()[1] == number.to_bytes(8, "big")
        assert not made.has_lost()
        numbers = []
        while lazy.poll(100):
            numbers.append(int.from_bytes(lazy.recv_multipart()[1], "big"))
        assert numbers == sorted(numbers) and len([number for number in numbers if number >= first]) < 250


def test_a_full_queue_takes_nothing() -> None:
    blocked: list[bool] = [True]

    def encode(batch: Batch) -> bytes:
        wait_until(lambda: not blocked[0])
        return b""

    with publisher(max_queue_size=2, encode=encode) as made:
        assert made.put(batch(0))
        wait_until(lambda: not made._queue)
        assert made.put(batch(1)) and made.put(batch(2))
        assert not made.has_room() and not made.put(batch(3))
        blocked[0] = False
        wait_until(lambda: made._next_number == 3)
        assert made.has_room()


def test_a_batch_that_cannot_be_sent_is_reported_and_followed_by_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.0)
    with publisher(encode=lambda batch: str(1 / batch.time).encode()) as made:
        for each in (batch(0), batch(1), batch(2)._replace(is_whole=True)):
            assert made.put(each)
        wait_until(lambda: made._next_number == 1)
        assert made._kept[0] == (0, b"0.5"), "changes after those that were lost are not sent"
        assert made.has_lost() and not made.has_lost()


def test_a_port_that_is_taken_is_an_error_and_leaves_no_socket_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REUSE_SECONDS", 0.01)
    with socket.socket() as other, socket.socket() as free:
        other.bind(("127.0.0.1", 0))
        other.listen()
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        taken = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        config = KVEventsConfig.of({"endpoint": f"tcp://*:{port}", "replay_endpoint": taken})
        with pytest.raises(ConfigError, match=f"kv_events_config.replay_endpoint is '{taken}', which another process uses"):
            Publisher(config, 0)
        wait_until(lambda: can_listen(port))


def can_listen(port: int) -> bool:
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            own.bind(("0.0.0.0", port))
        except OSError:
            return False
        return True


@pytest.mark.parametrize("endpoint", ["tcp://*nowhere:5557", "ipc:///no/such/folder/x", "tcp://no host:5557"])
def test_an_address_that_cannot_be_used_is_an_error(endpoint: str) -> None:
    with pytest.raises(
        ConfigError, match=r"kv_events_config.endpoint is .* which cannot be (listened at|connected to) \(.+\); choose"
    ):
        Publisher(KVEventsConfig.of({"endpoint": endpoint}), 0)


def test_an_address_of_one_host_is_connected_to() -> None:
    """As in vLLM: a collector listens, and engines come and go."""
    with zmq.Context() as context, context.socket(zmq.SUB) as collector:
        collector.linger, collector.rcvtimeo = 0, WAIT_MS
        port = collector.bind_to_random_port("tcp://127.0.0.1")
        with publisher(endpoint=f"tcp://127.0.0.1:{port - 1}", replay_endpoint=None, rank=1) as made:
            assert made.replay_endpoint is None
            seen_by(collector, made)


def test_what_is_queued_is_sent_before_the_end() -> None:
    with publisher() as made, peer(zmq.SUB, made.endpoint) as subscriber:
        seen_by(subscriber, made)
        for number in range(100):
            made.put(batch(number))
        made.close()
        assert [subscriber.recv_multipart()[2] for _ in range(100)][-1] == b"99.0"
        assert not made.put(batch(0)), "it is closed"


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
        return True


@pytest.mark.skipif(not (socket.has_ipv6 and has_ipv6()), reason="this machine has no IPv6")
@pytest.mark.parametrize("address", ["[::1]", "[::ffff:127.0.0.1]"])
def test_one_address_is_listened_at_in_the_form_of_ipv6(address: str) -> None:
    with publisher(endpoint=f"tcp://{address}:0") as made, peer(zmq.SUB, made.endpoint, ipv6=True) as subscriber:
        seen_by(subscriber, made)


def test_an_engine_can_follow_another_at_once() -> None:
    for _ in range(3):
        with publisher(endpoint="tcp://127.0.0.1:*", replay_endpoint=None) as made:
            port = int(made.endpoint.rpartition(":")[2])
        again = {"endpoint": f"tcp://*:{port}", "replay_endpoint": None}
        with publisher(**again):
            pass
        with publisher(**again) as made, peer(zmq.SUB, f"tcp://127.0.0.1:{port}") as subscriber:
            seen_by(subscriber, made)

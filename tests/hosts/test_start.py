"""The start of several hosts: who is refused, and what is said of hosts that do not come. No JAX devices are used."""

import contextlib
import os
import queue
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import msgspec
import numpy as np
import pytest

from jaxllm import env, framing
from jaxllm.config import EngineConfig
from jaxllm.device_ops import EncodeItem, UseItem
from jaxllm.engine import messages
from jaxllm.engine.core import EngineCore
from jaxllm.engine.launch import environment_without_secrets
from jaxllm.errors import ConfigError, EngineDeadError, ModelLoadError
from jaxllm.framing import WireError
from jaxllm.hosts import handshake, identity, process_group, reception, wire, with_ray
from jaxllm.hosts.connection import Connection
from jaxllm.hosts.executor import message_of
from jaxllm.hosts.follower import Member
from jaxllm.hosts.leader import Leader
from jaxllm.options.quantization import QUANTIZATION_FILES
from jaxllm.parallel import across_hosts
from jaxllm.ranks_plan import RanksPlan
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler_output import NewRequestData, RowStep, SchedulerOutput
from tests.helpers.ports import free_port
from tests.helpers.waiting import wait_until
from tests.hosts.conftest import FOUND, STRANGERS, config, reset

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.mark.parametrize(
    ("name", "value"), [("jaxllm version", "2"), ("jax version", "0.11"), ("Python version", "3.12"), ("block_size", "32")]
)
def test_a_host_that_differs_is_refused_with_both_values(together, name, value):
    for future in together((1, {**FOUND, name: value})):
        with pytest.raises(ConfigError, match=f"{name} is {FOUND[name]} on host 0 and {value} on host 1") as raised:
            future.result(60)
        assert "host 1 (" in str(raised.value)


def test_two_hosts_of_one_rank_are_named(together):
    first, *others = together((1, FOUND), (1, FOUND), nnodes=3, tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="two hosts have node_rank 1"):
        first.result(60)
    for other in others:
        with pytest.raises(ConfigError, match="two hosts have node_rank 1"):
            other.result(60)


def test_hosts_that_do_not_come_are_named():
    leader = config(0, free_port(), nnodes=3, tensor_parallel_size=3, distributed_timeout_seconds=1)
    member = config(1, free_port(), distributed_timeout_seconds=1)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(Leader.of, leader, FOUND), pool.submit(Member.of, member, FOUND)]
        with pytest.raises(ConfigError, match=r"within 1 s \(--distributed-timeout-seconds\): 1, 2; start each"):
            waiting[0].result(60)
        with pytest.raises(ConfigError, match="host 0 does not answer at 127.0.0.1, port [0-9]+, after 1 s"):
            waiting[1].result(60)


def test_a_port_that_is_taken_and_an_address_of_another_machine_are_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is taken .* another --master-port"):
            Leader.of(config(0, port), FOUND)
    for address in ("192.0.2.1", "nowhere.invalid"):
        with pytest.raises(ConfigError, match="give an address of this machine"):
            Leader.of(config(0, port, master_addr=address), FOUND)


def test_strangers_at_the_port_do_not_disturb_the_start(together):
    held = []

    def knock(port: int) -> None:
        for data in STRANGERS:
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(data)
        reset(port)
        for data in (b"", b"\0", b"\0\0\1\0half"):  # these stay, and say no more
            held.append(socket.create_connection(("127.0.0.1", port)))
            held[-1].sendall(data)

    real = Connection.send

    def send(self, message):
        if isinstance(message, handshake.Hello) and not held:
            knock(self._socket.getpeername()[1])
        real(self, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "send", send)
        leader, member = (future.result(60) for future in together((1, FOUND)))
    number, answered = leader.new_call()
    member.send(wire.Done(number))
    leader.wait_for(answered)
    assert answered.exception() is None
    for stranger in held:
        with stranger, contextlib.suppress(ConnectionResetError):
            stranger.settimeout(60)
            while stranger.recv(100):  # a challenge, and then the end
                pass


@contextlib.contextmanager
def open_reception(take=lambda arrival: None):
    """The port of host 0, with its number."""
    port = free_port()
    found = reception.Reception(config(0, port).parallel, FOUND, take)
    found.open()
    try:
        yield port
    finally:
        found.close()


def test_a_stranger_who_says_hello_byte_by_byte_has_one_deadline(monkeypatch):
    monkeypatch.setattr(handshake, "FIRST_SECONDS", 0.3)
    with open_reception() as port, socket.create_connection(("127.0.0.1", port)) as slow:
        began = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT011
            for byte in (1000).to_bytes(4, "big") + bytes(1000):
                slow.sendall(bytes([byte]))
                time.sleep(0.05)
        assert time.monotonic() - began < 30, "each byte gave it more time"


def test_strangers_are_told_in_the_log_and_the_oldest_of_too_many_goes(monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(reception.logger, "warning", lambda text, *values: told.append(text % values))
    monkeypatch.setattr(reception, "MAX_STRANGERS", 0)
    monkeypatch.setattr(handshake, "FIRST_SECONDS", 60)
    arrivals: queue.SimpleQueue[object] = queue.SimpleQueue()
    with open_reception(arrivals.put) as port, contextlib.ExitStack() as stack:
        for data in STRANGERS:
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(data)
        reset(port)
        wait_until(lambda: len(told) == len(STRANGERS) + 1, "each gets a line in the log")
        assert all(text.startswith("a connection from 127.0.0.1 is no host's: ") for text in told)
        first, *_, last = (stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)) for _ in range(4))
        while first.recv(100):  # a challenge, and then the end
            pass
        host = Connection(last, handshake.FROM_HOST_0)
        host.send(handshake.hello(1, FOUND, b"nonce", host.receive(60)))
        assert isinstance(host.receive(60), handshake.Welcome)
        arrival = arrivals.get(timeout=60)
        assert isinstance(arrival, reception.Arrival) and arrival.rank == 1


@pytest.mark.parametrize(
    "introduction",
    [
        (2, "host", FOUND),  # the form of version 4
        ({"any": "form"},),
    ],
)
def test_a_host_of_another_version_is_refused_whatever_else_it_says(introduction):
    arrivals: queue.SimpleQueue[object] = queue.SimpleQueue()
    with open_reception(arrivals.put) as port, socket.create_connection(("127.0.0.1", port)) as stream:
        host = Connection(stream, handshake.FROM_HOST_0)
        host.receive(60)
        body = msgspec.msgpack.encode(("hello", 4, *introduction))
        stream.sendall(len(body).to_bytes(4, "big") + body)
        fault = f"version 4 of the hosts' protocol, host 0 version {handshake.PROTOCOL}; install the same jaxllm"
        assert fault in host.receive(60).reason
        assert fault in str(arrivals.get(timeout=60))


def test_a_host_without_the_token_is_refused_and_the_start_goes_on(monkeypatch):
    monkeypatch.setenv(env.HOSTS_TOKEN, "secret")
    arrivals: queue.SimpleQueue[object] = queue.SimpleQueue()
    with open_reception(arrivals.put) as port:
        with socket.create_connection(("127.0.0.1", port)) as stream:
            stranger = Connection(stream, handshake.FROM_HOST_0)
            stranger.receive(60)
            stranger.send(handshake.hello(1, FOUND, b"nonce", handshake.Challenge(b"of another connection")))
            assert "has another token than host 0" in stranger.receive(60).reason
        host = handshake.connect(config(1, port).parallel, FOUND)
        assert isinstance(arrivals.get(timeout=60), reception.Arrival)
        host.close()


def test_the_token_reaches_engine_processes_and_no_actor_of_ray(monkeypatch):
    monkeypatch.setenv(env.HOSTS_TOKEN, "secret")
    assert environment_without_secrets(os.environ)[env.HOSTS_TOKEN] == "secret"
    assert env.HOSTS_TOKEN not in with_ray._environment()


def test_facts_that_differ_and_errors_of_a_host_reach_all(together):
    leader, member = (future.result(60) for future in together((1, FOUND)))
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(member.agree, "prepared", {"device": "B", "same": 1})
        with pytest.raises(ConfigError, match="device is A on host 0 and B on host 1"):
            leader.agree("prepared", {"device": "A", "same": 1})
        with pytest.raises(ConfigError, match="device is A on host 0 and B on host 1"):
            other.result(60)
    with pytest.raises(ModelLoadError), member.reported():
        raise ModelLoadError("the file is gone")
    with pytest.raises(EngineDeadError, match=r"host 1 \(.*\) failed: the file is gone"):
        leader.exchange("loaded", {})


def test_calls_are_answered_or_raise_the_error_of_a_host(together):
    leader, member = (future.result(60) for future in together((1, FOUND)))
    for fault in (None, messages.fault_of(ModelLoadError("gone"))):
        number, answered = leader.new_call()
        leader.send(wire.Do(number, "memory", ["restore", "weights"]))
        assert member.calls.get(timeout=60) == wire.Do(number, "memory", ["restore", "weights"])
        member.send(wire.Done(number, fault))
        leader.wait_for(answered)
        assert (fault is None) == (answered.exception() is None)
    assert "host 1 (" in str(answered.exception()) and "gone" in str(answered.exception())
    told = threading.Event()
    leader.tell_when_lost(told.set)
    member._has_ended = True
    member._connection.close()
    assert told.wait(60)
    with pytest.raises(EngineDeadError, match=r"host 1 \(.*\) is lost"):
        leader.check()


def test_a_shorter_limit_holds_for_a_message_that_is_waited_for_already():
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()[:2]):
        connection = Connection(listening.accept()[0], wire.FROM_FOLLOWER)
        connection.limit(60)
        with ThreadPoolExecutor(1) as pool:
            receiving = pool.submit(connection.receive)
            time.sleep(0.1)
            connection.limit(0.1)
            with pytest.raises(WireError, match=r"nothing was heard for 0.1 s"):
                receiving.result(60)
        connection.close()


@pytest.mark.parametrize("they_leave", [True, False])
def test_a_process_ends_after_it_has_left_the_others_who_may_let_it_wait(monkeypatch, they_leave):
    others_left, ends = threading.Event(), []
    monkeypatch.setattr(jax.distributed, "shutdown", others_left.wait)
    monkeypatch.setattr(process_group, "_LEAVE_SECONDS", 0.01)
    monkeypatch.setattr(process_group, "_LEAVE_AT_EXIT_SECONDS", 30 if they_leave else 0.01)
    monkeypatch.setattr(process_group, "_leaving", None)
    monkeypatch.setattr(process_group, "end_process", ends.append)
    process_group.leave()
    if they_leave:
        threading.Timer(0.2, others_left.set).start()
    process_group._at_exit()
    assert ends == ([] if they_leave else [process_group.EXIT_FAILED])
    others_left.set()


def test_a_plan_reads_the_same_on_the_other_host():
    params = SamplingParams(seed=3, logit_bias={5: 1.5}, stop_token_ids=[7], temperature=0.5)
    new = NewRequestData("a", [1, 2, 3], 3, params, (2,), [4, 5], 0, 0, is_masked=True)
    plan = SchedulerOutput([new], [RowStep("b", np.int64(4), 1, 0, []), RowStep("a", 0, 3, 0, [4, 5])], 4, ["c"], [], 9, ("a",))
    incoming = framing.Incoming(wire.FROM_HOST_0)
    for byte in framing.frame(wire.Dispatch(plan), wire.MAX_MESSAGE_BYTES):
        assert incoming.num_wanted
        message = incoming.take(bytes([byte]))
    assert message.plan == plan


def test_the_operations_of_ranks_reach_the_other_host_once():
    encode, use = EncodeItem(0, b"content", [3, 4]), UseItem(0, "a", 5, [3, 4])
    idle, busy = (
        SchedulerOutput([], [], 0, [], []),
        SchedulerOutput([], [RowStep("a", 0, 3, 0, [1])], 3, [], [], ops=(encode, use)),
    )
    plan = RanksPlan.of([idle, busy], 7)
    assert plan.ops == (EncodeItem(1, b"content", [3, 4]), UseItem(1, "a", 5, [3, 4]))
    data = framing.frame(message_of(plan), wire.MAX_MESSAGE_BYTES)
    assert data.count(b"content") == 1
    incoming = framing.Incoming(wire.FROM_HOST_0)
    assert incoming.take(data[: incoming.num_wanted]) is None
    message = incoming.take(data[-incoming.num_wanted :])
    assert message.ops == plan.ops and [rank.rows for rank in message.ranks] == [[], busy.rows]


def test_a_message_that_is_too_long_is_neither_sent_nor_read():
    accepted = framing.Accepted(framing.Beat | wire.End, 100)
    with pytest.raises(WireError, match=r"a End of 10[0-9]+ bytes is too long for other hosts \(at most 100\)"):
        framing.frame(wire.End("x" * 1000), 100)
    with pytest.raises(WireError, match="a message of 101 bytes was announced, at most 100 are allowed"):
        framing.Incoming(accepted).take((101).to_bytes(4, "big"))


def test_a_host_with_too_few_devices_is_named(monkeypatch):
    devices = [[SimpleNamespace(device_kind="cpu")] * 2, [SimpleNamespace(device_kind="cpu")]]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "local_devices", lambda host: devices[host])
    assert len(across_hosts.devices_for(2)) == 2
    with pytest.raises(ConfigError, match=r"host 1 has 1 device \(cpu\), but 4 devices on 2 hosts are 2 on each"):
        across_hosts.devices_for(4)


def test_a_host_above_0_has_no_engine_core():
    with pytest.raises(ConfigError, match="node_rank is 1: hosts above 0 take no requests; start this one with `jaxllm serve"):
        EngineCore(config(1, 29501))


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"node_rank": 2}, "node_rank is 2, must be below nnodes, 2"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size is 3, which 2 hosts"),
        ({"master_port": 0}, "master_port is 0, must be 1 to 65535"),
        ({"compiled_artifact": "a"}, "programs for several hosts cannot be stored"),
        (
            {"data_parallel_size": 2, "enable_expert_parallel": True, "nnodes": 4},
            "data_parallel_size is 2, which 4 hosts .* and ranks lie whole on a host; choose a multiple of 4",
        ),
        (
            {"pipeline_parallel_size": 3},
            "pipeline_parallel_size is 3 with nnodes 2, but each host has whole stages.*choose one that",
        ),
        (
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 3, "nnodes": 4},
            "which the 2 hosts of a stage cannot share equally",
        ),
        (
            {"pipeline_parallel_size": 2, "expert_load": True},
            "expert_load is set and pipeline_parallel_size is 2 with nnodes 2, but",
        ),
    ],
)
def test_impossible_options_are_named(options, fault):
    with pytest.raises(ConfigError, match=fault):
        EngineConfig.from_options(**{"nnodes": 2, "tensor_parallel_size": 2, **options})


def test_paths_may_differ_between_hosts_and_nothing_else(tmp_path):
    here = identity.identity(config(0, 1), tmp_path)
    there = identity.identity(config(1, 2, tokenizer="/elsewhere", use_progress_bar=False), tmp_path)
    assert identity.difference(["host 0", "host 1"], [here, there]) is None
    other = identity.identity(config(1, 2, max_num_seqs=3), tmp_path)
    assert identity.difference(["host 0", "host 1"], [here, other]) == "max_num_seqs is None on host 0 and 3 on host 1"


@pytest.mark.parametrize("file", ["config.json", *QUANTIZATION_FILES])
def test_hosts_have_one_description_of_the_model(tmp_path, file):
    found = []
    for host in range(2):
        (tmp_path / str(host)).mkdir()
        (tmp_path / str(host) / file).write_text(f'{{"bits": {4 * (host + 1)}}}')
        found.append(identity.identity(config(0, 1), tmp_path / str(host)))
    assert f"the model's {file} is " in identity.difference(["host 0", "host 1"], found)

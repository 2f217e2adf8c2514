"""Replicas on several hosts, without processes: who may take part, and messages between API servers and remote engines."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq

from jaxllm import env, framing, gpus
from jaxllm.config import EngineConfig
from jaxllm.engine import messages
from jaxllm.engine.client import EngineClient
from jaxllm.engine.sockets import ENGINE_SOCKET, socket_address
from jaxllm.errors import ConfigError, EngineDeadError
from jaxllm.framing import ClosedError
from jaxllm.hosts import handshake, reception
from jaxllm.hosts.connection import Connection
from jaxllm.llm import LLM
from jaxllm.replicas import devices
from jaxllm.replicas.hosts import link as links
from jaxllm.replicas.hosts import local_engines, remote_engines, wire
from jaxllm.replicas.hosts.identity import identity
from jaxllm.replicas.hosts.link import Link
from jaxllm.replicas.hosts.remote_engines import RemoteEngines
from jaxllm.request import EngineCoreRequest
from jaxllm.sampling_params import SamplingParams
from tests.helpers.ports import free_port
from tests.hosts.conftest import STRANGERS, reset

FOUND = {"jaxllm version": "1", "max_num_seqs": "8"}


def config(rank: int = 0, **options: Any) -> EngineConfig:
    given = {"nnodes": 2, "data_parallel_size": 2, "distributed_timeout_seconds": 60, "node_rank": rank, **options}
    return EngineConfig.from_options(model="demo", **given)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


async def connect(config: EngineConfig, found: dict[str, str]) -> Link:
    connection = await asyncio.to_thread(handshake.connect, config.parallel, found)
    return await Link.of(connection, wire.FROM_HOST_0)


@contextlib.asynccontextmanager
async def host_0(directory: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> "AsyncIterator[RemoteEngines]":
    monkeypatch.setattr(remote_engines, "identity", lambda config: FOUND)
    remote = RemoteEngines(config(**options), directory, index=1)
    await remote.start()
    try:
        yield remote
    finally:
        await remote.end("")


@pytest.mark.parametrize(
    ("rank", "found", "token", "fault"),
    [
        (
            1,
            {**FOUND, "jaxllm version": "2"},
            "",
            r"host 1 \(.*\) differs from host 0: jaxllm version is 1 on host 0 and 2 on host 1",
        ),
        (1, {**FOUND, "max_num_seqs": "9"}, "", "max_num_seqs is 8 on host 0 and 9 on host 1"),
        (2, FOUND, "", "has node_rank 2, there are 1 to 1"),
        (1, FOUND, "secret", "set the same JAXLLM_HOSTS_TOKEN on all hosts"),
    ],
)
def test_a_host_that_may_not_take_part_is_told_why_and_fails_the_start(tmp_path, monkeypatch, rank, found, token, fault):
    async def work() -> None:
        port = free_port()
        async with host_0(tmp_path, monkeypatch, master_port=port) as remote:
            tokens = iter([token.encode()])  # of host 1, which proves it first
            monkeypatch.setattr(handshake, "token", lambda: next(tokens, b""))
            with pytest.raises(ConfigError, match=f"host 0 refuses this host: .*{fault}"):
                await connect(config(rank, master_port=port, nnodes=max(2, rank + 1), data_parallel_size=6), found)
            with pytest.raises(EngineDeadError, match=fault):
                await remote.ready()

    run(work())


def test_the_same_token_lets_a_host_in_once(tmp_path, monkeypatch):
    monkeypatch.setenv(env.HOSTS_TOKEN, "secret")

    async def work() -> None:
        port = free_port()
        async with host_0(tmp_path, monkeypatch, master_port=port) as remote:
            link = await connect(config(1, master_port=port), FOUND)
            while not remote.has_hosts:
                await asyncio.sleep(0.01)
            with pytest.raises(ConfigError, match="two hosts have node_rank 1"):
                await connect(config(1, master_port=port), FOUND)
            await link.close()

    run(work())


def test_who_knows_no_token_is_no_host_0_either():
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as thread:
        connecting = thread.submit(handshake.connect, config(1, master_port=listening.getsockname()[1]).parallel, FOUND)
        impostor = Connection(listening.accept()[0], handshake.FROM_OTHER)
        impostor.send(handshake.Challenge(b"nonce"))
        assert handshake.introduction_of(impostor.receive(60)).rank == 1
        impostor.send(handshake.Welcome(b"guess"))
        with pytest.raises(ConfigError, match="does not know this host's token"):
            connecting.result(60)
        impostor.close()


@pytest.mark.slow
def test_hosts_that_do_not_come_are_named(tmp_path, monkeypatch):
    async def work() -> None:
        options = {"master_port": free_port(), "distributed_timeout_seconds": 1}
        async with host_0(tmp_path, monkeypatch, nnodes=3, data_parallel_size=3, **options) as remote:
            with pytest.raises(EngineDeadError, match=r"within 1 s \(--distributed-timeout-seconds\): 1, 2; start each"):
                await remote.ready()
        with pytest.raises(ConfigError, match="host 0 does not answer at 127.0.0.1, port [0-9]+, after 1 s"):
            await connect(config(1, **options), FOUND)

    run(work())


def test_a_port_that_is_taken_is_named(tmp_path, monkeypatch):
    async def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is taken .* another --master-port"):
                async with host_0(tmp_path, monkeypatch, master_port=port):
                    pass

    run(work())


def test_strangers_do_not_disturb_and_messages_arrive_whole_until_an_engine_or_the_host_ends(tmp_path, monkeypatch):
    """An engine of plain sockets on host 1, and a client on host 0."""
    there = tmp_path / "there"
    there.mkdir()

    async def work() -> None:
        port = free_port()
        async with host_0(tmp_path, monkeypatch, master_port=port) as remote:
            monkeypatch.setattr(reception, "MAX_STRANGERS", len(STRANGERS))
            for data in STRANGERS:
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(data)
            reset(port)
            silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(len(STRANGERS) + 3)]
            link = await connect(config(1, master_port=port), FOUND)
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            engine = context.socket(zmq.PULL)
            engine.bind(socket_address(there, ENGINE_SOCKET))
            local = local_engines.LocalEngines(link, {1: there})
            carrying = asyncio.create_task(local.run())

            async def received(kind: type) -> Any:
                while True:
                    while not engine.poll(0):
                        await asyncio.sleep(0.005)
                    if isinstance(message := messages.decode_client_message(engine.recv()), kind):
                        return message

            client = EngineClient(remote.directories[1], None)
            hello = await received(messages.Hello)
            assert hello == messages.Hello(client.name, os.getpid())
            to_client = context.socket(zmq.PUSH)
            to_client.connect(socket_address(there, client.name))
            to_client.send(messages.encode(messages.Status("idle", 0.0)))
            while client.status is None:
                await asyncio.sleep(0.005)

            prompt = list(range(1_500_000))  # some MB: several parts
            client.add(EngineCoreRequest(request_id="r", prompt_token_ids=prompt, sampling_params=SamplingParams(seed=1)))
            assert (await received(messages.Add)).request.prompt_token_ids == prompt
            refusals: list[messages.Refused] = []
            client.on_refused = refusals.append
            text = "x" * 3_000_000
            to_client.send(messages.encode(messages.Refused("r", messages.Fault("engine", text))))
            while not refusals:
                await asyncio.sleep(0.005)
            to_client.send(messages.encode(messages.Refused("last", messages.Fault("engine", ""))))
            # It has arrived, and is not read yet.
            assert local._engines[1]._inboxes[client.name]._socket.poll(60_000)
            local.engine_ended(1, "the engine process has ended (signal 9)")
            while client.dead_error is None:
                await asyncio.sleep(0.005)
            assert [len(refusal.fault.message) for refusal in refusals] == [len(text), 0]
            assert "signal 9" in str(client.dead_error)
            client.close()

            client = EngineClient(remote.directories[1], None)
            while (await received(messages.Hello)).client != client.name:
                pass
            carrying.cancel()
            await link.close()
            while client.dead_error is None:
                await asyncio.sleep(0.005)
            assert "host 1 (" in str(client.dead_error) and "is lost" in str(client.dead_error)
            client.close()
            await local.close()
            context.destroy(linger=0)
            for stranger in silent:
                stranger.close()

    run(work())


@pytest.mark.slow
def test_only_who_knows_the_token_can_fail_a_start_with_one(tmp_path, monkeypatch):
    async def work() -> None:
        options = {"master_port": free_port(), "distributed_timeout_seconds": 2}
        async with host_0(tmp_path, monkeypatch, **options) as remote:
            for protocol, fault in ((99, "speaks version 99"), (handshake.PROTOCOL, "has another token")):
                with socket.create_connection(("127.0.0.1", options["master_port"])) as stream:
                    stranger = Connection(stream, handshake.FROM_HOST_0)
                    await asyncio.to_thread(stranger.receive, 60)
                    hello = handshake.hello(1, FOUND, b"nonce", handshake.Challenge(b"another"))
                    stranger.send(handshake.Hello(protocol, hello.introduction))
                    assert fault in (await asyncio.to_thread(stranger.receive, 60)).reason
            assert not remote._fault.done()
            with pytest.raises(EngineDeadError, match="did not connect .* has another token than host 0"):
                await remote.ready()

    monkeypatch.setenv(env.HOSTS_TOKEN, "secret")
    run(work())


def test_a_host_that_is_silent_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(links, "SILENCE_SECONDS", 0.3)
    monkeypatch.setattr(links, "BEAT_SECONDS", 0.1)

    async def work() -> None:
        port = free_port()
        async with host_0(tmp_path, monkeypatch, master_port=port) as remote:
            silent = await asyncio.to_thread(handshake.connect, config(1, master_port=port).parallel, FOUND)
            with pytest.raises(EngineDeadError, match=r"host 1 \(.*\) is lost: it was silent for"):
                await remote.ready()
            silent.close()

    run(work())


def test_a_message_that_arrives_slowly_is_no_silence(monkeypatch):
    monkeypatch.setattr(links, "SILENCE_SECONDS", 0.5)  # which a machine with much to do does not let pass between two bytes
    monkeypatch.setattr(links, "BEAT_SECONDS", 0.05)

    async def trickle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = framing.frame(wire.Failed("x" * 8), 100)
        for byte in data:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.75 / len(data))
        await asyncio.Event().wait()

    async def work() -> None:
        server = await asyncio.start_server(trickle, "127.0.0.1", 0)
        link = Link(*await asyncio.open_connection(*server.sockets[0].getsockname()), wire.FROM_OTHER)
        assert (await link.receive()).reason == "x" * 8  # after 0.75 s
        with pytest.raises(ClosedError, match="it was silent for"):
            await link.receive()
        await link.close()
        server.close()

    run(work())


def test_a_client_that_fetches_nothing_is_dropped_and_holds_nobody_up(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxllm.engine.sockets.MAX_QUEUED_MESSAGES", 4)

    async def work() -> None:
        port = free_port()
        async with host_0(tmp_path, monkeypatch, master_port=port) as remote:
            link = await connect(config(1, master_port=port), FOUND)
            while not remote.has_hosts:
                await asyncio.sleep(0.01)
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            name, directory = f"client-0-{'0' * 16}", remote.directories[1]
            client, to_engine = context.socket(zmq.PULL), context.socket(zmq.PUSH)
            client.rcvhwm = 4
            client.bind(socket_address(directory, name))
            to_engine.connect(socket_address(directory, ENGINE_SOCKET))
            to_engine.send(messages.encode(messages.Hello(name, os.getpid())))
            assert await link.receive() == wire.Greet(1, name)
            status = messages.encode(messages.Status("idle", 0.0, "x" * 100_000))
            for _ in range(200):  # more than the sockets' buffers hold
                link.send(wire.Frame(1, name, status))
            assert await link.receive() == wire.Leave(1, name)
            last = None
            while not isinstance(last, messages.Dead):
                while not client.poll(0):
                    await asyncio.sleep(0.005)
                last = messages.decode_engine_message(client.recv())
            assert "too slow" in last.message
            await link.close()
            context.destroy(linger=0)

    run(work())


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"data_parallel_size": 3}, "data_parallel_size is 3, which 2 hosts .* choose a multiple of 2"),
        ({"node_rank": 2}, "node_rank is 2, must be below nnodes, 2"),
    ],
)
def test_impossible_options_are_named(options, fault):
    with pytest.raises(ConfigError, match=fault):
        config(**{"node_rank": 0, **options})


def test_scripts_have_no_replicas_on_other_hosts():
    with pytest.raises(ConfigError, match="only `jaxllm serve` has replicas on several hosts"):
        LLM("demo", data_parallel_size=2, nnodes=2)


def test_each_host_has_its_share_of_the_replicas_whole(monkeypatch):
    there = config(1, data_parallel_size=4, tensor_parallel_size=2, pipeline_parallel_size=2).parallel
    assert list(devices.ranks_here(there)) == [2, 3]
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "count", lambda: 8)
    assert devices.environments(there) == [{"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}]
    monkeypatch.setattr(gpus, "count", lambda: 6)
    with pytest.raises(
        ConfigError, match="data_parallel_size 2 on each host with 4 GPUs each needs 8 GPUs, this machine has 6"
    ):
        devices.environments(there)
    engines = devices.of_one_host(config(1)).parallel
    assert (engines.nnodes, engines.node_rank, engines.data_parallel_size) == (1, 0, 1)


def test_identities_are_equal_but_for_paths(tmp_path):
    assert identity(config(0)) == identity(config(1, download_dir=str(tmp_path)))
    assert "the model's weights" in identity(config(0))

import socket
import struct
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jaxllm.config import EngineConfig
from jaxllm.hosts import process_group
from jaxllm.hosts.follower import Member
from jaxllm.hosts.leader import Leader
from tests.helpers import host_scenario, peft_files, tiny_tokenizers
from tests.helpers.ports import free_port

STRANGERS = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nmodel=abc",
    bytes.fromhex("16030100a5010000a10303") + bytes(160),  # the first bytes of TLS
    b"\xff\xff\xff\xff",
    (60 << 20).to_bytes(4, "big"),  # announces more than a first message may have
    b"\0\0\0\1\xc1",
    b"\0\0\0\2\x91\xa4beat",  # a message of the protocol, or half of one, but no Hello
    b"\0\0\0\6\x91\xa4beat",
)
"""First bytes from connections that are not hosts."""


def reset(port: int) -> None:
    """Connect, and break the connection off at once, as port scanners do."""
    with socket.create_connection(("127.0.0.1", port)) as stream:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


FOUND = {"jaxllm version": "1", "jax version": "0.10", "Python version": "3.11", "block_size": "16"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer and an adapter."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "tokenizer.json").write_text(tiny_tokenizers.ascii_json())
    for seed, name in enumerate(host_scenario.ADAPTERS):
        peft_files.write(directory / name, Path(host_scenario.OPTIONS["model"]), seed=seed)
    return directory


def config(rank: int, port: int, **options: Any) -> EngineConfig:
    options = {"nnodes": 2, "tensor_parallel_size": 2, "distributed_timeout_seconds": 60, **options}
    return EngineConfig.from_options(model="demo", node_rank=rank, master_port=port, **options)


@pytest.fixture
def together(monkeypatch):
    """Starts the connections of hosts with these identities, each in a thread."""
    monkeypatch.setattr(process_group, "join", lambda *_, **__: None)
    monkeypatch.setattr(process_group, "leave", lambda: None)
    monkeypatch.setattr(process_group, "end_process", lambda code: sys.exit())  # of the thread
    threads = ThreadPoolExecutor(3)
    leaders: list[Leader] = []

    def start(*hosts: tuple[int, dict[str, str]], **options: Any) -> "list[Future[Any]]":
        port = free_port()
        started = [threads.submit(Leader.of, config(0, port, **options), FOUND)]
        started += [threads.submit(Member.of, config(rank, port, **options), found) for rank, found in hosts]
        started[0].add_done_callback(lambda future: leaders.append(future.result()) if not future.exception() else None)
        return started

    yield start
    for leader in leaders:
        leader.end()
    threads.shutdown()

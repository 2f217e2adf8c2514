"""`jaxllm serve demo --prefill 2 --decode 2 --nnodes 4`: real engines on four hosts answer as one engine does."""

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxllm import env
from tests.end_to_end.test_prefill_decode import (
    CHUNKS,
    SMALL,
    TEXT,
    complete,
    kept_busy,
    metric,
    shared_memory,
    texts_of,
    until,
)
from tests.helpers.ports import free_port, free_ports
from tests.helpers.serve_processes import ServerProcess, serving
from tests.helpers.tiers import need_tiers
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.slow

FLAGS = ("--prefill", "2", "--decode", "2", "--nnodes", "4", "--prefill-threshold", "32", "--max-model-len", "512")
FLAGS += ("--kv-offloading-size", "0.05", "--retry-on-engine-death")
PREFILLS, DECODES = (0, 1), (2, 3)
"""Ranks of the engines, and of their hosts."""
ALL = ["serving"] * 4


class Hosts:
    """The hosts of one server on this machine. Host 0 is at 127.0.0.1, prefill engines of the second host at 127.0.0.2."""

    def __init__(self, directory: Path):
        self._directory, self._stack = directory, contextlib.ExitStack()
        self._port, self.kv_port = str(free_port()), free_ports(2)
        self.each = [self.start(rank) for rank in range(4)]

    def start(self, rank: int) -> ServerProcess:
        own = self._directory / f"host{rank}-{len(list(self._directory.iterdir()))}"
        own.mkdir()
        flags = (*FLAGS, *SMALL, *CHUNKS, "--node-rank", str(rank), "--master-port", self._port)
        flags = (*flags, "--kv-port", str(self.kv_port))
        if rank == 1:
            flags = (*flags, "--kv-host", "127.0.0.2")
        return self._stack.enter_context(serving("demo", own, command=("serve", *flags)))

    def start_again(self, rank: int) -> None:
        self.each[rank] = self.start(rank)

    def close(self) -> None:
        self._stack.close()

    @property
    def replicas(self) -> list[dict[str, Any]]:
        try:
            with self.each[0].client() as client:
                return client.get("/health").json().get("replicas", [])
        except httpx.TransportError:
            return []

    def until(self, states: list[str]) -> None:
        """Wait until the engines have these states."""

        def are_there() -> bool:
            time.sleep(0.1)  # the engines need the cores
            return [each["state"] for each in self.replicas] == states

        wait_until(are_there, f"the engines are not {states}", 180)
        logs = "\n".join(host.log() for host in self.each)
        assert "Traceback" not in logs, logs


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    need_tiers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(env.KV_TOKEN, "a secret of all hosts")
        patch.setenv(env.FAULT, "kv.local:1-:eio")  # as on different machines: engines do not reach each other's memory
        hosts = Hosts(tmp_path_factory.mktemp("hosts"))
        try:
            hosts.until(ALL)
            yield hosts
        finally:
            hosts.close()


def pulled_bytes(client: httpx.Client) -> dict[int, float]:
    return {rank: metric(client, "kv_pull_bytes_total", rank) for rank in DECODES}


def streamed(client: httpx.Client, body: dict[str, Any]) -> list[str]:
    """The text of each answer."""
    reply = client.post("/v1/completions", json={**body, "stream": True})
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    return ["".join(each["text"] for each in choices if each["index"] == index) for index in range(body.get("n", 1))]


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 0.8, "seed": 9, "n": 2, "top_p": 0.9}], ids=str)
def test_the_answer_is_that_of_one_engine_and_its_blocks_come_from_another_host(hosts: Hosts, fields: dict[str, Any]) -> None:
    assert [each["role"] for each in hosts.replicas] == ["prefill", "prefill", "decode", "decode"]
    with hosts.each[0].client() as client:
        for number in range(4):
            body = {"prompt": f"{number} {sorted(fields)} {TEXT * 4}", "max_tokens": 12, **fields}
            before = pulled_bytes(client)
            answer = streamed(client, body) if number % 2 else texts_of(complete(client, **body))
            wait_until(lambda before=before: pulled_bytes(client) != before, "the decode engine fetched nothing")
            assert answer == texts_of(complete(client, **body, prompt_logprobs=0)), "of such a request one engine computes all"
        assert not sum(metric(client, "kv_pull_failures_total", rank) for rank in DECODES)
    for rank in DECODES:
        assert not shared_memory(hosts.each[rank]), "no memory of a prefill engine is mapped"
    for rank, address in ((0, "127.0.0.1"), (1, "127.0.0.2")):
        assert f"find this engine at {address}, port {hosts.kv_port + rank}" in hosts.each[rank].log()


def test_engines_of_hosts_that_are_killed_cost_no_answer_and_come_back(hosts: Hosts) -> None:
    with hosts.each[0].client() as client, ThreadPoolExecutor(16) as pool:
        client.timeout = 300.0

        def ask(name: str, number: int, **fields: Any) -> list[str]:
            return texts_of(complete(client, f"{name} {number}: {TEXT * 4}", temperature=0, max_tokens=8, **fields))

        for rank, states in ((1, ["serving", "down", "serving", "serving"]), (3, ["serving"] * 3 + ["down"])):
            with kept_busy(ask, f"killed {rank}") as answers:
                until(client, "num_requests_running", rank, (1.0).__le__)
                hosts.each[rank].process.send_signal(signal.SIGKILL)
                hosts.until(states)
            for number in (0, 5, 10, 15):
                assert answers[number] == ask(f"killed {rank}", number, prompt_logprobs=0)
            before = sum(pulled_bytes(client).values())
            assert ask(f"without {rank}", 0) == ask(f"without {rank}", 0, prompt_logprobs=0)
            wait_until(lambda before=before: sum(pulled_bytes(client).values()) > before, "the others pass no blocks")
            hosts.start_again(rank)
            hosts.until(ALL)
            before_each, stored = pulled_bytes(client), metric(client, "kv_offload_store_bytes_total", 1)
            list(pool.map(partial(ask, f"after {rank}"), range(8)))
            for decode in DECODES:
                until(client, "kv_pull_bytes_total", decode, before_each[decode].__lt__)
            until(client, "kv_offload_store_bytes_total", 1, stored.__lt__)
        for rank in range(4):
            until(client, "kv_leases", rank, (0.0).__eq__)
    children = [host.children() for host in hosts.each]
    hosts.each[0].process.send_signal(signal.SIGTERM)
    for host, own in zip(hosts.each, children, strict=True):
        assert host.end() == 0, host.log()
        host.assert_nothing_left(own)

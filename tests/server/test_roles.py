"""`jaxllm serve --prefill N --decode M`: options, devices, and whole servers over fake cores that record their requests."""

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxllm import env
from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.kv_tiers.peers import addresses
from jaxllm.replicas import devices
from jaxllm.replicas.roles import Roles
from server.options import ServerOptions
from tests.helpers.ports import free_port
from tests.helpers.serve_processes import ServerProcess, serving
from tests.helpers.served_core import ROLE_FACTORY
from tests.helpers.tiny_tokenizers import write_tokenizer
from tests.helpers.waiting import wait_until

OPTIONS: dict[str, Any] = {
    "served_model_name": ["model"],
    "web": False,
    "prefill": 1,
    "decode": 2,
    "prefill_threshold": 50,
    "kv_offloading_size": 0.5,
    "max_num_seqs": 64,
    "core_factory": ROLE_FACTORY,
    "enable_prompt_tokens_details": True,
}
LONG = "hi " * 100


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"prefill": 1}, "prefill is 1 without decode: give both"),
        ({"decode": 2}, "decode is 2 without prefill: give both"),
        ({"prefill": 0, "decode": 1}, "prefill is 0, must be at least 1"),
        ({"prefill": 1, "decode": 0}, "decode is 0, must be at least 1"),
        ({"prefill": 1, "decode": -3}, "decode is -3"),
        ({"prefill_threshold": 5}, "prefill_threshold is 5 without prefill and decode engines"),
        ({"prefill_hosts": "first"}, "prefill_hosts is first without prefill and decode engines"),
        ({"prefill": 1, "decode": 1, "prefill_hosts": "last"}, "prefill_hosts is 'last', must be"),
        ({"prefill": 1, "decode": 1, "prefill_threshold": -1}, "prefill_threshold is -1"),
    ],
)
def test_wrong_numbers_of_engines_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ServerOptions.from_options(**given)


def config_with(roles: Roles, **options: Any) -> EngineConfig:
    return EngineConfig.from_options(**roles.applied_to({"kv_offloading_size": 1.0, **options}))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kv_offloading_size": None}, "no host memory.*set kv_offloading_size"),
        ({"kv_offloading_size": 0}, "set kv_offloading_size"),
        ({"data_parallel_size": 2}, "data_parallel_size is 2: prefill and decode say how many"),
        (
            {"nnodes": 2},
            r"5 engines, which 2 hosts \(nnodes\) cannot share equally; choose numbers whose sum is a multiple of 2",
        ),
        ({"nnodes": 5}, r"on 5 hosts \(nnodes\), but JAXLLM_KV_TOKEN is not set: .*; set the same secret on all hosts"),
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend is ray"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel is True"),
        ({"kv_role": "both"}, "kv_role is both: the server gives each engine its role"),
        ({"enable_prefix_caching": False, "kv_offloading_size": None}, "enable_prefix_caching is False"),
    ],
)
def test_options_that_contradict_roles_are_refused(options: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.KV_TOKEN, raising=False)
    with pytest.raises(ConfigError, match=f"the server has prefill 2 and decode 3.*{text}"):
        config_with(Roles(2, 3), **options)


def test_each_engine_gets_its_role_and_all_one_secret() -> None:
    roles = Roles(2, 3)
    common = config_with(roles, tensor_parallel_size=2)
    assert common.parallel.num_replicas == 5 and common.kv_transfer.kv_role is None
    each = [common.replace(**roles.options_of_each(common)[rank]).kv_transfer for rank in range(5)]
    assert [engine.kv_role for engine in each] == ["prefill"] * 2 + ["decode"] * 3
    assert all(engine.kv_host == "127.0.0.1" and engine.kv_peers is None for engine in each)
    first, second = (roles.with_secret([{"A": "1"}, {}]) for _ in range(2))
    assert first[0] == {"A": "1", **first[1]} and len(first[1]["JAXLLM_KV_TOKEN"]) == 64
    assert first[1] != second[1]


@pytest.mark.parametrize(
    ("roles", "num_hosts", "expected"),
    [
        (Roles(1, 1), 2, "p|d"),
        (Roles(2, 2), 2, "pd|pd"),
        (Roles(2, 2, "first"), 2, "pp|dd"),
        (Roles(1, 3), 2, "pd|dd"),
        (Roles(3, 1), 2, "pp|pd"),
        (Roles(2, 6), 4, "pd|pd|dd|dd"),
        (Roles(2, 6, "first"), 4, "pp|dd|dd|dd"),
        (Roles(3, 5, "first"), 4, "pp|pd|dd|dd"),
        (Roles(5, 1), 3, "pp|pp|pd"),
        (Roles(2, 3), 1, "ppddd"),
    ],
    ids=str,
)
def test_which_engines_hosts_have(roles: Roles, num_hosts: int, expected: str) -> None:
    ranks, share = roles.prefill_ranks(num_hosts), roles.num_engines // num_hosts
    found = "".join("p" if rank in ranks else "d" for rank in range(roles.num_engines))
    assert "|".join(found[start : start + share] for start in range(0, len(found), share)) == expected


def test_prefill_engines_of_a_host_listen_where_others_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.KV_TOKEN, "secret")
    roles, options = Roles(2, 2), {"nnodes": 2, "node_rank": 1, "kv_pull_timeout": 3.0}
    for given, address, port in (({}, "10.0.0.5", 14579), ({"kv_host": "10.1.0.5", "kv_port": 0}, "10.1.0.5", 0)):
        config = config_with(roles, **options, **given)
        each = roles.options_of_each(config, "10.0.0.5")
        prefill, decode = (devices.of_one_host(config).replace(**each[rank]).kv_transfer for rank in (2, 3))
        assert (prefill.kv_role, prefill.kv_host, prefill.kv_port) == ("prefill", address, port)
        assert (decode.kv_role, decode.kv_pull_timeout, decode.kv_host) == ("decode", 3.0, "127.0.0.1")
        assert [own["kv_role"] for own in each.values()] == ["prefill", "decode"] * 2
        for host in ("10.0.0.5", "fd00::5"):
            assert addresses.allowed(host, 14579, decode.kv_peers)
    with pytest.raises(ConfigError, match=r"kv_host is 0\.0\.0\.0, which decode engines cannot connect to"):
        config_with(roles, nnodes=2, kv_host="0.0.0.0")
    with pytest.raises(ConfigError, match="prefill_hosts is first, but there is one host; set nnodes too"):
        config_with(Roles(1, 1, "first"))


@pytest.mark.parametrize("roles", [Roles(2, 6), Roles(2, 6, "first"), Roles(3, 5, "first")], ids=str)
def test_an_address_is_refused_on_a_host_without_prefill_engines(roles: Roles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.KV_TOKEN, "secret")
    for rank in range(4):
        options = {"nnodes": 4, "node_rank": rank}
        there = roles.options_of_each(config_with(roles, **options))
        if any(there[each]["kv_role"] == "prefill" for each in range(2 * rank, 2 * rank + 2)):
            assert config_with(roles, **options, kv_host="10.1.0.5").kv_transfer.kv_host == "10.1.0.5"
            continue
        with pytest.raises(
            ConfigError, match=rf"kv_host is '10\.1\.0\.5' on host {rank} \(node_rank\).*; leave kv_host out on this host"
        ):
            config_with(roles, **options, kv_host="10.1.0.5")


def test_hosts_must_have_the_same_roles_and_the_same_token_which_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.KV_TOKEN, "secret")
    own = Roles(2, 2).identity()
    assert own == Roles(2, 2).identity() and "secret" not in str(own)
    assert {name for name, value in Roles(1, 3, "first").identity().items() if own[name] != value} == {
        "prefill",
        "decode",
        "prefill_hosts",
    }
    monkeypatch.setenv(env.KV_TOKEN, "another")
    assert {name for name, value in Roles(2, 2).identity().items() if own[name] != value} == {env.KV_TOKEN}


def test_host_memory_is_that_of_the_engines_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.KV_TOKEN, "secret")
    extra = {"cpu_bytes_to_use": 1 << 30}
    connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    for given, size in (({"kv_offloading_size": 3.0}, 1.5), ({"kv_transfer_config": connector}, 1.0)):
        for options in (Roles(2, 2).applied_to({"nnodes": 2, **given}), {"data_parallel_size": 4, "nnodes": 2, **given}):
            of_engine = devices.of_one_host(EngineConfig.from_options(**options))
            assert of_engine.cache.kv_offloading_size == 2 * size and of_engine.parallel.num_replicas == 2


def test_memory_of_a_connector_is_that_of_each_engine() -> None:
    extra = {"cpu_bytes_to_use": 1 << 30}
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    config = EngineConfig.from_options(**Roles(2, 3).applied_to({"kv_transfer_config": transfer}))
    assert config.cache.kv_offloading_size == 5.0
    assert config_with(Roles(2, 3)).cache.kv_offloading_size == 1.0


def test_decode_engines_alone_get_the_policies_for_blocks_that_do_not_come() -> None:
    roles = Roles(1, 1)
    common = config_with(roles, kv_pull_timeout=3.0, kv_load_failure_policy="fail")
    prefill, decode = [common.replace(**own).kv_transfer for own in roles.options_of_each(common).values()]
    assert (prefill.kv_pull_timeout, prefill.kv_load_failure_policy) == (10.0, "recompute")
    assert (decode.kv_pull_timeout, decode.kv_load_failure_policy) == (3.0, "fail")
    assert roles.decode_engine(common).kv_transfer == decode


def test_too_few_gpus_are_told_by_the_options_that_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.gpus, "count", lambda: 4)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.delenv(devices.VISIBLE, raising=False)
    config = config_with(Roles(1, 2), tensor_parallel_size=2)
    with pytest.raises(
        ConfigError, match="^prefill 1 and decode 2 with 2 GPUs each needs 6 GPUs, this machine has 4; choose at most 2"
    ):
        devices.environments(config.parallel, str(Roles(1, 2)))
    monkeypatch.setenv(env.KV_TOKEN, "secret")
    there = config_with(Roles(2, 4), nnodes=2, tensor_parallel_size=2).parallel
    with pytest.raises(
        ConfigError, match="^prefill 2 and decode 4 on 2 hosts with 2 GPUs each needs 6 GPUs, this machine has 4"
    ):
        devices.environments(there, Roles(2, 4).on_hosts(2))
    monkeypatch.setattr(devices.gpus, "count", lambda: 6)
    found = devices.environments(config.parallel, "")
    assert [each[devices.VISIBLE] for each in found] == ["0,1", "2,3", "4,5"]


# Whole servers


class Legs:
    """Reads what the engines of one server record."""

    def __init__(self, model: Path):
        self._file, self._num_bytes_read = model / "legs.jsonl", 0
        self._file.touch()

    def new(self) -> list[dict[str, Any]]:
        """The records written since the last call. The file stays, as an engine may have it open to write the next one."""
        with self._file.open("rb") as file:
            file.seek(self._num_bytes_read)
            lines = [line for line in file if line.endswith(b"\n")]
        self._num_bytes_read += sum(map(len, lines))
        return [json.loads(line) for line in lines]


def chat(client: httpx.Client, text: str, **fields: Any) -> httpx.Response:
    body = {"model": "model", "messages": [{"role": "user", "content": text}], "max_tokens": 20, **fields}
    return client.post("/v1/chat/completions", json=body)


def asked(server: ServerProcess, prompt: str) -> socket.socket:
    """A connection with a request whose answer is not read."""
    body = json.dumps({"prompt": prompt}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(server.uds))
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.slow
def test_one_url_over_prefill_and_decode_engines(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "model")
    legs = Legs(model)
    with serving(model, tmp_path, **OPTIONS) as server, server.wait_ready().client() as client:
        health = client.get("/health").json()["replicas"]
        found = [(replica["role"], replica["state"]) for replica in health]
        assert found == [("prefill", "serving"), ("decode", "serving"), ("decode", "serving")]

        answer = client.post("/v1/completions", json={"model": "model", "prompt": LONG}, headers={"X-Request-Id": "kept"})
        assert answer.status_code == 200 and answer.headers["x-request-id"] == "kept"
        assert answer.json()["choices"][0]["text"] == "one two three" and "kv_transfer_params" not in answer.json()
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 7
        assert answer.json()["usage"]["completion_tokens"] == 4
        first, second = legs.new()
        assert (first["role"], first["max_tokens"], first["keeps"], first["pulls"]) == ("prefill", 1, True, None)
        assert (second["role"], second["max_tokens"], second["keeps"]) == ("decode", 16, False)
        assert second["pulls"] == f"lease-of-{first['id']}" and "kept" in second["id"]
        assert first["token"] == second["token"] and len(first["token"]) == 64

        lines = [line for line in chat(client, LONG, stream=True, n=2).text.split("\n\n") if line.startswith("data: {")]
        deltas = [choice for line in lines for choice in json.loads(line.removeprefix("data: "))["choices"]]
        texts = ["".join(each["delta"].get("content") or "" for each in deltas if each["index"] == index) for index in (0, 1)]
        assert texts == ["one two three"] * 2
        assert [leg["role"] for leg in legs.new()] == ["prefill", "decode", "decode"], "the prompt is computed once"

        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
        for fields in ({"tools": [tool], "tool_choice": "required"}, {"response_format": schema}):
            assert chat(client, LONG, **fields).status_code == 200
            assert [(leg["role"], leg["grammar"]) for leg in legs.new()] == [("prefill", True), ("decode", True)]

        assert chat(client, "hi").json()["choices"][0]["message"]["content"] == "one two three"
        assert [(leg["role"], leg["pulls"]) for leg in legs.new()] == [("decode", None)]
        embedding = client.post("/v1/embeddings", json={"model": "model", "input": LONG})
        assert embedding.status_code == 200 and [leg["role"] for leg in legs.new()] == ["prefill"]

        refused = chat(client, LONG, kv_transfer_params={"do_remote_decode": True})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "kv_transfer_params"
        refused = client.post("/v1/completions", json={"prompt": LONG}, headers={"X-data-parallel-rank": "1"})
        assert refused.status_code == 400 and "leave it out" in refused.json()["error"]["message"]
        assert not legs.new()
        counts = [
            line for line in client.get("/metrics").text.splitlines() if line.startswith("jaxllm:generation_tokens_total{")
        ]
        by_engine = {line.split('engine="')[1].split('"')[0]: float(line.split()[-1]) for line in counts}
        assert by_engine.get("0", 0.0) == 4 and sum(by_engine.values()) == 6 * 4, "first tokens of four first legs"


@pytest.mark.slow
def test_failures_and_cancellations_of_each_leg(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "model")
    legs = Legs(model)
    options = {**OPTIONS, "prefill": 2, "decode": 1}
    with serving(model, tmp_path, **options) as server, server.wait_ready().client() as client:
        for first_word in ("unkept", "lose"):
            answer = chat(client, f"{first_word} {LONG}")
            assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"] == "one two three"
            assert [(leg["role"], leg["pulls"]) for leg in legs.new()] == [("prefill", None), ("decode", None)]

        assert chat(client, f"unwanted {LONG}").status_code == 400
        found: list[dict[str, Any]] = []
        wait_until(lambda: found.extend(legs.new()) or len(found) > 1, "the prefill engine keeps its blocks")
        assert [leg["role"] for leg in found] == ["prefill"] * 2 and found[1]["ended"] == f"lease-of-{found[0]['id']}"

        found.clear()
        with asked(server, f"slow {LONG}"):
            wait_until(lambda: found.extend(legs.new()) or found, "no first leg begins")
        wait_until(lambda: found.extend(legs.new()) or any("aborted" in leg for leg in found), "the first leg goes on")
        assert [leg["role"] for leg in found] == ["prefill"] * 2 and found[1]["aborted"] == found[0]["id"]

        endless = {"prompt": LONG, "max_tokens": 15_000, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=endless) as stream:
            next(stream.iter_lines())
        found.clear()
        wait_until(lambda: found.extend(legs.new()) or any("aborted" in leg for leg in found), "the second leg goes on")
        assert [leg["role"] for leg in found] == ["prefill", "decode", "decode"] and found[2]["aborted"] == found[1]["id"]

        engines = server.children("jaxllm.engine.process")
        with asked(server, f"slow {LONG}"):
            wait_until(legs.new, "no first leg begins")
        os.kill(min(engines), signal.SIGKILL)
        for _ in range(3):
            assert chat(client, LONG).status_code == 200, "the other prefill engine, or the decode engine, computes the prompt"
        wait_until(lambda: {each["state"] for each in client.get("/health").json()["replicas"]} == {"serving"}, "not again")
        assert {leg["role"] for leg in legs.new()} == {"prefill", "decode"}


@contextlib.contextmanager
def host(rank: int, model: Path, directory: Path, **options: Any) -> Iterator[ServerProcess]:
    own = directory / f"host{rank}-{len(list(directory.iterdir()))}"
    own.mkdir()
    with serving(model, own, node_rank=rank, **{**OPTIONS, "prefill": 2, "nnodes": 2, **options}) as server:
        yield server


@pytest.mark.slow
def test_hosts_with_engines_of_both_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with another secret is refused. Restarting one costs no answer."""
    monkeypatch.setenv(env.KV_TOKEN, "secret")
    model, port = write_tokenizer(tmp_path / "model"), free_port()
    with host(0, model, tmp_path, master_port=port) as first:
        monkeypatch.setenv(env.KV_TOKEN, "another")
        with host(1, model, tmp_path, master_port=port) as second:
            assert [first.end(), second.end()] == [1, 1]
            for server in (first, second):
                assert "JAXLLM_KV_TOKEN is one with the digest" in server.log() and "secret" not in server.log()

    monkeypatch.setenv(env.KV_TOKEN, "secret")
    legs = Legs(model)
    with host(0, model, tmp_path, master_port=port) as first:
        with host(1, model, tmp_path, master_port=port) as second, first.client() as client:
            wait_until(lambda: states_of(first) == ["serving"] * 4, "not all serve")
            found = [replica["role"] for replica in client.get("/health").json()["replicas"]]
            assert found == ["prefill", "decode"] * 2
            for _ in range(8):
                assert chat(client, LONG).json()["choices"][0]["message"]["content"] == "one two three"
            records = legs.new()
            assert [leg["role"] for leg in records] == ["prefill", "decode"] * 8
            assert {leg["token"] for leg in records} == {"secret"}
            second.process.send_signal(signal.SIGTERM)
            assert second.end() == 0
        wait_until(lambda: states_of(first) == ["serving"] * 2 + ["down"] * 2, "it is not down")
        with first.client() as client:
            assert chat(client, LONG).status_code == 200
        assert [leg["role"] for leg in legs.new()] == ["prefill", "decode"]
        assert "Traceback" not in first.log(), first.log()


def states_of(server: ServerProcess) -> list[str]:
    """The states of all engines; empty before the server answers."""
    time.sleep(0.05)
    try:
        with server.client() as client:
            return [each["state"] for each in client.get("/health").json().get("replicas", ())]
    except httpx.TransportError:
        return []

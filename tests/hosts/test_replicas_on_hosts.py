"""Whole servers with replicas on two hosts, as processes on loopback: over fake cores, and with the demo model on two devices each."""

import concurrent.futures
import contextlib
import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxllm import env
from jaxllm.engine import features
from tests.helpers import engines, goldens
from tests.helpers.ports import free_port
from tests.helpers.serve_processes import ServerProcess, serving
from tests.helpers.tiny_tokenizers import write_tokenizer
from tests.helpers.waiting import wait_until
from tests.server.test_replicas import ENDLESS, SHORT, _endless, _post, by_replica, states

pytestmark = pytest.mark.slow

LONG = {**ENDLESS, "stream": False, "max_tokens": 3000}

OPTIONS: dict[str, Any] = {
    "served_model_name": ["model"],
    "web": False,
    "max_num_seqs": 64,
    "data_parallel_size": 4,
    "nnodes": 2,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def host(rank: int, model: Path, directory: Path, **options: Any) -> Iterator[ServerProcess]:
    own = directory / f"host{rank}-{len(list(directory.iterdir()))}"
    own.mkdir()
    with serving(model, own, node_rank=rank, **{**OPTIONS, **options}) as server:
        yield server


def test_replicas_of_another_host_are_like_those_of_this_one_and_come_back(model: Path, tmp_path: Path) -> None:
    options = {
        "master_port": free_port(),
        "enable_dev_endpoints": True,
        "enable_lora": True,
        "allow_runtime_lora_updating": True,
    }
    with host(0, model, tmp_path, **options) as first:
        with host(1, model, tmp_path, **options) as second, first.wait_ready().client() as client:
            assert states(client) == ["serving"] * 4
            for rank in range(4):
                assert (
                    client.post("/v1/completions", json=SHORT, headers={"X-data-parallel-rank": str(rank)}).status_code == 200
                )
            assert by_replica(client, "generation_tokens_total") == {str(rank): 3.0 for rank in range(4)}
            assert client.post("/sleep").status_code == 200
            assert client.get("/is_sleeping").json() == {"is_sleeping": True}
            assert client.post("/wake_up").status_code == 200
            (tmp_path / "adapter").mkdir()
            (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
            adapter = {"lora_name": "pirate", "lora_path": str(tmp_path / "adapter")}
            assert client.post("/v1/load_lora_adapter", json=adapter).status_code == 200

            engine = min(second.children("engine"))
            codes = ends_of_streams(first, client, lambda: os.kill(engine, signal.SIGKILL))
            assert sorted(codes.values(), key=str) == [None, None, None, "replica_lost"] and codes["0"] is codes["1"] is None
            wait_until(lambda: states(client) == ["serving"] * 4, "it was not started again")
            pirate = {**SHORT, "model": "pirate"}
            for rank in range(4):
                reply = client.post("/v1/completions", json=pirate, headers={"X-data-parallel-rank": str(rank)})
                assert reply.status_code == 200, "the new process has the adapters of the others"

            os.kill(first.children("server.api_server")[0], signal.SIGKILL)
            wait_until(lambda: states_anew(first) == ["serving"] * 4, "the new API server does not know all replicas")

            codes = ends_of_streams(first, client, second.process.kill)
            assert codes == {"0": None, "1": None, "2": "replica_lost", "3": "replica_lost"}
            assert states(client) == ["serving"] * 2 + ["down"] * 2
            assert "is lost: the connection was closed" in first.log(), "it was not noticed at once, but by its silence"
            assert client.post("/v1/completions", json=SHORT).status_code == 200, "the others serve"
        with host(1, model, tmp_path, **options) as second, first.client() as client:
            wait_until(lambda: states(client) == ["serving"] * 4, "the host did not come back")
            reply = client.post("/v1/completions", json=pirate, headers={"X-data-parallel-rank": "3"})
            assert reply.status_code == 200, "it has the adapters of the others"
            children = [first.children(), second.children()]
            first.process.send_signal(signal.SIGTERM)
            assert [first.end(), second.end()] == [0, 0]
            first.assert_nothing_left(children[0])
            second.assert_nothing_left(children[1])


def states_anew(first: ServerProcess) -> list[str]:
    """The states of all replicas by a new connection; empty if it is refused or fails."""
    try:
        with first.client() as client:
            return states(client)
    except (httpx.HTTPError, KeyError):
        return []


def ends_of_streams(first: ServerProcess, client: httpx.Client, kill: Callable[[], None]) -> dict[str, str | None]:
    """Stream from every replica and kill something meanwhile. The code of the error that ended each stream, by replica."""
    ranks = [str(rank) for rank in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        streams = {rank: pool.submit(_endless, first, rank) for rank in ranks}
        wait_until(lambda: all(by_replica(client, "num_requests_running").values()), "not all run")
        kill()
        wait_until(lambda: "down" in states(client), "nobody noticed")
        return {rank: stream.result(60) for rank, stream in streams.items()}


def test_a_host_that_is_told_to_stop_lets_its_requests_end_and_the_next_one_joins(model: Path, tmp_path: Path) -> None:
    """A restart under load costs no request. Those that outlast their time run elsewhere if nothing of them was sent. A second
    signal ends the host at once."""
    options = {"master_port": free_port(), "data_parallel_size": 2}
    with (
        host(0, model, tmp_path, **options) as first,
        concurrent.futures.ThreadPoolExecutor(8) as pool,
        contextlib.ExitStack() as on_exit,
    ):
        is_over = threading.Event()
        on_exit.callback(is_over.set)
        with host(1, model, tmp_path, **options) as second, first.wait_ready().client() as client:
            loads = [pool.submit(ask, first, seed, is_over) for seed in range(6)]
            runs = threading.Event()
            long = pool.submit(num_streamed, first, runs)
            assert runs.wait(60)
            children = second.children()
            second.process.send_signal(signal.SIGTERM)
            wait_until(lambda: states(client)[1] == "draining", "host 0 does not say so")
            assert state_in_metrics(client, "1") == "draining"
            refused = client.post("/v1/completions", json=SHORT, headers={"X-data-parallel-rank": "1"})
            assert refused.status_code == 503
            assert long.result(60) == LONG["max_tokens"]
            assert second.end() == 0
            second.assert_nothing_left(children)
            wait_until(lambda: states(client) == ["serving", "down"], "host 0 has not noticed the end")
        for num_signals, seconds in ((1, 0.3), (2, 30.0)):
            with host(1, model, tmp_path, **options, shutdown_timeout=seconds) as second, first.client() as client:
                wait_until(lambda: states(client) == ["serving"] * 2, "it does not join")
                if not is_over.is_set():
                    is_over.set()
                    answers = [answer for load in loads for answer in load.result(60)]
                    assert len(answers) > 50 and set(answers) == {0}, answers
                    assert "Traceback" not in first.log() and "ERROR" not in first.log(), first.log()
                stream, quiet = pool.submit(_endless, first, "1"), pool.submit(_post, first, LONG, "1")
                wait_until(lambda: by_replica(client, "num_requests_running")["1"] == 2, "they do not run")
                for _ in range(num_signals):
                    second.process.send_signal(signal.SIGTERM)
                    wait_until(lambda second=second: "a second signal" in second.log(), "the first signal was not taken")
                assert second.end() == (0 if num_signals == 1 else 128 + signal.SIGTERM)
                assert stream.result(60) == "replica_lost"
                if num_signals == 1:
                    assert quiet.result(60).json()["usage"]["completion_tokens"] == LONG["max_tokens"]


def ask(first: ServerProcess, seed: int, is_over: threading.Event) -> list[Any]:
    """Requests one after another: the tokens that each lacks, or its error."""
    rng, lacking = random.Random(seed), []
    with first.client() as client:
        while not is_over.is_set():
            count = rng.randrange(1, 600)
            reply = client.post("/v1/completions", json={**LONG, "max_tokens": count})
            lacking.append(count - reply.json()["usage"]["completion_tokens"] if reply.status_code == 200 else reply.text)
    return lacking


def num_streamed(first: ServerProcess, runs: threading.Event) -> int:
    """Stream from replica 1. The number of tokens that came."""
    body = {**LONG, "stream": True, "return_token_ids": True}
    num_tokens = 0
    headers = {"X-data-parallel-rank": "1"}
    with first.client() as client, client.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
        for line in reply.iter_lines():
            runs.set()
            if line.startswith("data: {"):
                num_tokens += sum(len(choice["token_ids"]) for choice in json.loads(line[6:])["choices"])
    return num_tokens


def state_in_metrics(client: httpx.Client, rank: str) -> str:
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith("jaxllm:replica_state{")]
    [found] = [line for line in lines if f'engine="{rank}"' in line and line.endswith(" 1.0")]
    return found.split('state="')[1].split('"')[0]


def test_a_host_that_cannot_start_its_replicas_fails_the_start(model: Path, tmp_path: Path) -> None:
    options = {"master_port": free_port(), "data_parallel_size": 2}
    with (
        host(0, model, tmp_path, **options) as first,
        host(1, model, tmp_path, core_factory="nothing:make", **options) as second,
    ):
        assert [first.end(), second.end()] == [1, 1]
        for log in (first.log(), second.log()):
            assert "replica 1: the engine failed: ModuleNotFoundError" in log, log
        assert "host 1 (" in first.log()


def test_without_host_0_the_others_end(model: Path, tmp_path: Path) -> None:
    options = {"master_port": free_port(), "data_parallel_size": 2}
    with host(0, model, tmp_path, **options) as first, host(1, model, tmp_path, **options) as second:
        first.wait_ready()
        children = [first.children(), second.children()]
        first.process.kill()
        assert second.end() == 1
        second.assert_nothing_left(children[1])
        first.uds = None  # the socket of HTTP stays, as of any server that is killed
        first.assert_nothing_left(children[0])
        assert "host 0 is lost" in second.log() and "Traceback" not in second.log()


def test_two_hosts_with_two_devices_each_compute_what_one_device_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = goldens.golden("llama_gqa")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    monkeypatch.setenv(env.HOSTS_TOKEN, "secret")
    options = {**engines.SMALL, "core_factory": "", "data_parallel_size": 2, "tensor_parallel_size": 2, "dtype": "float32"}
    options = {**options, "master_port": free_port(), "warmup": "lazy"}
    if features.KV_TIERS is not None:
        options["kv_offloading_size"] = 0.01
    with (
        host(1, golden.directory, tmp_path, **options),
        host(0, golden.directory, tmp_path, **options) as first,
        first.wait_ready().client() as client,
    ):
        if features.KV_TIERS is not None:
            assert "host memory: " in first.log(), "each replica has that of its host"
        for rank in range(2):
            for result in golden.results[:2]:
                body = {"model": "model", "prompt": result.prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
                reply = client.post("/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)})
                assert reply.json()["choices"][0]["token_ids"] == result.tokens[:8]

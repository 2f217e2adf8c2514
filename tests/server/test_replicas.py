"""Whole servers with several replicas, over fake cores: balance, control calls to all, and replicas that end under load."""

import concurrent.futures
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxllm.replicas.core import STALL_POLL_SECONDS
from tests.helpers.serve_processes import ServerProcess, is_alive, serving
from tests.helpers.tiny_tokenizers import write_tokenizer
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.slow

ENDLESS = {"model": "model", "prompt": "hi", "max_tokens": 15_000, "ignore_eos": True, "stream": True}
SHORT = {"model": "model", "prompt": "hi", "max_tokens": 3}
OPTIONS: dict[str, Any] = {"served_model_name": ["model"], "web": False, "data_parallel_size": 2, "max_num_seqs": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


def states(client: httpx.Client) -> list[str]:
    return [replica["state"] for replica in client.get("/health").json()["replicas"]]


def by_replica(client: httpx.Client, metric: str) -> dict[str, float]:
    """A metric by the label `engine`."""
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(f"jaxllm:{metric}{{")]
    return {line.split('engine="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


def test_requests_are_spread_and_control_calls_reach_every_replica(model: Path, tmp_path: Path) -> None:
    options = {**OPTIONS, "enable_dev_endpoints": True, "stall_timeout": 3.0}
    with serving(model, tmp_path, **options) as server, server.wait_ready().client() as client:
        wait_until(lambda: states(client) == ["serving"] * 2, "not all serve")
        assert len(server.children("engine")) == 2
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            replies = list(pool.map(lambda _: client.post("/v1/completions", json={**SHORT, "n": 2}), range(12)))
        assert {reply.status_code for reply in replies} == {200}
        done = by_replica(client, "generation_tokens_total")
        assert sum(done.values()) == 12 * 2 * 3 and all(done[str(rank)] for rank in range(2)), done

        before = by_replica(client, "generation_tokens_total")["1"]
        for _ in range(3):
            assert client.post("/v1/completions", json=SHORT, headers={"X-data-parallel-rank": "1"}).status_code == 200
        assert by_replica(client, "generation_tokens_total")["1"] == before + 9
        refused = client.post("/v1/completions", json=SHORT, headers={"X-data-parallel-rank": "2"})
        assert refused.status_code == 400 and "must be 0 to 1" in refused.json()["error"]["message"]
        assert client.post("/v1/completions", json=SHORT, headers={"X-data-parallel-rank": "-1"}).status_code == 400

        assert client.post("/sleep").status_code == 200
        assert client.get("/is_sleeping").json() == {"is_sleeping": True}
        assert client.post("/v1/completions", json=SHORT).status_code == 503
        assert client.post("/wake_up").status_code == 200
        for rank in range(2):
            reply = client.post("/v1/completions", json=SHORT, headers={"X-data-parallel-rank": str(rank)})
            assert reply.status_code == 200, reply.text

        still = server.children("engine")[0]
        os.kill(still, signal.SIGSTOP)
        wait_until(lambda: "stalled" in states(client), "a replica that stands still seems to serve")
        time.sleep(STALL_POLL_SECONDS)
        assert client.get("/ready").status_code == 200 and client.get("/health").json()["status"] == "serving"
        for _ in range(6):
            assert client.post("/v1/completions", json=SHORT, timeout=30).status_code == 200, "it gets new requests"
        os.kill(still, signal.SIGCONT)
        wait_until(lambda: states(client) == ["serving"] * 2, "it does not serve again")


@pytest.mark.parametrize("retries", [False, True])
def test_a_replica_that_is_killed_takes_only_its_requests_along(model: Path, tmp_path: Path, retries: bool) -> None:
    options = {**OPTIONS, "retry_on_engine_death": retries, "api_server_count": 1 + retries, "enable_lora": True}
    options["allow_runtime_lora_updating"] = True

    def is_whole() -> bool:
        try:
            with server.client() as own:
                return states(own) == ["serving"] * 2
        except (httpx.HTTPError, KeyError):
            return False

    with serving(model, tmp_path, **options) as server, server.wait_ready().client() as client:
        pids = set(server.children("engine"))
        (tmp_path / "adapter").mkdir()
        (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
        adapter = {"lora_name": "pirate", "lora_path": str(tmp_path / "adapter")}
        assert client.post("/v1/load_lora_adapter", json=adapter).status_code == 200
        ranks = [str(rank) for rank in range(2)]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            streams = [pool.submit(_endless, server, rank) for rank in ranks]
            quiet = {**ENDLESS, "stream": False, "max_tokens": 3000}
            waits = [pool.submit(_post, server, quiet, rank) for rank in ranks]
            wait_until(lambda: all(count == 2 for count in by_replica(client, "num_requests_running").values()), "not all run")
            os.kill(min(pids), signal.SIGKILL)
            wait_until(lambda: "down" in states(client), "nobody noticed")
            down = states(client).index("down")
            assert client.post("/v1/completions", json=SHORT).status_code == 200, "the others serve"
            wait_until(lambda: states(client) == ["serving"] * 2, "it was not started again")
            pirate = {**SHORT, "model": "pirate"}
            reply = client.post("/v1/completions", json=pirate, headers={"X-data-parallel-rank": str(down)})
            assert reply.status_code == 200, "the new process has the adapters of the others"
            for rank, (stream, wait) in enumerate(zip(streams, waits, strict=True)):
                code = stream.result(60)
                answer = wait.result(60)
                assert code == ("replica_lost" if rank == down else None)
                if rank == down and not retries:
                    assert answer.status_code == 503 and answer.json()["error"]["code"] == "replica_lost"
                else:
                    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3000
        assert len(server.children("engine")) == 2
        if retries:  # API servers start while a replica is down
            for pid in (min(server.children("engine")), *server.children("server.api_server")):
                os.kill(pid, signal.SIGKILL)
            for _ in range(4):  # connections are dealt out among the API servers
                wait_until(is_whole, "it did not come back")
            for _ in range(6):
                with server.client() as own:
                    assert own.post("/v1/completions", json=SHORT).status_code == 200
        children = server.children()
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
        server.assert_nothing_left(children)
        assert not any(is_alive(pid) for pid in pids)


def _endless(server: ServerProcess, rank: str) -> str | None:
    """Stream from a replica until the stream ends. Returns the code of the error that ended it, if any."""
    with server.client() as client:
        headers = {"X-data-parallel-rank": rank}
        body = {**ENDLESS, "max_tokens": 3000}
        with client.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
            for line in reply.iter_lines():
                if '"error"' in line:
                    return str(line.split('"code":"')[1].split('"')[0])
    return None


def _post(server: ServerProcess, body: dict[str, Any], rank: str) -> httpx.Response:
    with server.client() as client:
        return client.post("/v1/completions", json=body, headers={"X-data-parallel-rank": rank})

"""A cluster of real Ray with two logical hosts on this machine: it starts the second host of an engine, and tells of its death."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.hosts import with_ray
from jaxllm.hosts.follower import follow
from tests.helpers import ending_with_parent
from tests.helpers.serve_processes import serving
from tests.helpers.tiny_tokenizers import write_tokenizer
from tests.helpers.waiting import wait_until
from tests.hosts.test_two_hosts import MOST_SECONDS, ROOT, TOKENS, line_of
from tests.server.test_replicas import SHORT, states

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default: actors would starve next to other tests
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def children(name: str) -> list[int]:
    """Processes whose command line has this name."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if name in (place / "cmdline").read_text():
                found.append(int(place.name))
        except OSError:
            continue
    return found


def test_ray_starts_the_other_host_and_its_death_ends_the_engine(cluster, directory):
    """A stage of two devices on each. A mesh over both hosts: test_two_hosts.py."""
    options = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "warmup": "background",
        "nnodes": 2,
        "enable_lora": False,
        "distributed_executor_backend": "ray",
        "distributed_timeout_seconds": 60,
    }
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "JAX_NUM_CPU_DEVICES": "2"}
    with (directory / "errors").open("w") as errors:
        host = subprocess.Popen(
            ending_with_parent.python("-m", "tests.helpers.host_scenario", str(directory), json.dumps(options)),
            env={**environment, "RAY_ADDRESS": cluster.address, "SOME_API_KEY": "secret"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert json.loads(line_of(host, directory / "errors")) == TOKENS
        [actor] = children("ray::FollowerActor.run")
        assert b"secret" not in Path(f"/proc/{actor}/environ").read_bytes()
        os.kill(actor, signal.SIGKILL)
        died = time.time()
        told = json.loads(line_of(host, directory / "errors"))
        assert "host 1 (" in told["error"] and told["at"] - died < MOST_SECONDS
        assert host.wait(MOST_SECONDS) == 1
    finally:
        host.kill()
        host.communicate()
    assert "host 1 of 2 is ready" in (directory / "errors").read_text(), "the actor's log did not come home"


def test_a_cluster_that_is_too_small_is_named(cluster, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    options = {"model": "demo", "tensor_parallel_size": 3, "distributed_executor_backend": "ray"}
    with pytest.raises(ConfigError, match="3 devices on 3 hosts are asked for, the Ray cluster has 2"):
        with_ray.start(EngineConfig.from_options(**options, nnodes=3), follow)
    with pytest.raises(ConfigError, match="no GPU on this host: give the number of hosts with --nnodes"):
        with_ray.start(EngineConfig.from_options(**options), follow)


def test_replicas_on_a_host_that_ray_starts_come_back_when_it_is_lost_or_told_to_stop(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    model = write_tokenizer(tmp_path)
    options = {"served_model_name": ["model"], "web": False, "max_num_seqs": 64, "data_parallel_size": 2, "nnodes": 2}
    options = {**options, "distributed_executor_backend": "ray", "distributed_timeout_seconds": 60}
    with serving(model, tmp_path, **options) as server, server.wait_ready().client() as client:
        for number in (signal.SIGKILL, signal.SIGTERM):
            reply = client.post("/v1/completions", json=SHORT, headers={"X-data-parallel-rank": "1"})
            assert reply.status_code == 200, reply.text
            [actor] = children("ray::FollowerActor.run")
            os.kill(actor, number)
            wait_until(lambda: states(client) == ["serving", "down"], "nobody noticed", MOST_SECONDS)
            is_told = "host 1" in server.log() and "is being stopped: running requests of replica 1 may end" in server.log()
            assert is_told == (number == signal.SIGTERM)
            assert client.post("/v1/completions", json=SHORT).status_code == 200
            wait_until(lambda: states(client) == ["serving", "serving"], "it did not come back")
        server.process.send_signal(signal.SIGTERM)
        assert server.end(40) == 0
    assert not children("ray::FollowerActor.run")

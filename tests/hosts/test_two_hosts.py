"""Two hosts, as two processes with two CPU devices each, compute what one device does; a host that dies takes the other with it."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from tests.helpers import goldens, host_scenario

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
MOST_SECONDS = 10
TOKENS = goldens.golden(host_scenario.NAME).results[0].tokens[:8]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def start(*arguments: str, errors: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "2"}
    with errors.open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )


def follower(directory: Path, more: dict[str, Any], errors: Path) -> "subprocess.Popen[str]":
    """Host 1, as the command line starts it."""
    options = {**host_scenario.options(directory), **more}
    config = directory / "config.json"
    config.write_text(json.dumps({name: value for name, value in options.items() if name != "model"}))
    code = "import sys; from jaxllm.cli.main import main; sys.exit(main())"
    return start(
        "-c", code, "serve", options["model"], "--headless", "--node-rank", "1", "--config", str(config), errors=errors
    )


@contextlib.contextmanager
def two_hosts(directory: Path, **options: Any) -> "Iterator[list[subprocess.Popen[str]]]":
    more = {"tensor_parallel_size": 4, "nnodes": 2, "master_port": free_port(), **options}
    arguments = ("-m", "tests.helpers.host_scenario", str(directory), json.dumps(more))
    processes = [start(*arguments, errors=directory / "host0"), follower(directory, more, directory / "host1")]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def line_of(process: "subprocess.Popen[str]", errors: Path) -> str:
    """Its next line; Gloo writes others."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("> "):
            return line[2:]
    raise AssertionError(errors.read_text())


def test_two_hosts_compute_what_one_device_does_and_end_together(directory):
    with two_hosts(directory) as hosts:
        one = EngineCore(EngineConfig.from_options(**host_scenario.options(directory)))
        wanted = host_scenario.answers(one, directory)
        one.shutdown()
        assert wanted[:4] == wanted[4:] and wanted[0] == TOKENS
        assert json.loads(line_of(hosts[0], directory / "host0")) == wanted
        assert [process.wait(20) for process in hosts] == [0, 0], [path.read_text() for path in directory.glob("host?")]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_host_that_dies_ends_all_requests_and_the_other_host(directory, killed):
    with two_hosts(directory, enable_lora=False) as hosts:
        assert json.loads(line_of(hosts[0], directory / "host0")) == TOKENS
        hosts[killed].kill()
        died, other = time.time(), hosts[1 - killed]
        if killed == 1:
            told = json.loads(line_of(other, directory / "host0"))
            assert "host 1 (" in told["error"] and "is lost" in told["error"] and told["at"] - died < MOST_SECONDS
        assert other.wait(MOST_SECONDS) == 1
    errors = (directory / f"host{1 - killed}").read_text()
    assert f"host {killed}" in errors and "Traceback" not in errors and "stack trace" not in errors, errors

"""Two hosts, as two processes with CPU devices of their own, compute what one device does; a host that dies takes the other with it."""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from tests.helpers import ending_with_parent, goldens, host_scenario, image_scenario, pictures, rank_scenario, stage_scenario
from tests.helpers.ports import free_port

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
MOST_SECONDS = 30
TOKENS = goldens.golden(host_scenario.NAME).results[0].tokens[:8]


def start(*arguments: str, num_devices: int, errors: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": str(num_devices)}
    with errors.open("w") as stderr:
        return subprocess.Popen(
            ending_with_parent.python(*arguments),
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )


def follower(
    scenario: ModuleType, directory: Path, more: dict[str, Any], *, num_devices: int, errors: Path
) -> "subprocess.Popen[str]":
    """Host 1, as the command line starts it."""
    options = {**scenario.options(directory), **more}
    config = directory / "config.json"
    config.write_text(json.dumps({name: value for name, value in options.items() if name != "model"}))
    code = "import sys; from jaxllm.cli.main import main; sys.exit(main())"
    arguments = ("-c", code, "serve", options["model"], "--headless", "--node-rank", "1", "--config", str(config))
    return start(*arguments, num_devices=num_devices, errors=errors)


@contextlib.contextmanager
def two_hosts(
    scenario: ModuleType, directory: Path, *how: str, num_devices: int = 2, **options: Any
) -> "Iterator[list[subprocess.Popen[str]]]":
    """how: further arguments of the scenario. num_devices: of each."""
    more = {"nnodes": 2, "master_port": free_port(), **options}
    arguments = ("-m", scenario.__name__, str(directory), json.dumps(more), *how)
    processes = [
        start(*arguments, num_devices=num_devices, errors=directory / "host0"),
        follower(scenario, directory, more, num_devices=num_devices, errors=directory / "host1"),
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def line_of(process: "subprocess.Popen[str]", errors: Path) -> str:
    """The next value that the process wrote in a line beginning with "> ", as JSON."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("> "):
            return line[2:]
    raise AssertionError(errors.read_text())


@pytest.fixture(scope="module")
def wanted(directory):
    """Answers of one device."""
    core = EngineCore(EngineConfig.from_options(**host_scenario.options(directory)))
    yield host_scenario.answers(core, directory)
    core.shutdown()


def test_two_hosts_compute_what_one_device_does_and_a_host_0_that_dies_ends_both(directory, wanted):
    """They split layers and tokens. Stages that split layers: see below."""
    layout = {"tensor_parallel_size": 2, "prefill_context_parallel_size": 2}
    with two_hosts(host_scenario, directory, "on", **layout) as hosts:
        assert wanted[:6] == wanted[6:] and wanted[0] == TOKENS
        assert json.loads(line_of(hosts[0], directory / "host0")) == wanted
        check_death(hosts, 0, directory, TOKENS)


def test_stages_on_two_hosts_compute_what_one_device_does_and_a_host_1_that_dies_ends_both(directory):
    """Requests of every kind, with preemptions, cached prefixes and sleep. Stages of two devices: test_ray.py; with adapters:
    tests/pipeline."""
    with two_hosts(stage_scenario, directory, "on", num_devices=1, pipeline_parallel_size=2) as hosts:
        one = EngineCore(EngineConfig.from_options(**stage_scenario.options(directory)))
        wanted = stage_scenario.answers(one)
        one.shutdown()
        found = json.loads(line_of(hosts[0], directory / "host0"))
        assert found.pop("preempted") and wanted.pop("preempted")
        assert found.keys() == wanted.keys()
        for name, numbers in wanted.items():
            np.testing.assert_allclose(found[name], numbers, atol=1e-4, err_msg=name)
        check_death(hosts, 1, directory, goldens.golden(stage_scenario.NAME).results[0].tokens[:8])


def test_images_on_two_hosts_are_those_of_one_device(tmp_path):
    """A rank each. Each device has the whole encoder, also where they split layers."""
    pictures.write(image_scenario.NAME, tmp_path / "model")
    wanted = [result.tokens for result in pictures.golden(image_scenario.NAME).results]
    layout = {"data_parallel_size": 2, "enable_expert_parallel": True}
    with two_hosts(image_scenario, tmp_path, num_devices=1, **layout) as hosts:
        assert json.loads(line_of(hosts[0], tmp_path / "host0")) == [wanted, wanted, wanted, wanted[:1]]
        assert [process.wait(60) for process in hosts] == [0, 0], [path.read_text() for path in tmp_path.glob("host?")]


@pytest.fixture(scope="module")
def of_one_device(directory):
    goldens.of_one_layer(rank_scenario.NAME, directory / rank_scenario.NAME)
    core = EngineCore(EngineConfig.from_options(**rank_scenario.options(directory)))
    yield rank_scenario.expected(core)
    core.shutdown()


def test_ranks_on_two_hosts_compute_what_one_device_does(directory, of_one_device):
    """Two each, with drafts and experts that move. Requests of every kind, with preemptions, cached prefixes, sleep, and a step that
    cannot be planned."""
    options = {
        "data_parallel_size": 4,
        "enable_expert_parallel": True,
        "enable_eplb": True,
        "eplb_config": {"window_size": 8, "step_interval": 8, "num_redundant_experts": 4},
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    }
    with two_hosts(rank_scenario, directory, **options) as hosts:
        for found in json.loads(line_of(hosts[0], directory / "host0")):
            assert found.keys() == of_one_device.keys()
            for name, numbers in of_one_device.items():
                np.testing.assert_allclose(found[name], numbers, atol=1e-4, err_msg=name)
        assert [process.wait(60) for process in hosts] == [0, 0], [path.read_text() for path in directory.glob("host?")]


def check_death(hosts: "list[subprocess.Popen[str]]", killed: int, directory: Path, tokens: list[int]) -> None:
    """Host 0 says these tokens and goes on; once one host is killed, the other tells so and ends."""
    assert json.loads(line_of(hosts[0], directory / "host0")) == tokens
    hosts[killed].kill()
    died, other = time.time(), hosts[1 - killed]
    if killed == 1:
        told = json.loads(line_of(other, directory / "host0"))
        assert "host 1 (" in told["error"] and "is lost" in told["error"] and told["at"] - died < MOST_SECONDS
    assert other.wait(MOST_SECONDS) == 1
    errors = (directory / f"host{1 - killed}").read_text()
    assert f"host {killed}" in errors and "Traceback" not in errors and "stack trace" not in errors, errors

"""Processes that fail, hang or are interrupted leave what they measured, and nothing that runs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxllm.errors import ConfigError
from jaxllm.scaling import processes
from jaxllm.scaling.processes import environment_of, find_devices, measure_size
from jaxllm.scaling.results import SizeResult
from tests.helpers import fake_scaling_child
from tests.scaling.samples import PLAN


@pytest.fixture(autouse=True)
def fake_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "run_child", fake_scaling_child.run_child)
    monkeypatch.setattr(processes, "END_SECONDS", 0.3)


def measured(faults: str, tmp_path: Path, hear: Any = lambda message: None, timeout: float | None = None) -> SizeResult:
    """The result of two devices; their process has ended."""
    result, heard = SizeResult(2), []

    def hear_all(size: int, message: SizeResult | str) -> None:
        heard.append(message)
        hear(message)

    plan = msgspec.structs.replace(PLAN, scalings=("strong",), options={"revision": faults})
    try:
        measure_size(
            plan,
            result,
            variables=environment_of(None),
            timeout_seconds=timeout,
            logs=tmp_path,
            log_level="info",
            hear=hear_all,
        )
    except KeyboardInterrupt:
        result.failure = "interrupted"
    if heard:
        with pytest.raises(ProcessLookupError):
            os.kill(int(heard[0].removeprefix("pid ")), 0)
    return result


def test_results_come_as_they_are_sent(tmp_path: Path) -> None:
    heard: list[Any] = []
    result = measured("", tmp_path, heard.append)
    assert result.failure is None and [row.num_requests for row in result.rows] == [1, 8] and len(result.breakdowns) == 2
    assert [type(message).__name__ for message in heard] == ["str"] + ["SizeResult"] * 6
    assert result.engine["device"] == "NVIDIA H200" and result.limits and result.seconds > 0


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("crash", "the process ended by signal 9 (Killed); its last line was: and no more"),
        ("exit", "the process ended with exit code 3"),
        ("heads", "tensor_parallel_size is 4, which does not divide 6 query heads"),
    ],
)
def test_a_process_that_fails_says_why_and_keeps_its_rows(fault: str, reason: str, tmp_path: Path) -> None:
    result = measured(f"2:{fault}", tmp_path)
    assert result.failure == reason and len(result.rows) == 1


def test_a_process_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    start = time.monotonic()
    result = measured("2:hang", tmp_path, timeout=0.5)
    assert result.failure == "stopped after 0.5 s (--timeout)" and time.monotonic() - start < 60
    assert len(result.rows) <= 1


def test_a_process_that_is_done_but_does_not_end_is_no_failure(tmp_path: Path) -> None:
    result = measured("2:linger", tmp_path)
    assert result.failure is None and len(result.rows) == 2


def test_a_ctrl_c_ends_the_process_and_keeps_its_rows(tmp_path: Path) -> None:
    def hear(message: Any) -> None:
        if isinstance(message, SizeResult) and message.rows:
            signal.raise_signal(signal.SIGINT)

    result = measured("2:hang", tmp_path, hear)
    assert len(result.rows) == 1 and result.failure == "interrupted"


@pytest.mark.slow
def test_a_process_ends_with_the_command(tmp_path: Path) -> None:
    """The command is killed, and cannot end what it started."""
    code = f"""
import multiprocessing, os, pathlib, signal
from jaxllm.scaling import processes
from jaxllm.scaling.results import SizeResult
from tests.scaling.samples import PLAN

def hear(size, message):
    print(multiprocessing.active_children()[0].pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

variables = processes.environment_of(1)
processes.measure_size(
    PLAN, SizeResult(1), variables=variables, timeout_seconds=None, logs=pathlib.Path({str(tmp_path)!r}), log_level="info", hear=hear
)
"""
    command = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert command.returncode == -signal.SIGKILL
    for _ in range(200):
        try:
            os.kill(int(command.stdout), 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("the process is left")


@pytest.mark.slow
def test_devices_are_found_by_a_process() -> None:
    assert find_devices(environment_of(3)) == {"platform": "cpu", "kind": "cpu", "count": 3}
    with pytest.raises(ConfigError, match="JAX finds no devices .*nonsense"):
        find_devices(environment_of(None) | {"JAX_PLATFORMS": "nonsense"})


def test_cpu_devices_are_forced_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    found = environment_of(3)
    assert found["XLA_FLAGS"].split() == [
        "--xla_cpu_enable_fast_math=false",
        processes.COMMAND_BUFFERS_WHILE_PROFILING,
        "--xla_force_host_platform_device_count=3",
    ]
    assert found["JAX_PLATFORMS"] == "cpu" and "JAX_NUM_CPU_DEVICES" not in found
    assert environment_of(None)["JAX_NUM_CPU_DEVICES"] == "8"

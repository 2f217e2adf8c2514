"""Sizes that fail, hang or are interrupted leave what they measured, and nothing that runs."""

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxllm.scaling import experiment, processes, report
from jaxllm.scaling.processes import Interrupted, environment_of, find_devices, measure_size
from jaxllm.scaling.rows import Results, Row, SizeResult, to_json
from tests.scaling.samples import PLAN


@pytest.fixture(autouse=True)
def fake_child(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(processes, "MODULE", "tests.helpers.fake_scaling_child")
    monkeypatch.setattr(processes, "END_SECONDS", 0.3)
    before = children()  # those of other tests, which may serve on
    yield
    assert children() <= before, "a process is left"


def children() -> set[int]:
    """Processes that this one started and has not waited for."""
    return {int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


def plan_with(faults: str, **changes: Any) -> Any:
    return dataclasses.replace(PLAN, scalings=("strong",), options={"revision": faults}, **changes)


def measured(size: int, faults: str, tmp_path: Path, timeout: float | None = None) -> tuple[SizeResult, list[Any]]:
    heard: list[Any] = []
    result = measure_size(
        plan_with(faults),
        size,
        variables=environment_of(None),
        timeout_seconds=timeout,
        log_path=tmp_path / "log",
        log_level="info",
        hear=heard.append,
    )
    return result, heard


def test_results_come_as_they_are_told(tmp_path: Path) -> None:
    result, heard = measured(2, "", tmp_path)
    assert result.failure is None and [row.num_requests for row in result.rows] == [1, 8]
    assert [type(told).__name__ for told in heard] == ["str", "Row", "Breakdown", "Row", "Breakdown"]
    assert result.engine["device"] == "NVIDIA H200" and result.limits and result.seconds > 0


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("crash", "the process ended by SIGKILL; its last line was: and no more"),
        ("exit", "the process ended with exit code 3"),
        ("heads", "tensor_parallel_size is 4, which does not divide 6 query heads"),
    ],
)
def test_a_size_that_fails_says_why_and_keeps_its_rows(fault: str, reason: str, tmp_path: Path) -> None:
    result, _ = measured(2, f"2:{fault}", tmp_path)
    assert result.failure == reason and len(result.rows) == 1


def test_a_size_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    start = time.monotonic()
    result, _ = measured(2, "2:hang", tmp_path, timeout=2.0)
    assert result.failure == "stopped after 2 s (--timeout)" and time.monotonic() - start < 10
    assert len(result.rows) <= 1


def test_a_process_that_is_done_but_does_not_end_is_no_failure(tmp_path: Path) -> None:
    result, _ = measured(2, "2:linger", tmp_path)
    assert result.failure is None and len(result.rows) == 2


def test_a_ctrl_c_ends_the_process_and_keeps_its_rows(tmp_path: Path) -> None:
    pids = []

    def hear(told: Any) -> None:
        if isinstance(told, str):
            pids.append(int(told.removeprefix("pid ")))
        if isinstance(told, Row):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted) as caught:
        measure_size(
            plan_with("2:hang"),
            2,
            variables=environment_of(None),
            timeout_seconds=None,
            log_path=tmp_path / "log",
            log_level="info",
            hear=hear,
        )
    assert len(caught.value.result.rows) == 1 and caught.value.result.failure == "interrupted"
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def run(plan: Any, output: Path, hear: Any = lambda size: lambda told: None, results: Results | None = None) -> Results:
    """The experiment; `results` are those of sizes that were measured before."""
    results = results or Results(to_json(plan))
    experiment.run(
        plan,
        results,
        plan.tensor_parallel_sizes,
        variables=environment_of(None),
        timeout_seconds=None,
        logs=output / "logs",
        log_level="info",
        output=output,
        hear=hear,
    )
    return results


def sizes_into(heard: list[int]) -> Any:
    """A `hear` that notes which sizes are measured."""

    def hear(size: SizeResult) -> Any:
        heard.append(size.tensor_parallel_size)
        return lambda told: None

    return hear


def test_the_other_sizes_go_on(tmp_path: Path) -> None:
    results = run(plan_with("1:skip,2:crash"), tmp_path)
    assert [len(size.rows) for size in results.sizes] == [2, 1, 2]
    assert [bool(size.failure) for size in results.sizes] == [False, True, False] and results.failed
    assert report.read(tmp_path / "results.json")[1] == results
    assert "the driver says no" in (tmp_path / "logs" / "tp2.log").read_text()


def test_after_a_ctrl_c_the_report_has_what_is_done(tmp_path: Path) -> None:
    def hear(size: SizeResult) -> Any:
        def heard(told: Any) -> None:
            if size.tensor_parallel_size == 2 and isinstance(told, Row):
                signal.raise_signal(signal.SIGINT)

        return heard

    results = run(plan_with(""), tmp_path, hear)
    assert results.interrupted and results.failed
    assert [(size.tensor_parallel_size, len(size.rows)) for size in results.sizes] == [(1, 2), (2, 1)]
    assert "the experiment was interrupted" in (tmp_path / "report.md").read_text()


def test_earlier_results_are_not_measured_again(tmp_path: Path) -> None:
    run(plan_with("", tensor_parallel_sizes=(1, 2)), tmp_path / "a")
    run(plan_with("", tensor_parallel_sizes=(4,)), tmp_path / "b")
    paths = [tmp_path / name / "results.json" for name in ("a", "b")]
    plan, results = experiment.earlier(paths, None)
    assert plan.tensor_parallel_sizes == (1, 2, 4) and len(results.rows) == 6 and not results.failed
    plan, results = experiment.earlier(paths[:1], plan_with("", tensor_parallel_sizes=(2, 4)))
    heard: list[int] = []
    run(plan, tmp_path / "c", sizes_into(heard), results)
    assert heard == [4] and [size.tensor_parallel_size for size in results.sizes] == [1, 2, 4]


def test_a_size_that_failed_is_measured_again_if_asked(tmp_path: Path) -> None:
    before = run(plan_with("2:crash"), tmp_path)
    assert before.complete_sizes == {1, 4}
    heard: list[int] = []
    hear = sizes_into(heard)
    results = msgspec.structs.replace(before, sizes=list(before.sizes))
    where = {"variables": environment_of(None), "timeout_seconds": None, "logs": tmp_path, "log_level": "info", "output": None}
    experiment.run(plan_with(""), results, (1,), hear=hear, **where)
    assert heard == [] and results.complete_sizes == {1, 4}
    experiment.run(plan_with(""), results, (1, 2), hear=hear, **where)
    assert heard == [2] and results.complete_sizes == {1, 2, 4} and len(results.sizes) == 3


def test_devices_are_found_by_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_devices(environment_of(None)) == {"platform": "gpu", "kind": "NVIDIA H200", "count": 4}
    monkeypatch.setattr(processes, "MODULE", "no.such.module")
    with pytest.raises(processes.ConfigError, match="JAX finds no devices .*No module named"):
        find_devices(environment_of(None))


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
    with contextlib.suppress(KeyError):
        assert environment_of(None)["JAX_NUM_CPU_DEVICES"] == "8"

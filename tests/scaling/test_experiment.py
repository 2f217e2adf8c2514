"""Sizes that fail or are interrupted leave the others, and earlier results are not measured again."""

from pathlib import Path

import msgspec

from jaxllm.scaling import experiment, report
from jaxllm.scaling.plan import Plan
from jaxllm.scaling.results import Results, SizeResult
from tests.scaling.samples import PLAN, decode


class Measurements:
    """In place of measuring: two rows of each size, of which a fault leaves the first."""

    def __init__(self, faults: dict[int, str] | None = None):
        self.faults = faults or {}
        self.sizes: list[int] = []

    def __call__(self, plan: Plan, result: SizeResult) -> None:
        size = result.tensor_parallel_size
        self.sizes.append(size)
        result.add(SizeResult(size, rows=[decode(size, 1, 8.0)]))
        if self.faults.get(size) == "ctrl-c":
            raise KeyboardInterrupt
        if result.failure is None and size in self.faults:
            result.failure = self.faults[size]
            return
        result.add(SizeResult(size, rows=[decode(size, 8, 8.0)]))


def run(output: Path, sizes: tuple[int, ...] = (1, 2, 4), faults: dict[int, str] | None = None) -> Results:
    results = Results(msgspec.structs.replace(PLAN, tensor_parallel_sizes=sizes))
    experiment.run(results, sizes, Measurements(faults), output)
    return results


def test_the_other_sizes_go_on(tmp_path: Path) -> None:
    results = run(tmp_path, faults={2: "out of memory"})
    assert [len(size.rows) for size in results.sizes] == [2, 1, 2]
    assert results.problems == ["tensor-parallel size 2 failed: out of memory"]
    assert report.read(tmp_path / "results.json") == results


def test_after_a_ctrl_c_the_report_has_what_is_done(tmp_path: Path) -> None:
    results = run(tmp_path, faults={2: "ctrl-c"})
    assert results.interrupted and results.problems
    assert [(size.tensor_parallel_size, len(size.rows)) for size in results.sizes] == [(1, 2), (2, 1)]
    assert "the experiment was interrupted" in (tmp_path / "report.md").read_text()


def test_earlier_results_are_not_measured_again(tmp_path: Path) -> None:
    run(tmp_path / "a", (1, 2))
    run(tmp_path / "b", (4,))
    paths = [tmp_path / name / "results.json" for name in ("a", "b")]
    results = experiment.join(paths, None)
    assert results.plan.tensor_parallel_sizes == (1, 2, 4) and len(results.rows) == 6 and not results.problems
    results = experiment.join(paths[:1], msgspec.structs.replace(PLAN, tensor_parallel_sizes=(2, 4)))
    measure = Measurements()
    experiment.run(results, (2, 4), measure, None)
    assert measure.sizes == [4] and [size.tensor_parallel_size for size in results.sizes] == [1, 2, 4]


def test_a_size_that_failed_is_measured_again_if_asked(tmp_path: Path) -> None:
    results = run(tmp_path, faults={2: "out of memory"})
    measure = Measurements()
    experiment.run(results, (1,), measure, None)
    assert measure.sizes == [] and results.complete_sizes == {1, 4}
    experiment.run(results, (1, 2), measure, None)
    assert measure.sizes == [2] and results.complete_sizes == {1, 2, 4} and len(results.sizes) == 3

"""`jaxllm bench scaling`: once as a user runs it on CPU devices, and its arguments, files and exit codes with a made-up process."""

import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from jaxllm.cli.main import command_parser, main
from jaxllm.scaling import charts, processes, report
from jaxllm.scaling.results import SizeResult
from jaxllm.scaling.tables import MEASUREMENTS, tables
from tests.helpers import fake_scaling_child

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TINY = (
    *("--batch-sizes", "1,2", "--input-len", "16", "--output-len", "8", "--num-prompts", "4", "--num-requests", "4"),
    *("--trace-steps", "2", "--max-num-seqs", "4", "--decode-buckets", "4", "--max-num-batched-tokens", "64"),
    *("--token-buckets", "64", "--compile-threads", "2"),
    *("--load-format", "dummy", "--hf-overrides", '{"num_hidden_layers": 1}'),
)
ON_TWO = ("--devices", "cpu:2", "--tensor-parallel-sizes", "2", "--scaling", "strong")


def test_the_demo_model_on_two_cpu_devices(tmp_path: Path) -> None:
    output = tmp_path / "out"
    code = "import sys; from jaxllm.cli.main import main; code = main(); assert 'jax' not in sys.modules; sys.exit(code)"
    command = [sys.executable, "-c", code, "bench", "scaling", "demo", *ON_TWO, *TINY, "--output", str(output)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    results = report.read(output / "results.json")
    assert [size.tensor_parallel_size for size in results.sizes] == [2]
    for size in results.sizes:
        assert [(row.work, row.num_requests) for row in size.rows] == [
            ("decode", 1),
            ("decode", 2),
            ("prefill", 4),
            ("mixed", 4),
        ]
        assert all(row.note is None and min(row.run_seconds) > 0 for row in size.rows)
        assert size.engine["platform"] == "cpu" and size.limits["copy_bytes_per_second"] > 0
        assert [found.source for found in size.breakdowns] == ["cpu thunks"] * 3
        assert size.all_reduces
    markdown = (output / "report.md").read_text(encoding="utf-8")
    page = (output / "report.html").read_text(encoding="utf-8")
    root = ElementTree.fromstring(page.removeprefix("<!doctype html>\n"))
    cells = [["".join(cell.itertext()) for cell in line] for line in root.iter("tr")]
    table = tables(results)[MEASUREMENTS]
    assert all(line in cells for line in table.cells()) and table.as_markdown() in markdown
    assert (output / "results.csv").read_text() == report.as_csv(results)
    assert done.stdout.splitlines()[: 1 + len(table.lines)] == table.as_text().splitlines()
    assert "share its cores" in markdown and (report.NO_CHARTS in markdown) == (not charts.can_draw())
    assert (output / "logs" / "tp2.log").stat().st_size


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four H200s, as tests/helpers/fake_scaling_child.py plays it. Without charts: the test above draws some."""
    monkeypatch.setattr(charts, "can_draw", lambda: False)
    monkeypatch.setattr(processes, "run_child", fake_scaling_child.run_child)
    monkeypatch.setattr("jaxllm.cli.bench_scaling.find_devices", lambda variables: fake_scaling_child.DEVICES)


def bench(*arguments: str) -> int:
    return main(["bench", "scaling", "some/model", "--work", "decode", "--output-len", "11", *arguments])


def test_sizes_are_by_default_the_powers_of_two_that_there_are(fake: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--batch-sizes", "1,8", "--json", "-q") == 0
    found = json.loads(capsys.readouterr().out)
    assert [size["tensor_parallel_size"] for size in found["sizes"]] == [1, 2, 4]
    assert [row["num_requests"] for row in found["sizes"][2]["rows"]] == [1, 4, 8, 32]
    assert found["environment"]["devices"] == {f"gpu {number}": "NVIDIA H200" for number in range(4)}
    assert found["command"] and found["started_at"] and found["plan"]["options"] == {}


def test_rows_and_what_they_say_beside_each_other_are_printed(fake: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--batch-sizes", "8", "--tensor-parallel-sizes", "1,2") == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[2].split()[:9] == ["2", "decode", "8", "4.00", "2", "000", "1", "000", "2.00"]
    assert "Weak scaling" in shown.out and "Where the time of a step goes" in shown.out
    assert "1 device: pid " in shown.err


def test_a_size_that_fails_makes_the_exit_code_1(fake: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--revision", "2:heads", "--output", str(tmp_path), "--batch-sizes", "8", "--scaling", "strong") == 1
    shown = capsys.readouterr()
    assert "tensor-parallel size 2 failed: tensor_parallel_size is 4, which does not divide 6 query heads" in shown.err
    assert [len(size.rows) for size in report.read(tmp_path / "results.json").sizes] == [1, 1, 1]


def test_skipped_work_is_told_and_makes_the_exit_code_1(fake: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--revision", "1:skip", "--tensor-parallel-sizes", "1", "--batch-sizes", "8") == 1
    assert "tensor-parallel size 1, decode of 64: no room" in capsys.readouterr().err


def test_ctrl_c_still_writes_the_report(
    fake: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from jaxllm.cli import bench_scaling

    class Impatient(bench_scaling.Screen):
        def hear(self, size: int, message: SizeResult | str) -> None:
            super().hear(size, message)
            if size == 2 and isinstance(message, SizeResult) and message.rows:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("jaxllm.cli.bench_scaling.Screen", Impatient)
    assert bench("--batch-sizes", "1,8", "--scaling", "strong", "--output", str(tmp_path)) == 130
    results = report.read(tmp_path / "results.json")
    assert results.interrupted and [len(size.rows) for size in results.sizes] == [2, 1]
    assert "the experiment was interrupted" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Where the time of a step goes" in capsys.readouterr().out


def test_runs_of_several_machines_become_one_report(fake: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, sizes in (("a", "1"), ("b", "2,4")):
        assert bench("--tensor-parallel-sizes", sizes, "--output", str(tmp_path / name), "-q") == 0
    files = [str(tmp_path / name / "results.json") for name in ("a", "b")]
    capsys.readouterr()
    assert main(["bench", "scaling", "--with", *files, "--output", str(tmp_path / "both")]) == 0
    printed = capsys.readouterr().out
    assert "Weak scaling" in printed and [line.split()[0] for line in printed.splitlines()[:3]] == ["devices", "1", "1"]
    assert len(report.read(tmp_path / "both" / "results.json").sizes) == 3
    assert bench("--tensor-parallel-sizes", "4", "--input-len", "5", "--with", files[0]) == 1
    assert "the earlier results are of another experiment: input_len is 5 here and 1024 there" in capsys.readouterr().err


def test_a_dry_run_says_what_would_be_measured(fake: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scaling", "x", "--dry-run", "--batch-sizes", "4"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == [
        "x on 4 × NVIDIA H200 (gpu)",
        "tensor-parallel size 1: decode of 4, prefill, mixed",
        "tensor-parallel size 2: decode of 4, decode of 8, prefill, mixed, all-reduce",
        "tensor-parallel size 4: decode of 4, decode of 16, prefill, mixed, all-reduce",
    ]


def test_a_recorded_workload_is_the_mixed_work(fake: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mix.json"
    path.write_text(json.dumps({"requests": [[5, 2], [7, 3], [9, 4]]}))
    arguments = ["bench", "scaling", "x", "--work", "mixed", "--requests", str(path), "--json", "-q"]
    assert main([*arguments, "--num-requests", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["requests"] == [[5, 2], [7, 3]]
    assert main([*arguments, "--num-requests", "4"]) == 2
    assert "--num-requests is 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["--tensor-parallel-sizes", "1,8"],
            1,
            "tensor-parallel size 8 needs more devices than the 4 of this machine (NVIDIA H200)",
        ),
        (["--tensor-parallel-sizes", "1,x"], 2, "'x' is not a whole number"),
        (["--tensor-parallel-sizes", ","], 2, "must be numbers with commas between them"),
        (["--batch-sizes", "0"], 2, "must be at least 1"),
        (["--work", "decode,nap"], 2, "'nap' is none of decode, prefill, mixed"),
        (["--devices", "gpu:2"], 2, "'gpu:2' must be cpu:N"),
        (["--output-len", "1"], 2, "give --output-len 2 or more"),
        (["--requests", "x"], 2, "--requests and --num-requests are for the mixed work"),
        (
            ["--tensor-parallel-sized", "2"],
            2,
            "unknown option '--tensor-parallel-sized'; did you mean '--tensor-parallel-sizes'?",
        ),
        (["--block-size", "7"], 1, "block_size is 7"),
        (["--with", "/no/such"], 1, "cannot read /no/such"),
        (["--timeout", "0"], 2, "must be above 0"),
    ],
)
def test_wrong_arguments_are_refused(
    fake: None, arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*arguments) == code
    assert message in capsys.readouterr().err


def test_the_size_is_not_an_option_of_the_engine_here(
    fake: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAXLLM_OPT_TENSOR_PARALLEL_SIZE", "2")
    assert bench() == 2
    assert "give --tensor-parallel-sizes" in capsys.readouterr().err


def test_results_are_not_overwritten(fake: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results.json").write_text("{}")
    assert bench("--output", str(tmp_path)) == 1
    assert "exists already; give another --output" in capsys.readouterr().err


def test_scaling_must_follow_bench_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "-q", "scaling"]) == 2
    assert "`scaling` must follow `bench` at once" in capsys.readouterr().err
    assert "--tensor-parallel-sizes" in command_parser("bench", "scaling").brief_help()

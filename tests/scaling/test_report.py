"""The files say what the results say."""

import csv
import io
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from jaxllm.errors import ConfigError
from jaxllm.scaling import charts, report
from jaxllm.scaling.results import Results, SizeResult
from jaxllm.scaling.tables import tables
from tests.scaling.samples import PLAN, results


def test_the_csv_holds_every_row_with_full_precision() -> None:
    lines = list(csv.DictReader(io.StringIO(report.as_csv(results()))))
    assert len(lines) == len(results().rows)
    for line, row in zip(lines, results().rows, strict=True):
        key = (line["tensor_parallel_size"], line["work"], line["num_requests"])
        assert key == (str(row.tensor_parallel_size), row.work, str(row.num_requests))
        assert float(line["tokens_per_second"]) == row.num_tokens / min(row.run_seconds)
        assert float(line["ms_per_step"]) == min(row.run_seconds) / row.num_steps * 1e3
    by_key = {(line["tensor_parallel_size"], line["num_requests"]): line for line in lines if line["work"] == "decode"}
    assert float(by_key["2", "8"]["strong_efficiency"]) == pytest.approx(0.8)
    assert float(by_key["2", "16"]["weak_efficiency"]) == pytest.approx(0.8)
    assert by_key["2", "16"]["strong_speed_up"] == "" and by_key["2", "16"]["weak_requests_per_device"] == "8"
    assert float(by_key["2", "8"]["communication_ms"]) == 0.5 and by_key["1", "8"]["waiting_ms"] == ""
    assert by_key["4", "8"]["note"] == "7 of 10 steps | odd"


def test_the_files_agree(tmp_path: Path) -> None:
    report.write(tmp_path, results())
    assert report.read(tmp_path / "results.json") == results()
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    root = ElementTree.fromstring(page.removeprefix("<!doctype html>\n"))
    cells = [["".join(cell.itertext()) for cell in line] for line in root.iter("tr")]
    for table in tables(results()).values():
        assert all([cell.strip("`") for cell in line] in cells for line in table.cells())
        assert table.as_markdown() in markdown
    for text in ("the process ended by SIGKILL", "needs 900 tokens of KV cache", "80%"):
        assert text in markdown and text in page
    assert "7 of 10 steps \\| odd" in markdown
    assert (report.NO_CHARTS in markdown) == (not charts.can_draw())


@pytest.mark.plot
def test_charts_are_files_and_parts_of_the_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    report.write(tmp_path, results())
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    root = ElementTree.fromstring((tmp_path / "report.html").read_text(encoding="utf-8").removeprefix("<!doctype html>\n"))
    named = {path.stem for path in (tmp_path / "plots").glob("*.svg")}
    assert named == {each.get("id") for each in root.iter("span") if each.get("id")}
    assert named >= {"time_per_token", "weak_efficiency", "speed_up", "step_parts_decode"}
    for path in (tmp_path / "plots").glob("*.svg"):
        svg = path.read_text(encoding="utf-8")
        texts = {"".join(text.itertext()) for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")}
        assert texts >= (
            {"communication", "launch on the host"} if path.stem.startswith("step_parts") else {"1", "2", "devices"}
        )
        assert f"(plots/{path.name})" in markdown


def test_without_matplotlib_the_report_has_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report.write(tmp_path, results())
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "pip install 'jaxllm[plot]'" in markdown and "![" not in markdown and not (tmp_path / "plots").exists()
    assert all(table.as_markdown() in markdown for table in tables(results()).values())


def test_a_page_needs_nothing_beside_it(tmp_path: Path) -> None:
    report.write(tmp_path, results())
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page and "src=" not in page and "@import" not in page and "<link" not in page


def test_little_or_nothing_is_reported_too(tmp_path: Path) -> None:
    nothing = Results(PLAN, sizes=[SizeResult(1, failure="out of memory: 3 < 4")])
    report.write(tmp_path, nothing)
    assert "out of memory: 3 &lt; 4" in (tmp_path / "report.html").read_text(encoding="utf-8")
    report.write(tmp_path, Results(PLAN, sizes=results().sizes[:1]))
    assert "All-reduces" not in (tmp_path / "report.md").read_text(encoding="utf-8")


COMPLETE = '{"plan": {"model": "x", "tensor_parallel_sizes": [1], "batch_sizes": [1], "input_len": 1, "output_len": 2}}'


def test_results_that_leave_out_what_has_a_default_are_read(tmp_path: Path) -> None:
    """As an earlier version may have written them."""
    (tmp_path / "results.json").write_text(COMPLETE)
    assert report.read(tmp_path / "results.json").plan.repeats == 2


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"plan": {}}', '{"plan": 3}', COMPLETE[:-1] + ', "colour": 1}', COMPLETE.replace("[1]", "[[1]]")]
)
def test_other_files_are_no_results(tmp_path: Path, content: str) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(ConfigError, match=r"results\.json"):
        report.read(tmp_path / "results.json")

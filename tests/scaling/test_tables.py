"""Speed-up and efficiency against numbers computed by hand, and what tables show."""

from typing import Any

import msgspec
import pytest

from jaxllm.scaling.results import Results, SizeResult
from jaxllm.scaling.tables import ALL_REDUCES, Table, figures, number, series, tables
from tests.scaling.samples import PLAN, decode, prefill, results


def by_key(scaling: str, found: Results) -> dict[tuple[str, int, int], tuple[float, float]]:
    """(speed-up, efficiency) by work, number of requests (weak: for each device) and devices."""
    return {
        (work, count, line["tensor_parallel_size"]): (line[f"{scaling}_speed_up"], line[f"{scaling}_efficiency"])
        for (work, count), group in series(found.plan, figures(found), scaling).items()
        for line in group
    }


def test_strong_scaling_compares_the_same_work() -> None:
    found = by_key("strong", results())
    # 8 ms become 5: 1.6 times as fast on 2 devices, 80 % of what they could be.
    assert found["decode", 1, 2] == pytest.approx((1.6, 0.8))
    assert found["decode", 8, 2] == pytest.approx((1.6, 0.8))
    assert found["decode", 8, 4] == pytest.approx((2.0, 0.5))
    assert found["prefill", 64, 2] == pytest.approx((1.6, 0.8))
    assert found["decode", 1, 1] == (1.0, 1.0)
    assert ("decode", 16, 2) not in found  # of weak scaling


def test_weak_scaling_compares_the_same_work_of_each_device() -> None:
    found = by_key("weak", results())
    # 8 requests at 10 ms are 800 tokens/s, 16 at 12.5 ms are 1280: 1.6 times, of 2.
    assert found["decode", 8, 2] == pytest.approx((1.6, 0.8))
    # 1 at 8 ms is 125 tokens/s, 2 at 5 ms are 400: 3.2 times, of 2.
    assert found["decode", 1, 2] == pytest.approx((3.2, 1.6))
    assert ("decode", 2, 4) not in found and ("prefill", 64, 2) not in found


def test_the_fewest_devices_that_were_measured_are_the_base() -> None:
    rows = [decode(4, 8, 5.0), decode(2, 8, 8.0), prefill(2, 500.0)]
    found = by_key("strong", Results(PLAN, sizes=[SizeResult(4, rows=rows[:1]), SizeResult(2, rows=rows[1:])]))
    assert found["decode", 8, 2] == (1.0, 1.0)
    assert found["decode", 8, 4] == pytest.approx((1.6, 0.8))


def test_only_what_the_plan_asks_for() -> None:
    found = results()
    found.plan = msgspec.structs.replace(PLAN, scalings=("weak",))
    assert not by_key("strong", found) and by_key("weak", found)
    assert all(line["strong_speed_up"] is None for line in figures(found))


def test_figures_are_of_the_fastest_run() -> None:
    line = next(line for line in figures(results()) if (line["tensor_parallel_size"], line["num_requests"]) == (2, 8))
    assert (line["ms_per_step"], line["tokens_per_second"]) == pytest.approx((6.25, 1280.0))
    assert (line["tokens_per_second_per_device"], line["share_of_limit"]) == pytest.approx((640.0, 0.5))
    [all_reduce] = tables(results())[ALL_REDUCES].lines
    assert all_reduce["bus_bytes_per_second"] == pytest.approx(65536 / 2e-5)


def test_tables_are_aligned_text_or_markdown() -> None:
    lines: list[dict[str, Any]] = [{"work": "decode", "strong_efficiency": 0.8, "note": "a | b"}, {"work": "mixed", "tok": 1}]
    table = Table(("work", "strong_efficiency", "note"), lines)
    assert table.as_text().splitlines() == [
        "     work  efficiency       note",
        "   decode         80%      a | b",
        "    mixed           –",
    ]
    assert table.as_text(with_header=False).count("\n") == 1
    assert table.as_markdown().splitlines()[2:] == ["| decode | 80% | a \\| b |", "| mixed | – |  |"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0.00"), (1234.5, "1 234"), (123.45, "123"), (12.345, "12.3"), (1.2345, "1.23"), (0.01234, "0.0123")]
    + [(12345, "12 345"), (3.9e12, "3.90e+12"), (2e-5, "2.00e-05"), ("xla", "xla")],
)
def test_numbers(value: float | str | None, text: str) -> None:
    assert number(value) == text

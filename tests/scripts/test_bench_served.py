"""What `bench_served.py` makes of its arguments and of the load generator's reports."""

import math

import pytest

from scripts.bench_served import HEADER, LOADS, TINY_LOADS, Load, Result


def test_loads_are_read() -> None:
    assert Load.parse("32:5:320") == Load(32.0, 5, 320) and Load.parse("32:5:320").seconds == 10
    assert Load.parse("inf:0:512") == Load(math.inf, 0, 512) and Load.parse("inf:0:512").seconds == 0
    assert [Load.parse(text).seed for text in LOADS.split() if text.startswith("32:")] == [0, 5, 6]
    assert TINY_LOADS.split() == [
        f"{load.rate:g}:{load.seed}:{load.num_prompts}" for load in map(Load.parse, TINY_LOADS.split())
    ]


@pytest.mark.parametrize("text", ["32:5", "0:0:1", "8:0:0", "fast:0:1"])
def test_what_is_no_load_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Load.parse(text)


def test_a_line_has_a_cell_for_each_column() -> None:
    report = {"failed": 0, "output_throughput": 3840.4}
    report |= {"median_ttft_ms": 34.12, "p99_ttft_ms": 113.0, "median_tpot_ms": 7.456, "p99_tpot_ms": 9.8}
    cells = Result(Load(32.0, 5, 320), report, 0.0014, 0).cells()
    assert cells == ["32", "5", "34.1", "113.0", "7.46", "9.80", "3840", "0.14%"] and len(cells) == len(HEADER)
    all_at_once = Result(Load(math.inf, 0, 512), report | {"failed": 2}, 0.0, 0)
    assert all_at_once.cells()[0] == "all 512 at once (2 failed)"

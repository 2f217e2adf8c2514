"""Speed-up and efficiency against numbers computed by hand."""

import dataclasses

import pytest

from jaxllm.scaling.figures import points
from tests.scaling.samples import PLAN, decode, prefill, results


def by_key(scaling: str, rows, plan=PLAN) -> dict:
    return {
        (point.row.work, point.num_requests, point.row.tensor_parallel_size): (point.speed_up, point.efficiency)
        for point in points(plan, rows)
        if point.scaling == scaling
    }


def test_strong_scaling_compares_the_same_work() -> None:
    found = by_key("strong", results().rows)
    # 8 ms become 5: 1.6 times as fast on 2 devices, 80 % of what they could be.
    assert found["decode", 1, 2] == pytest.approx((1.6, 0.8))
    assert found["decode", 8, 2] == pytest.approx((1.6, 0.8))
    assert found["decode", 8, 4] == pytest.approx((2.0, 0.5))
    assert found["prefill", 64, 2] == pytest.approx((1.6, 0.8))
    assert found["decode", 1, 1] == (1.0, 1.0)
    assert ("decode", 16, 2) not in found  # of weak scaling


def test_weak_scaling_compares_the_same_work_of_each_device() -> None:
    found = by_key("weak", results().rows)
    # 8 requests at 10 ms are 800 tokens/s, 16 at 12.5 ms are 1280: 1.6 times, of 2.
    assert found["decode", 8, 2] == pytest.approx((1.6, 0.8))
    # 1 at 8 ms is 125 tokens/s, 2 at 5 ms are 400: 3.2 times, of 2.
    assert found["decode", 1, 2] == pytest.approx((3.2, 1.6))
    assert ("decode", 2, 4) not in found and ("prefill", 64, 2) not in found


def test_the_fewest_devices_that_were_measured_are_the_base() -> None:
    rows = [decode(4, 8, 5.0), decode(2, 8, 8.0), prefill(2, 500.0)]
    found = by_key("strong", rows)
    assert found["decode", 8, 2] == (1.0, 1.0)
    assert found["decode", 8, 4] == pytest.approx((1.6, 0.8))


def test_only_what_the_plan_asks_for() -> None:
    plan = dataclasses.replace(PLAN, scalings=("weak",))
    assert not by_key("strong", results().rows, plan) and by_key("weak", results().rows, plan)


def test_a_row_tells_its_figures_of_the_fastest_run() -> None:
    row = decode(2, 8, 6.25)
    assert (row.ms_per_step, row.tokens_per_second) == pytest.approx((6.25, 1280.0))
    assert (row.tokens_per_second_per_device, row.share_of_limit) == pytest.approx((640.0, 0.5))
    all_reduce = results().sizes[1].all_reduces[0]
    assert all_reduce.bus_bytes_per_second == pytest.approx(65536 / 2e-5)

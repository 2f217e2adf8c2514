import math

import numpy as np
import pytest

from jaxllm.http_client.arrivals import RampUp, start_times


def test_an_infinite_rate_starts_all_at_once() -> None:
    assert start_times(5, math.inf) == [0.0] * 5


def test_the_last_request_starts_when_the_rate_says() -> None:
    times = start_times(80, 8.0)
    assert times == sorted(times) and times[0] > 0 and times[-1] == pytest.approx(10.0)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_as_bursty_as_asked(burstiness: float) -> None:
    gaps = np.diff(start_times(20_000, 10.0, burstiness=burstiness))
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)


def test_times_repeat_with_the_seed() -> None:
    assert start_times(9, 3.0, seed=1) == start_times(9, 3.0, seed=1) != start_times(9, 3.0, seed=2)


def test_a_ramp_goes_from_one_rate_to_the_other() -> None:
    assert list(RampUp("linear", 1, 9).rates(5)) == [1, 3, 5, 7, 9]
    assert list(RampUp("exponential", 1, 16).rates(5)) == pytest.approx([1, 2, 4, 8, 16])
    times = start_times(2000, math.inf, ramp_up=RampUp("linear", 1, 20))
    assert times[200] / 200 > 3 * (times[-1] - times[-200]) / 200

"""Least times of steps by their size."""

from jaxllm.engine.step_times import StepTimes


def test_a_time_is_the_least_of_the_latest_four_of_that_size_or_the_next_smaller_one():
    times = StepTimes()
    assert times.least(512) is None
    for seconds in (0.5, 4.0, 3.0, 2.0, 5.0):
        times.note(500, seconds)
    assert times.least(449) == times.least(512) == times.least(513) == times.least(4000) == 2.0 and times.least(448) is None
    times.note(640, 6.0)
    assert (times.least(512), times.least(513), times.least(700)) == (2.0, 6.0, 6.0)
    times.forget(700)
    assert times.least(700) == 2.0
    times.forget(300)
    assert times.least(512) == 2.0, "a smaller size"
    times.forget(512)
    times.forget(512)
    assert times.least(4000) is None

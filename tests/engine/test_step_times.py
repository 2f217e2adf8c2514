"""Least times of steps by their size."""

from jaxllm.engine.step_times import StepTimes


def test_a_time_is_the_least_of_the_latest_four_of_that_size_or_the_next_smaller_one():
    times = StepTimes()
    assert times.least(300) is None
    times.note(255, 1.0)
    assert times.least(255) is None, "too few tokens"
    for seconds in (0.5, 4.0, 3.0, 2.0, 5.0):
        times.note(300, seconds)
    assert times.least(319) == times.least(700) == 2.0 and times.least(287) is None
    times.note(640, 6.0)
    assert (times.least(639), times.least(640)) == (2.0, 6.0)
    times.forget(2000)
    assert times.least(640) == 2.0
    times.forget(287)
    assert times.least(640) == 2.0, "of a smaller size"
    times.forget(640)
    times.forget(640)
    assert times.least(640) is None


def test_steps_without_tokens_of_prompts_have_no_time():
    times = StepTimes()
    times.note(0, 1.0)
    times.forget(0)
    assert times.least(0) is None

from jaxllm.engine.work_clock import WorkClock


def test_only_time_with_work_counts_and_idle_is_the_part_without_a_step_in_flight() -> None:
    now = 0.0
    clock = WorkClock(lambda: now)
    totals = []
    for seconds, has_work, in_flight in [
        (5, True, False),
        (1, True, True),
        (4, True, False),
        (2, False, False),
        (7, True, True),
    ]:
        now += seconds
        clock.note(has_work=has_work, in_flight=in_flight)
        totals.append(clock.totals())
    assert totals == [(0, 0), (1, 1), (5, 1), (7, 3), (7, 3)]
    now += 3
    assert clock.totals() == (10, 3), "what is under way counts"
    assert clock.totals() == (10, 3)

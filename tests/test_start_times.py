"""Durations of the parts of a start: summed by name, and formatted as one line."""

import os
import threading
import time

from jaxllm.start_times import StartTimes, process_age_seconds


def test_parts_add_up_in_the_order_in_which_they_began():
    times = StartTimes()
    with times.part("weights"):
        times.add("tracing", 1.25)
        times.add("tracing", 2.0)
    assert list(times.seconds) == ["weights", "tracing"] and times.seconds["tracing"] == 3.25
    assert times.describe() == "weights 0.0, tracing 3.2"


def test_threads_add_up():
    times = StartTimes()

    def work() -> None:
        with times.part("compiling"):
            time.sleep(0.02)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert times.seconds["compiling"] >= 0.08


def test_the_age_of_the_process_grows_with_the_clock():
    age = process_age_seconds()
    if not os.path.exists("/proc/self/stat"):
        assert age is None
        return
    time.sleep(0.05)
    later = process_age_seconds()
    assert age is not None and later is not None and 0.03 <= later - age < 5

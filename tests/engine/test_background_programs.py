"""Programs that follow a start run between steps as they come, and the log tells when all are ready."""

import logging
import time

from jaxllm.engine.background_programs import BackgroundPrograms


class Executor:
    """Makes its queued programs when told."""

    num_loaded = 2

    def __init__(self, num_queued: int):
        self.num_queued, self.num_compiled = num_queued, 10

    def listen(self, on_made):
        self._on_made = on_made

    def make_one(self):
        self.num_queued, self.num_compiled = self.num_queued - 1, self.num_compiled + 1
        self._on_made()


def test_each_program_runs_between_steps_and_the_last_is_told_once(caplog):
    caplog.set_level(logging.INFO, logger="jaxllm")
    executor, ran = Executor(2), []
    programs = BackgroundPrograms(executor, lambda: ran.append(executor.num_compiled), began=time.perf_counter() - 60)
    programs.watch()
    executor.make_one()
    assert not ran, "there is no loop yet"
    posted = []
    programs.post = posted.append
    executor.make_one()
    assert not ran, "the thread that made it does not run it"
    posted.pop()()
    assert ran == [12] and "all 14 programs are ready, 60." in caplog.text
    executor.num_queued = 1  # a program that failed is asked for again
    executor.make_one()
    assert caplog.text.count("programs are ready") == 1 and len(posted) == 1


def test_nothing_is_told_where_nothing_follows(caplog):
    caplog.set_level(logging.INFO, logger="jaxllm")
    BackgroundPrograms(Executor(0), lambda: None, began=0.0).watch()
    assert not caplog.text

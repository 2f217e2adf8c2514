import threading

import pytest

from jaxllm.request import FinishReason
from jaxllm.runner.launcher import Launcher
from tests.helpers import engines, goldens


@pytest.fixture
def launcher():
    launcher = Launcher()
    yield launcher
    launcher.shutdown()


def test_calls_are_made_in_order_and_behind_the_caller(launcher):
    gate, made = threading.Event(), []
    futures = [launcher.submit(lambda i=i: (gate.wait(5), made.append(i), i)[2]) for i in range(3)]
    assert made == []
    gate.set()
    launcher.drain()
    assert made == [0, 1, 2] == [future.result() for future in futures]


def test_a_call_that_fails_raises_where_it_is_read_and_stops_no_other(launcher):
    bad, good = launcher.submit(lambda: 1 / 0), launcher.submit(lambda: 7)
    launcher.drain()
    assert good.result() == 7
    with pytest.raises(ZeroDivisionError):
        bad.result()


def test_steps_launched_by_the_thread_and_at_once_take_turns_without_a_difference(monkeypatch):
    """Requests come and go, so that the number of rows crosses the border between the two many times."""
    results = goldens.golden("llama_gqa").results
    core = engines.make_core("llama_gqa", max_num_seqs=4, decode_buckets=(2, 4))
    monkeypatch.setattr("jaxllm.runner.runner.MAX_THREAD_ROWS", 2)
    core.runner._launcher = Launcher()
    ways = []
    submit = core.runner._launcher.submit
    prepare = core.runner.prepare
    monkeypatch.setattr(core.runner._launcher, "submit", lambda call: (ways.append("thread"), submit(call))[1])
    monkeypatch.setattr(core.runner, "prepare", lambda batch: (ways.append(batch.layout.num_rows > 2), prepare(batch))[1])
    requests = [engines.request(str(i), r.prompt, max_tokens=6 + 9 * i) for i, r in enumerate(results[:4])]
    answers = engines.run(core, requests)
    for i, result in enumerate(results[:4]):
        assert answers[str(i)].tokens == result.tokens[: 6 + 9 * i]
    assert "thread" in ways and True in ways
    core.shutdown()


def test_a_launch_that_fails_in_the_thread_ends_its_requests():
    core = engines.make_core("llama_gqa", max_num_seqs=2)
    core.runner._launcher = Launcher()
    core.runner._decode = lambda step: 1 / 0
    answers = engines.run(core, [engines.request("a", [1, 2, 3], max_tokens=9)])
    assert answers["a"].finish_reason is FinishReason.ERROR
    core.shutdown()

"""Steps that a thread launches."""

import threading

import pytest

from jaxllm.device_ops import DropStaged
from jaxllm.request import FinishReason
from jaxllm.runner.ops import OpRunner
from jaxllm.worker_thread import WorkerThread
from tests.helpers import engines, goldens

pytestmark = pytest.mark.slow


def test_steps_launched_by_the_thread_and_at_once_take_turns_without_a_difference(monkeypatch):
    """Requests come and go, so that the number of rows crosses the border between the two many times."""
    results = goldens.golden("llama_gqa").results
    core = engines.make_core("llama_gqa", max_num_seqs=4, decode_buckets=(2, 4))
    core.runner._launcher, core.runner._max_thread_rows = WorkerThread("launch"), 2
    ways, prepare = set(), core.runner.prepare

    def noted(batches):
        ways.add((batches[0].layout.num_rows, threading.current_thread().name))
        return prepare(batches)

    monkeypatch.setattr(core.runner, "prepare", noted)
    requests = [engines.request(str(i), r.prompt, max_tokens=6 + 9 * i) for i, r in enumerate(results[:4])]
    answers = engines.run(core, requests)
    for i, result in enumerate(results[:4]):
        assert answers[str(i)].tokens == result.tokens[: 6 + 9 * i]
    assert {(2, "launch"), (4, threading.current_thread().name)} <= ways
    core.shutdown()


def test_a_launch_that_fails_in_the_thread_ends_its_requests():
    core = engines.make_core("llama_gqa", max_num_seqs=2)
    core.runner._launcher = WorkerThread("launch")
    core.runner._decode = lambda step: 1 / 0
    answers = engines.run(core, [engines.request("a", [1, 2, 3], max_tokens=9)])
    assert answers["a"].finish_reason is FinishReason.ERROR
    core.shutdown()


def test_requests_with_penalties_are_admitted_while_the_device_computes_their_prompts(monkeypatch):
    core = engines.make_core("llama_gqa", max_num_seqs=2)
    kinds, program = [], core.runner.program
    monkeypatch.setattr(core.runner, "program", lambda key: kinds.append(key.kind) or program(key))
    prompt = goldens.golden("llama_gqa").results[0].prompt
    engines.run(core, [engines.request(name, prompt, max_tokens=2, presence_penalty=0.5) for name in "ab"])
    assert [kind for kind in kinds if kind != "new_state"][:3] == ["forward", "admit", "sample"]
    core.shutdown()


def test_the_runner_of_an_operation_gets_the_batches_of_the_step_behind_it():
    core, seen = engines.make_core("llama_gqa", max_num_seqs=2), []

    class Noting(OpRunner):
        ops = (DropStaged,)

        def run(self, op):
            seen.append(op)

        def before_step(self, batches):
            seen.append(
                [(chunk.row.data.request_id, chunk.first_token, chunk.start, chunk.count) for chunk in batches[0].chunks]
            )

    core.runner.op_runners = (Noting(),)
    core.ops.add(DropStaged(7))
    prompts = {"a": [1, 2, 3], "b": [4, 5]}
    engines.run(core, [engines.request(name, prompt, max_tokens=3) for name, prompt in prompts.items()])
    assert seen == [DropStaged(7), [("a", 0, 0, 3), ("b", 3, 0, 2)], [], []]
    core.shutdown()

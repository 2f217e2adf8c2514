"""A host without the last stage launches a step as soon as the tokens that it computes are known, and no later. No programs run."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from jaxllm.device_ops import WriteAdapter
from jaxllm.kernel_policy import CPU
from jaxllm.pipeline.earlier_host import EarlierHost
from jaxllm.runner.batch import BatchBuilder
from jaxllm.runner.buckets import Buckets
from jaxllm.runner.rank_batches import RankBatches
from jaxllm.runner.rows import Rows
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler_output import NOT_FINITE, NewRequestData, RowStep, SchedulerOutput

BUCKETS = Buckets(CPU, decode_rows=(1, 2, 4), tokens=(16,), sample_rows=(4,), max_rows=4)


class FakeStage:
    """Notes the tokens of each step that it is given, and adapters that are written between steps."""

    peers = programs = None
    buckets = BUCKETS

    def __init__(self):
        self.tokens: list[list[int] | str] = []
        self.batches = RankBatches([BatchBuilder(Rows(4), BUCKETS, block_size=16, max_blocks=8)])

    def pass_on(self, batch, entering):
        assert not entering
        views = batch.layout.views(batch.buffer)
        self.tokens.append(views.token_ids_T[: views.columns_RC[:, 1].sum()].tolist())

    def drain(self):
        """Launches nothing in a thread."""

    def run_op(self, op):
        self.tokens.append(f"{op.staged} in {op.slot}")
        return []


def new(name, *tokens):
    data = NewRequestData(name, list(tokens), len(tokens), SamplingParams(temperature=0.0, seed=0), (), [1], 0, 0)
    return SchedulerOutput([data], [RowStep(name, 0, len(tokens), 0, [])], len(tokens), [], [])


def decode(**starts):
    return SchedulerOutput([], [RowStep(name, start, 1, 0, []) for name, start in starts.items()], len(starts), [], [])


def host():
    stage = FakeStage()
    leave = SimpleNamespace(send=lambda leaving: np.zeros(1), programs=None)
    return EarlierHost([stage], entry=None, leave=leave, num_stages=2), stage


def test_a_step_waits_for_its_own_tokens_alone():
    earlier, stage = host()
    first, second = new("a", 5, 6, 7), new("b", 8, 9)
    steps = [earlier.dispatch(plan) for plan in (first, second, decode(a=3))]
    assert stage.tokens == [[5, 6, 7], [8, 9]]
    assert [bool(step.done) for step in steps] == [True, True, False]
    earlier.take_tokens([11])
    assert stage.tokens[2:] == [[11]]  # while the tokens of the second step are not known
    earlier.dispatch(decode(b=2))
    earlier.dispatch(decode(a=4))
    assert len(stage.tokens) == 3
    earlier.take_tokens([12])
    assert stage.tokens[3:] == [[12]]
    earlier.take_tokens([NOT_FINITE])  # the request ends, and this step is of no use
    assert stage.tokens[4:] == [[0]]


def test_a_step_of_several_requests_has_the_latest_token_of_each():
    earlier, stage = host()
    for plan in (new("a", 5), new("b", 6), decode(a=1, b=1), decode(b=2, a=2)):
        earlier.dispatch(plan)
    for tokens in ([11], [12], [13, 14]):
        earlier.take_tokens(tokens)
    assert stage.tokens == [[5], [6], [11, 12], [14, 13]]


def test_an_adapter_is_written_after_the_steps_before_and_before_those_that_follow():
    earlier, stage = host()
    earlier.dispatch(SchedulerOutput([], [], 0, [], [], ops=(WriteAdapter(0, 7),)))
    for plan in (new("a", 5), decode(a=1)):
        earlier.dispatch(plan)
    earlier.dispatch(replace(new("b", 6), ops=(WriteAdapter(1, 8),)))
    assert stage.tokens == ["7 in 0", [5]]
    earlier.take_tokens([11])
    assert stage.tokens[2:] == [[11], "8 in 1", [6]]


def test_tokens_of_before_are_forgotten_with_the_steps():
    earlier, stage = host()
    earlier.dispatch(new("a", 5))
    earlier.forget_tokens()
    stage.batches.clear()
    earlier.dispatch(new("b", 6, 7))
    earlier.dispatch(decode(b=2))
    earlier.take_tokens([12])
    assert stage.tokens == [[5], [6, 7], [12]]

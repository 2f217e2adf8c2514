"""Prompt logprobs of several requests, with programs that tell which positions they were asked to score."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernel_policy import CPU
from jaxllm.parallel.mesh import make_mesh
from jaxllm.parallel.ranks import Ranks
from jaxllm.runner.buckets import Buckets
from jaxllm.runner.features.prompt_logprobs import PromptLogprobs, Targets
from jaxllm.runner.row_arrays import Logprobs
from jaxllm.scheduler_output import NO_ADAPTER, ModelRunnerOutput

HIDDEN = SimpleNamespace(hidden_TD=np.zeros((1024, 2)))
NUM_LOGPROBS = 3


class Device:
    """The logprob of a token is the index of the position before it."""

    params, put = (), staticmethod(lambda arrays: arrays)
    inputs = SimpleNamespace(logits_sets=((), ("adapters",)))

    def __init__(self, buckets):
        self.buckets, self.ranks, self.calls = buckets, Ranks(make_mesh()), []

    def program(self, key):
        def score(params, hidden_TD, chunk_2C, adapter_slot):
            self.calls.append((chunk_2C.shape[1], bool(key.features), None if adapter_slot is None else int(adapter_slot)))
            index_C, token_C = chunk_2C
            of_each = (np.tile(array[:, None], 1 + NUM_LOGPROBS) for array in (token_C, index_C.astype(np.float32)))
            return Logprobs(*map(jnp.asarray, (*of_each, index_C)))

        return score


def row(name, slot=NO_ADAPTER, num_logprobs=NUM_LOGPROBS):
    return SimpleNamespace(
        data=SimpleNamespace(request_id=name, adapter_slot=slot), num_prompt_logprobs=num_logprobs, prompt_parts=[]
    )


@pytest.mark.parametrize(("max_rows", "size", "num_calls"), [(4, 64, 11), (256, 256, 3), (1024, 256, 3)])
def test_positions_of_many_prompts_are_scored_together(max_rows, size, num_calls):
    """43 prompts of 15 tokens to score and one of a single token; then the end of a prompt with an adapter that changes the logits."""
    device, rows = (
        Device(Buckets(CPU, (4,), (1024,), (max_rows,), max_rows)),
        [row(f"{i}", num_logprobs=i % 2) for i in range(44)],
    )
    consumer = PromptLogprobs(device)
    lengths = [0 if i == 7 else 15 for i in range(44)]
    work = [
        Targets(row, 16 * i, [100 * i + place for place in range(length)], is_last=True)
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True))
    ]
    adapted = row("adapted", slot=2)
    work.insert(5, Targets(adapted, 900, [7, 8], is_last=False))
    output = ModelRunnerOutput({})
    (pending,) = consumer.launch([work], HIDDEN)
    pending.collect(output)
    assert device.calls == [(size, False, None)] * (num_calls) + [(size, True, 2)]
    assert output.prompt_logprobs.keys() == {f"{i}" for i in range(44)}
    for i, length in enumerate(lengths):
        found = output.prompt_logprobs[f"{i}"]
        assert found.token_ids.shape == (length, 1 + i % 2)
        assert found.token_ids[:, 0].tolist() == [100 * i + place for place in range(length)]
        assert found.logprobs[:, 0].tolist() == found.ranks.tolist() == [16 * i + place for place in range(length)]
    (pending,) = consumer.launch([[Targets(adapted, 3, [9], is_last=True)]], HIDDEN)
    pending.collect(output)
    assert output.prompt_logprobs["adapted"].logprobs[:, 0].tolist() == [900, 901, 3]

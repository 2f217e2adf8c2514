"""Which optional features a step needs, and the programs that are compiled with them."""

from dataclasses import dataclass

import numpy as np
import pytest

from jaxllm.config import EngineConfig, resolve_platform_defaults
from jaxllm.kernel_policy import CPU
from jaxllm.runner.batch import BatchBuilder
from jaxllm.runner.buckets import Buckets
from jaxllm.runner.feature_inputs import FeatureInputs
from jaxllm.runner.layout import NUM_ROW_COLUMNS, Column
from jaxllm.runner.rank_batches import alike
from jaxllm.runner.rows import Rows
from jaxllm.runner.step_feature import StepFeature
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler_output import NewRequestData, RowStep, SchedulerOutput

MAX_ROWS = 4


@dataclass(frozen=True)
class Colour(StepFeature):
    """Needed by rows in slot 7."""

    name = "colour"
    is_optional = changes_logits = True

    def is_needed(self, columns_RC, chunks):
        return bool((columns_RC[:, Column.ADAPTER] == 7).any())


@dataclass(frozen=True)
class Early(StepFeature):
    """Needed by the first three tokens of a prompt, in programs of few tokens for almost every engine. Two values of each token."""

    name = "early"
    is_optional = True
    is_in_decodes = False
    num_token_inputs = 2

    def is_needed(self, columns_RC, chunks):
        return any(chunk.start < 3 for chunk in chunks)

    def is_common(self, num_tokens):
        return num_tokens < 100


class Lengths(StepFeature):
    """Two columns of each row: how many tokens its prompt has, and its negative."""

    name = "lengths"
    num_columns = 2

    def row_columns(self, data):
        return data.num_prompt_tokens, -data.num_prompt_tokens


INPUTS = FeatureInputs((Early(), StepFeature(), Colour(), Lengths()))


@pytest.fixture
def ranks():
    """Two ranks without drafts."""
    config = EngineConfig.from_options(
        max_num_seqs=MAX_ROWS, max_num_batched_tokens=64, decode_buckets=(2,), token_buckets=(8,)
    )
    buckets = Buckets.choose(resolve_platform_defaults(config, on_gpu=False), CPU)
    return [BatchBuilder(Rows(MAX_ROWS, inputs=INPUTS), buckets, block_size=16, max_blocks=8) for _ in range(2)]


def step(builder, name, start, count, *, prompt=None, slot=-1):
    """The batch of a step that computes tokens of one request; prompt: of a new one."""
    row = RowStep(name, start, count, 0, [])
    new = [] if prompt is None else [_new(name, prompt, start, slot)]
    return builder.build(SchedulerOutput(new, [row], count, [], []))


def _new(name, prompt, start, slot):
    params = SamplingParams(temperature=0.0)
    return NewRequestData(name, prompt, len(prompt), params, (0,), [1], start, start, adapter_slot=slot)


def test_programs_have_no_optional_feature_each_or_all():
    assert INPUTS.sets == ((), ("colour",), ("early",), ("colour", "early"))
    assert INPUTS.decode_sets == INPUTS.logits_sets == ((), ("colour",))
    assert FeatureInputs().sets == FeatureInputs().decode_sets == ((),)
    three = FeatureInputs((Early(), Colour(), type("Third", (Early,), {"name": "third"})()))
    assert three.of_mixed(["early", "third"]) == three.all == ("colour", "early", "third"), (
        "two of three have no program of their own"
    )
    assert (
        INPUTS.are_common(("early",), 99)
        and not INPUTS.are_common(("colour", "early"), 100)
        and INPUTS.are_common(("colour",), 100)
    )


def test_a_step_takes_the_features_that_its_rows_and_tokens_need(ranks):
    builder = ranks[0]
    assert step(builder, "a", 0, 2, prompt=[1, 2, 3, 4, 5, 6]).features == ("early",)
    assert step(builder, "a", 2, 1).features == ("early",)
    batch = step(builder, "a", 3, 3)
    assert batch.features == () and not batch.is_decode
    batch = step(builder, "a", 6, 1)
    assert batch.features == () and batch.is_decode
    assert step(builder, "b", 0, 2, prompt=[1, 2], slot=7).features == ("colour", "early")
    batch = step(builder, "b", 2, 1)
    assert batch.features == ("colour",) and batch.is_decode


def test_the_last_token_of_a_prompt_alone_is_no_decode_if_decodes_lack_its_feature(ranks):
    """A new request takes the general way, one that is known already the fast one."""
    batch = step(ranks[0], "a", 1, 1, prompt=[1, 2])
    assert batch.features == ("early",) and not batch.is_decode and batch.samples_apart
    assert step(ranks[0], "b", 0, 1, prompt=[1, 2]).features == ("early",)
    batch = step(ranks[0], "b", 1, 1)
    assert batch.features == ("early",) and not batch.is_decode and batch.sampled


def test_ranks_take_the_features_of_all(ranks):
    for builder in ranks:
        step(builder, "a", 0, 4, prompt=[1, 2, 3, 4], slot=7 if builder is ranks[0] else -1)
    first, second = alike([step(builder, "a", 4, 1) for builder in ranks], ranks)
    assert first.features == second.features == ("colour",) and first.is_decode and second.is_decode
    first, second = alike([step(ranks[0], "a", 5, 1), step(ranks[1], "b", 0, 1, prompt=[5, 6])], ranks)
    assert first.features == second.features == ("colour", "early") and not first.is_decode and not second.is_decode
    np.testing.assert_array_equal(first.layout.views(first.buffer).columns_RC[0, Column.START], 5)


def test_features_add_columns_to_all_steps_and_values_of_tokens_to_those_that_need_them(ranks):
    assert INPUTS.columns == {"lengths": slice(NUM_ROW_COLUMNS, NUM_ROW_COLUMNS + 2)}
    builder = ranks[0]
    batch = step(builder, "a", 0, 2, prompt=[1, 2, 3, 4])
    own = INPUTS.columns["lengths"]
    views = batch.layout.views(batch.buffer)
    assert views.columns_RC[:, own].tolist() == [[4, -4]] + [[0, 0]] * (MAX_ROWS - 1)
    found = INPUTS.token_inputs_of(batch, "early")
    assert found.shape == (2, 8) and not found.any()
    found[1, :2] = 5, 6
    assert batch.buffer[-8:].tolist() == [5, 6, 0, 0, 0, 0, 0, 0], "a view of the buffer"
    batch = step(builder, "a", 4, 1)
    assert batch.is_decode and batch.layout.num_inputs == 0 and INPUTS.token_inputs_of(batch, "early") is None
    assert batch.layout.views(batch.buffer).columns_RC[0, own].tolist() == [4, -4]


def test_ranks_keep_the_columns_of_features_and_get_room_for_values_of_tokens(ranks):
    """One rank runs a decode, the other the beginning of a prompt."""
    for builder in ranks:
        step(builder, "a", 0, 5, prompt=[1, 2, 3, 4, 5])
    decode, beginning = alike([step(ranks[0], "a", 5, 1), step(ranks[1], "b", 0, 1, prompt=[5, 6])], ranks)
    assert decode.layout == beginning.layout and decode.layout.num_inputs == 2
    assert INPUTS.token_inputs_of(decode, "early").shape == (2, 8) and not INPUTS.token_inputs_of(decode, "early").any()
    own = INPUTS.columns["lengths"]
    assert [batch.layout.views(batch.buffer).columns_RC[0, own].tolist() for batch in (decode, beginning)] == [[5, -5], [2, -2]]

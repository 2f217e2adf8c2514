from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from jaxllm.config import EngineConfig, resolve_platform_defaults
from jaxllm.kernel_policy import CPU
from jaxllm.runner.batch import BatchBuilder
from jaxllm.runner.buckets import Buckets
from jaxllm.runner.features.prompt_logprobs import PromptLogprobs
from jaxllm.runner.layout import FROM_ROW, NUM_ROW_COLUMNS, Column, StepLayout
from jaxllm.runner.program_choice import ProgramChoice
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.rows import Rows
from jaxllm.sampling.variants import Variant
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler_output import NewRequestData, RowStep, SchedulerOutput

BLOCK_SIZE, MAX_BLOCKS, MAX_ROWS = 16, 8, 4


@pytest.fixture
def builder():
    config = EngineConfig.from_options(max_num_seqs=MAX_ROWS, max_num_batched_tokens=64, decode_buckets=(1, 2))
    buckets = Buckets.choose(resolve_platform_defaults(config, on_gpu=False), CPU)
    return BatchBuilder(Rows(MAX_ROWS), buckets, block_size=BLOCK_SIZE, max_blocks=MAX_BLOCKS)


def new(request_id, token_ids, blocks, *, computed=0, cached=None, **params):
    params = {"temperature": 0.0, **params}
    return NewRequestData(
        request_id,
        token_ids,
        len(token_ids),
        SamplingParams(**params),
        (0,),
        blocks,
        computed,
        computed if cached is None else cached,
    )


@pytest.fixture
def drafting():
    """A builder for rows of up to three drafts; two groups of layers."""
    config = EngineConfig.from_options(max_num_seqs=MAX_ROWS, max_num_batched_tokens=64, decode_buckets=(1, 2))
    buckets = Buckets.choose(resolve_platform_defaults(config, on_gpu=False), CPU, num_drafts=3)
    sizes = {"block_size": 2, "max_blocks": MAX_BLOCKS, "num_groups": 2, "num_updates": 4}
    return BatchBuilder(Rows(MAX_ROWS), buckets, **sizes)


def plan(new_requests=(), cached=(), counts=None):
    """`cached` is (request_id, new_block_ids, num_computed_tokens)."""
    rows = [RowStep(request_id, start, counts[request_id], 0, blocks) for request_id, blocks, start in cached]
    rows += [RowStep(data.request_id, data.num_computed_tokens, counts[data.request_id], 0, []) for data in new_requests]
    return SchedulerOutput(list(new_requests), rows, sum(counts.values()), [], [])


def test_views_cover_the_buffer_without_overlap():
    layout = StepLayout(num_rows=3, num_tokens=5, num_updates=2, num_columns=NUM_ROW_COLUMNS + 1, num_inputs=4)
    buffer = np.zeros(layout.size, np.int32)
    views = layout.views(buffer)
    for view in (views.columns_RC, views.token_ids_T, views.update_index_U, views.update_block_U, views.inputs_IT):
        view += 1
    assert (buffer == 1).all()


def test_rows_that_sample_come_before_rows_that_do_not(builder):
    long, short = new("long", list(range(100, 140)), [1, 2, 3]), new("short", [7, 8], [4])
    batch = builder.build(plan([long, short], counts={"long": 20, "short": 2}))
    assert [row.data.request_id for row in batch.sampled] == ["short"]
    views = batch.layout.views(batch.buffer)
    assert views.token_ids_T[:22].tolist() == [7, 8, *range(100, 120)]
    rows = builder.rows.by_request
    assert views.columns_RC[:2, Column.ROW].tolist() == [rows["short"].index, rows["long"].index]
    # Only the row that samples receives a token.
    assert views.columns_RC[:2, Column.TOKEN_ROW].tolist() == [rows["short"].index, MAX_ROWS]
    assert (views.columns_RC[2:, Column.ROW] == MAX_ROWS).all()
    assert (views.columns_RC[2:, Column.NUM_TOKENS] == 0).all()


def test_decode_takes_its_tokens_from_the_rows_and_pads_to_a_decode_size(builder):
    requests = [new(name, [5, 6], [i + 1]) for i, name in enumerate("abc")]
    builder.build(plan(requests, counts={"a": 2, "b": 2, "c": 2}))
    batch = builder.build(plan(cached=[(name, [], 2) for name in "abc"], counts={"a": 1, "b": 1, "c": 1}))
    assert batch.is_decode and batch.layout.num_rows == MAX_ROWS
    views = batch.layout.views(batch.buffer)
    assert views.token_ids_T[:3].tolist() == [FROM_ROW] * 3
    assert views.columns_RC[:, Column.START].tolist() == [2, 2, 2, 0]


def test_new_blocks_are_appended_to_the_request_row(builder):
    builder.build(plan([new("a", [1] * 16, [5])], counts={"a": 16}))
    batch = builder.build(plan(cached=[("a", [9], 16)], counts={"a": 1}))
    row = builder.rows.by_request["a"].index
    views = batch.layout.views(batch.buffer)
    real = views.update_index_U < (MAX_ROWS + 1) * MAX_BLOCKS
    assert views.update_index_U[real].tolist() == [row * MAX_BLOCKS + 1]
    assert views.update_block_U[real].tolist() == [9]


def test_blocks_of_a_long_cached_prefix_overflow_into_a_write_of_their_own(builder):
    request = new("a", [1] * 100, list(range(1, 8)), computed=99, cached=99)
    batch = builder.build(plan([request], counts={"a": 1}))
    views = batch.layout.views(batch.buffer)
    assert batch.is_decode and batch.layout.num_updates == 1
    assert batch.extra_updates is not None
    written = [*views.update_block_U.tolist(), *batch.extra_updates[1].tolist()]
    assert written == list(range(1, 8))


@pytest.mark.parametrize(
    ("params", "variant", "is_decode"),
    [
        ({}, Variant.GREEDY, True),
        ({"temperature": 1.0, "seed": 1}, Variant.RANDOM, True),
        ({"presence_penalty": 1.0}, Variant.FULL, False),
        ({"logprobs": 2}, Variant.RANDOM, False),
    ],
)
def test_the_batch_takes_the_cheapest_program_that_serves_every_row(builder, params, variant, is_decode):
    builder.build(plan([new("plain", [1], [1]), new("other", [1], [2], **params)], counts={"plain": 1, "other": 1}))
    batch = builder.build(plan(cached=[("plain", [], 1), ("other", [], 1)], counts={"plain": 1, "other": 1}))
    assert (batch.variant, batch.is_decode) == (variant, is_decode)


@pytest.mark.parametrize("is_ready", [True, False])
@pytest.mark.parametrize("params", [{"presence_penalty": 1.0}, {"logprobs": 2}, {"logprob_token_ids": [3]}, {"masked": True}])
def test_a_decode_that_another_program_samples_computes_single_tokens_where_its_program_is_ready(builder, params, is_ready):
    params, asked = dict(params), []
    buckets = replace(builder.buckets, rows_apart=(4,))
    builder.choice = ProgramChoice(buckets, is_there=lambda key: key.kind != "forward_rows" or is_ready, ask=asked.append)
    masked = ["other"] if params.pop("masked", False) else []
    counts = {"plain": 1, "other": 1}
    builder.build(plan([new("plain", [1], [1]), new("other", [1], [2], **params)], counts=counts))
    batch = builder.build(replace(plan(cached=[("plain", [], 1), ("other", [], 1)], counts=counts), masked_request_ids=masked))
    assert (
        batch.samples_apart and batch.is_decode == is_ready and asked == ([] if is_ready else [ProgramKey("forward_rows", 4)])
    )
    assert batch.variant == (Variant.MASKED if masked else Variant.FULL if "presence_penalty" in params else Variant.RANDOM)
    assert batch.layout.num_rows == (4 if is_ready else len(batch.layout.views(batch.buffer).columns_RC))


def test_logprobs_take_the_full_sampler_where_it_alone_reports_them():
    rows = Rows(MAX_ROWS, full_logprobs=True)
    assert rows.add(new("a", [1], [1], logprobs=2)).variant == Variant.FULL
    assert rows.add(new("b", [1], [2])).variant == Variant.GREEDY


@pytest.mark.parametrize("counts", [(40,), (16, 24), (20, 19, 1), (1,)])
def test_prompt_logprobs_cover_each_prompt_token_but_the_first_once_over_chunks(builder, counts):
    prompt, computed, chunks = list(range(50, 50 + sum(counts))), 0, []
    for count in counts:
        first = [new("a", prompt, [1, 2, 3], prompt_logprobs=0)] if not computed else []
        cached = [("a", [], computed)] if computed else []
        batch = builder.build(plan(first, cached, counts={"a": count}))
        assert batch.is_decode == (count == 1)
        chunks += PromptLogprobs(SimpleNamespace(buckets=None)).select(batch.chunks)
        computed += count
    assert [target for chunk in chunks for target in chunk.token_ids] == prompt[1:]
    assert [chunk.is_last for chunk in chunks] == [*[False] * (len(counts) - 1), True]
    assert builder.build(plan(cached=[("a", [], computed)], counts={"a": 1})).chunks == []


def drafts_plan(*rows, most, new_requests=()):
    """rows: (request_id, start, num_tokens, num_drafts, new_blocks)."""
    steps = [RowStep(*row) for row in rows]
    steps += [RowStep(data.request_id, 0, len(data.token_ids), 0, []) for data in new_requests]
    return SchedulerOutput(list(new_requests), steps, sum(step.num_tokens for step in steps), [], [], num_drafts=most)


def test_a_decode_with_drafts(drafting):
    drafting.build(
        drafts_plan(most=3, new_requests=[new(name, [5, 6, 7], [i, i + 1, i, i + 1]) for i, name in enumerate("abc")])
    )
    batch = drafting.build(drafts_plan(("a", 3, 4, 3, [20, 21, 30, 31]), ("c", 5, 2, 1, []), ("b", 3, 1, 0, [22, 32]), most=3))
    assert batch.is_decode and (batch.width, batch.next_width, batch.layout.num_rows) == (4, 4, 4)
    assert [row.data.request_id for row in batch.sampled] == list("acb") and batch.chunks == []
    views, rows = batch.layout.views(batch.buffer), drafting.rows.by_request
    columns = views.columns_RC
    assert columns[:, Column.ROW].tolist() == [*(rows[name].index for name in "acb"), MAX_ROWS]
    assert columns[:, Column.TOKEN_ROW].tolist() == columns[:, Column.ROW].tolist()
    assert columns[:3, Column.START].tolist() == [FROM_ROW] * 3
    assert columns[:, Column.NUM_TOKENS].tolist() == [4, 2, 1, 0]
    assert columns[:, Column.NUM_DRAFTS].tolist() == [3, 1, 0, 0]
    assert columns[:3, Column.LIMIT].tolist() == [8, 4, 6]
    assert views.token_ids_T[:3].tolist() == [FROM_ROW] * 3
    # Each group's blocks follow those that the row has in it.
    first = {name: rows[name].index * 2 * MAX_BLOCKS for name in "ab"}
    written = dict(zip(views.update_index_U.tolist(), views.update_block_U.tolist(), strict=True))
    expected = {first["a"] + 2: 20, first["a"] + 3: 21, first["a"] + 10: 30, first["a"] + 11: 31}
    expected |= {first["b"] + 2: 22, first["b"] + 10: 32}
    assert {index: block for index, block in written.items() if index < np.iinfo(np.int32).max} == expected
    assert batch.extra_updates is None


@pytest.mark.parametrize(("most", "width"), [(0, 1), (1, 3), (2, 3), (3, 4)])
def test_the_width_of_a_decode_is_that_of_the_drafts_it_proposes(drafting, most, width):
    drafting.build(drafts_plan(most=3, new_requests=[new("a", [5], [1, 2])]))
    batch = drafting.build(drafts_plan(("a", 1, 1, 0, []), most=most))
    assert (batch.is_decode, batch.width, batch.next_width) == (True, width, width)


def test_the_last_token_of_a_prompt_decodes_beside_drafts(drafting):
    """The host knows it, and how many tokens are computed before it."""
    long = new("b", [7, 8, 9], [3, 4, 5, 6])
    first = SchedulerOutput(
        [new("a", [5], [1, 2]), long], [RowStep("a", 0, 1, 0, []), RowStep("b", 0, 2, 0, [])], 3, [], [], num_drafts=3
    )
    views = drafting.build(first)
    columns = views.layout.views(views.buffer).columns_RC
    assert columns[:2, Column.NEXT_TOKEN].tolist() == [0, 9]  # only a row that draws nothing has a next token that is known
    batch = drafting.build(drafts_plan(("a", 1, 3, 2, []), ("b", 2, 1, 0, []), most=3))
    views = batch.layout.views(batch.buffer)
    assert batch.is_decode and views.token_ids_T[:2].tolist() == [FROM_ROW, 9]
    assert views.columns_RC[:2, Column.START].tolist() == [FROM_ROW, 2]
    chunk = batch.chunks[0]
    assert (chunk.row.data.request_id, chunk.place, chunk.first_token, chunk.start, chunk.count) == ("b", 1, 4, 2, 1)


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_mixed_step_samples_as_many_tokens_as_a_row_has_drafts(drafting, drafts):
    drafting.build(drafts_plan(most=3, new_requests=[new("a", [5], [1, 2])]))
    arriving = new("b", [7, 8, 9], [3, 4, 5, 6])
    batch = drafting.build(drafts_plan(("a", 1, 1 + drafts, drafts, []), most=3, new_requests=[arriving]))
    assert not batch.is_decode and (batch.width, batch.next_width) == (3 if drafts else 1, 4)
    views = batch.layout.views(batch.buffer)
    assert views.token_ids_T[: 4 + drafts].tolist() == [FROM_ROW] * (1 + drafts) + [7, 8, 9]
    assert views.columns_RC[:2, Column.START].tolist() == [FROM_ROW, 0]
    assert views.columns_RC[:2, Column.NUM_DRAFTS].tolist() == [drafts, 0]


def test_freed_rows_are_given_again(builder):
    builder.build(plan([new(name, [1], [i + 1]) for i, name in enumerate("abcd")], counts=dict.fromkeys("abcd", 1)))
    builder.rows.remove("b")
    builder.rows.remove("unknown")
    builder.build(plan([new("e", [1], [9])], counts={"e": 1}))
    assert set(builder.rows.by_request) == set("acde")
    builder.rows.check_integrity()

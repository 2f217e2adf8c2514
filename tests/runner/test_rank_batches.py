"""Batches of data-parallel ranks in the layout of the largest, without devices."""

import numpy as np

from jaxllm.config import EngineConfig, resolve_platform_defaults
from jaxllm.kernel_policy import CPU
from jaxllm.runner.batch import BatchBuilder
from jaxllm.runner.buckets import Buckets
from jaxllm.runner.layout import FROM_ROW, Column
from jaxllm.runner.rank_batches import alike
from jaxllm.runner.rows import LogprobsKind, Rows
from jaxllm.sampling.variants import Variant
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler_output import NewRequestData, RowStep, SchedulerOutput

MAX_ROWS = 4


def new_rank():
    """Up to three drafts, two groups of layers."""
    config = EngineConfig.from_options(
        max_num_seqs=MAX_ROWS, max_num_batched_tokens=64, decode_buckets=(1, 2), token_buckets=(8,)
    )
    buckets = Buckets.choose(resolve_platform_defaults(config, on_gpu=False), CPU, num_drafts=3)
    return BatchBuilder(Rows(MAX_ROWS), buckets, block_size=2, max_blocks=16, num_groups=2, num_updates=24)


def plan(*rows, new=(), num_drafts=3):
    return SchedulerOutput(list(new), list(rows), sum(row.num_tokens for row in rows), [], [], num_drafts=num_drafts)


def admit(rank, name, num_tokens, *, num_known=None, **params):
    """num_known: of the prompt, of which so many tokens are computed."""
    params = {"temperature": 0.0, "seed": 0, **params}
    prompt = [*range(1, 1 + (num_known or num_tokens))]
    data = NewRequestData(name, prompt, len(prompt), SamplingParams(**params), (), [1, 2], 0, 0)
    return rank.build(plan(RowStep(name, 0, num_tokens, 0, []), new=[data]))


def test_decodes_with_drafts_beside_a_prompt_have_their_tokens_one_after_the_other():
    ranks = [new_rank(), new_rank(), new_rank()]
    for name in "ab":
        admit(ranks[0], name, 2)
    blocks = [*range(10, 34)]
    decodes = ranks[0].build(plan(RowStep("a", 2, 3, 2, blocks), RowStep("b", 2, 2, 1, blocks)))
    assert decodes.is_decode and decodes.width == 4 and decodes.extra_updates is None
    wanted = decodes.layout.views(decodes.buffer)
    first, second, third = alike([decodes, admit(ranks[1], "c", 3), ranks[2].build(plan())], ranks)
    assert first.layout == second.layout == third.layout
    assert (first.layout.num_tokens, first.width, first.next_width, first.is_decode) == (8, 4, 4, False)
    assert (second.width, second.next_width, third.width, third.next_width) == (4, 4, 4, 4)
    views = first.layout.views(first.buffer)
    assert views.token_ids_T.tolist() == [FROM_ROW] * 5 + [0] * 3
    np.testing.assert_array_equal(views.columns_RC[:2], wanted.columns_RC)
    assert (views.columns_RC[2:, Column.ROW] == MAX_ROWS).all()
    # The blocks that have no room here are written by another program.
    assert first.extra_updates is not None
    here = views.update_index_U != np.iinfo(np.int32).max
    found = np.concatenate([views.update_index_U[here], first.extra_updates[0]])
    np.testing.assert_array_equal(found, wanted.update_index_U)
    np.testing.assert_array_equal(np.concatenate([views.update_block_U[here], first.extra_updates[1]]), wanted.update_block_U)


def test_decodes_alone_have_the_rows_of_the_most():
    ranks = [new_rank(), new_rank()]
    for name in "ab":
        admit(ranks[0], name, 2)
    most = ranks[0].build(plan(RowStep("a", 2, 3, 2, []), RowStep("b", 2, 1, 0, [])))
    first, second = alike([most, ranks[1].build(plan())], ranks)
    assert first is not second and first.layout == second.layout == most.layout and first.layout.num_rows == 2
    assert second.is_decode and (second.width, second.next_width) == (4, 4)
    np.testing.assert_array_equal(first.buffer, most.buffer)
    assert (second.layout.views(second.buffer).columns_RC[:, Column.NUM_TOKENS] == 0).all()


def test_what_one_rank_samples_all_do():
    """Beside a greedy decode, one rank samples with logprobs, one has a part of a prompt, and one has nothing."""
    ranks = [new_rank() for _ in range(4)]
    admit(ranks[0], "a", 2)
    decode = ranks[0].build(plan(RowStep("a", 2, 1, 0, []), num_drafts=0))
    random = admit(ranks[1], "b", 3, temperature=1.0, logprobs=2)
    part = admit(ranks[2], "c", 3, num_known=5)
    assert decode.is_decode and not part.sampled
    batches = alike([decode, random, part, ranks[3].build(plan())], ranks)
    for batch in batches:
        assert (batch.variant, batch.logprobs, batch.sample_rows) == (Variant.RANDOM, LogprobsKind.TOP, MAX_ROWS)
        assert batch.samples_apart and not batch.is_decode
    assert [len(batch.sampled) for batch in batches] == [1, 1, 0, 0]


def test_parts_of_prompts_alone_sample_nothing():
    ranks = [new_rank(), new_rank()]
    batches = alike([admit(ranks[0], "a", 3, num_known=5), ranks[1].build(plan())], ranks)
    assert [batch.sample_rows for batch in batches] == [0, 0]

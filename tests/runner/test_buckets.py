import pytest

from jaxllm.config import EngineConfig, resolve_platform_defaults
from jaxllm.errors import ConfigError
from jaxllm.kernel_policy import GPU, platform_policy
from jaxllm.runner.buckets import Buckets


def choose(*, on_gpu=True, num_drafts=0, **options):
    config = resolve_platform_defaults(EngineConfig.from_options(**options), on_gpu=on_gpu)
    return Buckets.choose(config, platform_policy(on_gpu=on_gpu), num_drafts=num_drafts)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_largest_step_fits_and_every_size_is_the_smallest_that_holds_it(on_gpu):
    buckets = choose(on_gpu=on_gpu, max_num_seqs=100, max_num_batched_tokens=3000)
    for sizes, fit, limit in [
        (buckets.decode_rows, buckets.fit_decode, 100),
        (buckets.tokens, buckets.fit_tokens, 3000),
        (buckets.sample_rows, buckets.fit_sample, 100),
    ]:
        assert sizes == tuple(sorted(set(sizes))) and sizes[-1] == limit
        for wanted in range(1, limit + 1):
            assert fit(wanted) == min(size for size in sizes if size >= wanted)


def test_configured_sizes_are_kept_and_completed_to_the_limit():
    buckets = choose(max_num_seqs=8, max_num_batched_tokens=64, decode_buckets=(3,), token_buckets=(16, 999))
    assert buckets.decode_rows == (3, 8)
    assert buckets.tokens == (16, 64)


@pytest.mark.parametrize("max_num_seqs", [1, 7])
@pytest.mark.parametrize("options", [{}, {"decode_buckets": (8, 16)}, {"num_drafts": 2}], ids=str)
def test_programs_of_decodes_on_a_gpu_have_eight_rows_though_no_so_many_requests_run(max_num_seqs, options):
    buckets = choose(max_num_seqs=max_num_seqs, **options)
    assert buckets.decode_rows == (8,) and buckets.rows_apart == (() if "num_drafts" in options else (8,))
    assert (buckets.max_rows, buckets.sample_rows) == (max_num_seqs, (max_num_seqs,))
    assert choose(max_num_seqs=max_num_seqs, on_gpu=False).decode_rows[-1] == max_num_seqs


def test_steps_of_long_prompts_have_sizes_of_their_own_above_those_beside_decodes():
    buckets = choose(max_num_seqs=8, max_num_batched_tokens=2500, max_num_prefill_tokens=8192)
    assert buckets.tokens[-6:] == (2048, 2500, 3072, 4096, 6144, 8192)
    buckets = choose(max_num_seqs=8, max_num_batched_tokens=48, max_num_prefill_tokens=100, token_buckets=(16,))
    assert buckets.tokens == (16, 48, 100)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({}, "max_num_prefill_tokens is 1000, less than max_num_batched_tokens 3072"),
        ({"max_num_batched_tokens": 2000}, "less than max_num_batched_tokens 2000"),
        ({"max_num_batched_tokens": 500, "enable_chunked_prefill": False}, "without chunked prefill each step holds whole"),
        (
            {"max_num_batched_tokens": 500, "enable_expert_parallel": True, "data_parallel_size": 2},
            "data-parallel ranks compute steps together",
        ),
    ],
)
def test_a_limit_of_prompts_alone_that_could_not_be_kept_is_refused(options, fault):
    with pytest.raises(ConfigError, match=fault):
        choose(max_num_seqs=8, max_num_prefill_tokens=1000, **options)


def test_a_step_never_has_more_rows_than_tokens_or_than_the_limit():
    buckets = choose(max_num_seqs=8, max_num_batched_tokens=64)
    assert [buckets.rows_for_tokens(n) for n in (1, 8, 64)] == [1, 8, 8]


def test_decodes_are_sampled_apart_on_a_gpu_unless_others_must_choose_alike_or_drafts_are_proposed():
    assert choose(max_num_seqs=100).rows_apart == (8, 16, 32, 64, 100)
    assert choose(max_num_seqs=100, decode_buckets=(40,)).rows_apart == (40, 100)
    assert choose(on_gpu=False).fit_rows_apart(3) is None
    assert choose(nnodes=2, pipeline_parallel_size=2).rows_apart == ()
    assert choose(num_drafts=2).rows_apart == ()


def test_a_cpu_has_few_sizes_because_each_takes_it_seconds_to_compile():
    buckets = choose(on_gpu=False)
    assert buckets.tokens == (4, 16, 64, 256, 512)
    assert buckets.decode_rows == (1, 4, 8, 16, 32)


@pytest.mark.parametrize(("gibibytes", "limit"), [(24, 256), (63, 256), (64, 1024), (130, 1024)])
def test_a_big_gpu_runs_more_requests_at_once(gibibytes, limit):
    config = resolve_platform_defaults(EngineConfig.from_options(), on_gpu=True, device_bytes=gibibytes << 30)
    assert Buckets.choose(config, GPU).max_rows == limit


@pytest.mark.parametrize(("gibibytes", "is_mixture", "tokens"), [(130, False, 3072), (63, True, 3072), (64, True, 8192)])
def test_a_mixture_computes_more_tokens_at_once_on_a_big_gpu(gibibytes, is_mixture, tokens):
    config = EngineConfig.from_options()
    config = resolve_platform_defaults(config, on_gpu=True, device_bytes=gibibytes << 30, is_mixture=is_mixture)
    assert config.scheduler.max_num_batched_tokens == tokens


def test_every_decode_that_may_have_drafts_fits_into_a_size_with_drafts():
    config = resolve_platform_defaults(
        EngineConfig.from_options(max_num_seqs=200, max_num_batched_tokens=256, decode_buckets=(128,)), on_gpu=True
    )
    buckets = Buckets.choose(config, GPU, num_drafts=3)
    assert buckets.decode_rows == (64, 128, 200)
    for num_rows in range(1, GPU.max_draft_rows + 1):
        assert buckets.widths_of(buckets.fit_decode(num_rows)) == buckets.widths_of(buckets.fit_sample(num_rows)) == (1, 3, 4)
    assert [buckets.fit_width(num_drafts) for num_drafts in range(4)] == [1, 3, 3, 4]


def test_no_step_has_more_tokens_than_the_largest():
    buckets = choose(max_num_seqs=8, max_num_batched_tokens=48, max_num_prefill_tokens=100)
    assert (buckets.max_tokens, buckets.num_rows) == (100, 9)
    assert choose(max_num_seqs=30, max_num_batched_tokens=48, num_drafts=3).max_tokens == 30 * 4

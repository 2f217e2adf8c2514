"""A kernel policy: its sizes, its choices by number of tokens, and that another one can choose alike for all of them."""

import inspect
from dataclasses import fields

import pytest

from jaxllm.config import EngineConfig, resolve_platform_defaults
from jaxllm.kernel_policy import ALIKE, CPU, GPU, KernelPolicy
from jaxllm.runner.buckets import Buckets
from tests.helpers import engines
from tests.helpers.parity import check

SIZES = (1, 4, 16, 17, 64, 65, 255, 256, 2047, 2048, 8192, 1 << 20)


def choices(policy: KernelPolicy) -> dict[str, list[object]]:
    """Answers of each method for the sizes, by name."""
    methods = inspect.getmembers(policy, inspect.ismethod)
    return {name: [method(size) for size in SIZES] for name, method in methods if not name.startswith("_")}


def test_a_policy_can_choose_alike_for_steps_of_all_sizes() -> None:
    found = choices(ALIKE)
    assert {"has_drafts", "num_runs", "sends_tokens", "shares_tokens", "is_weight_only", "compiler_options"} <= found.keys()
    for name, answers in found.items():
        assert all(answer == answers[0] for answer in answers), name
        assert any(answer != choices(GPU)[name][0] for answer in choices(GPU)[name]), f"{name} depends on no size"
    options = EngineConfig.from_options(max_num_seqs=100, max_num_batched_tokens=3000)
    for num_drafts in (0, 3):
        buckets = Buckets.choose(resolve_platform_defaults(options, on_gpu=True), ALIKE, num_drafts=num_drafts)
        assert (buckets.decode_rows, buckets.tokens, buckets.sample_rows, buckets.rows_apart) == ((100,), (3000,), (100,), ())
        assert buckets.widths_of(1) == buckets.widths_of(100) == buckets.widths


@pytest.mark.slow
def test_an_engine_of_one_size_has_the_same_tokens() -> None:
    core = engines.make_core("llama_gqa", kernel_policy=ALIKE, decode_buckets=None, token_buckets=None)
    assert {(key.kind, key.size) for key in core.runner.shapes.common_keys() if key.kind in ("decode", "forward")} == {
        ("decode", 4),
        ("forward", 112),
    }
    check("llama_gqa", core)
    core.shutdown()


def test_gated_layers_are_computed_in_one_where_hardly_any_rows_are_padding() -> None:
    sizes = (255, 256, 320, 448, 512, 640, 768, 896, 1024, 1280, 1792, 5000, 8192)
    assert [size for size in sizes if GPU.gates_in_one(size)] == [256, 512, 768, 1024, 1280, 1792, 5000, 8192]
    assert [size for size in sizes if GPU.gates_in_one(size, is_scaled=True)] == [5000, 8192]
    assert not any(CPU.gates_in_one(size) for size in sizes)


def test_without_rows_of_drafts_no_step_has_drafts() -> None:
    config = resolve_platform_defaults(EngineConfig.from_options(max_num_seqs=8, decode_buckets=(4,)), on_gpu=True)
    policy = KernelPolicy((), (), max_draft_rows=0)
    buckets = Buckets.choose(config, policy, num_drafts=3)
    assert buckets.decode_rows == (4, 8) and buckets.widths_of(4) == (1,)


@pytest.mark.parametrize("policy", [CPU, GPU], ids=["CPU", "GPU"])
def test_sizes_are_sorted_and_thresholds_not_negative(policy: KernelPolicy) -> None:
    for field in fields(policy):
        value = getattr(policy, field.name)
        if isinstance(value, tuple):
            assert value == tuple(sorted(set(value))) and min(value, default=1) > 0, field.name
        else:
            assert value >= 0, field.name
    assert policy.max_weight_only_rows <= policy.max_triton_rows


@pytest.mark.parametrize(("num_tokens", "num_runs"), [(2046, 1), (2048, 2), (2049, 1), (2050, 2)])
def test_only_an_even_number_of_many_tokens_is_computed_in_two_runs(num_tokens: int, num_runs: int) -> None:
    assert GPU.num_runs(num_tokens) == num_runs

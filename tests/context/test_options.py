"""Options that context parallelism excludes, and an engine's sizes with it."""

import pytest

from jaxllm.config import EngineConfig, resolve_platform_defaults
from jaxllm.context.refused import check_model
from jaxllm.engine import kernel_choice
from jaxllm.errors import ConfigError
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.mesh import meshes_of
from jaxllm.parallel.topology import Topology
from jaxllm.runner.memory import memory_plan
from tests.helpers import engines, goldens

SPLIT = {"prefill_context_parallel_size": 4}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"pipeline_parallel_size": 2}, r"is 4 and pipeline_parallel_size 2, but stages .*; leave one of them out"),
        (
            {"nnodes": 3},
            r"tensor_parallel_size is 1 and prefill_context_parallel_size 4, 4 devices, which 3 hosts .* choose a multiple of 3",
        ),
        ({"speculative_config": {"method": "ngram"}}, r"is 4 and speculative_config .*, but drafts"),
        ({"prefill_context_parallel_size": 0}, r"prefill_context_parallel_size is 0, must be at least 1"),
    ],
)
def test_options_that_contradict_it_are_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        EngineConfig.from_options(**{**SPLIT, **options})


@pytest.mark.parametrize(("name", "told"), [("deepseek_v2_lite", "latent attention"), ("qwen3_next", "linear attention")])
def test_models_that_it_does_not_take_are_refused_before_anything_is_loaded(name, told):
    with pytest.raises(ConfigError, match=rf"prefill_context_parallel_size is 4, but .* has {told}.*--tensor-parallel-size"):
        engines.make_core(name, **SPLIT)
    check_model(EngineConfig.from_options(), load_model_config(goldens.FOLDER / name))


def test_too_few_devices_are_told():
    with pytest.raises(
        ConfigError, match=r"context_parallel_size is 8 and tensor_parallel_size 2, which takes 16 devices, .* has 8"
    ):
        meshes_of(Topology(tensor=2, context=8))


def test_the_cache_of_each_device_has_its_part_of_the_tokens():
    model = load_model_config(goldens.FOLDER / "llama_gqa")
    given = {**engines.SMALL, "kv_cache_memory_bytes": 1 << 16, "max_num_seqs": 64}
    one, four = (
        memory_plan(resolve_platform_defaults(EngineConfig.from_options(**given, **more), on_gpu=False), model)
        for more in ({}, SPLIT)
    )
    assert (one.block_size, four.block_size) == (16, 64) and one.block_bytes == four.block_bytes
    assert one.num_blocks == four.num_blocks and four.weight_bytes == one.weight_bytes
    assert four.num_blocks * four.block_size == 4 * one.num_blocks * one.block_size


def test_steps_are_larger():
    one, two = (
        resolve_platform_defaults(EngineConfig.from_options(**more), on_gpu=True, device_bytes=80 << 30)
        for more in ({}, {"prefill_context_parallel_size": 2})
    )
    assert (one.scheduler.max_num_batched_tokens, two.scheduler.max_num_batched_tokens) == (3072, 6144)


def test_only_kernels_that_take_a_part_of_the_keys_are_chosen():
    model = load_model_config(goldens.FOLDER / "qwen3")
    found = kernel_choice.attention_candidates("auto", model, 16, on_gpu=True, has_part=True)
    assert found["paged_attention"] == ("triton", "xla")
    with pytest.raises(ConfigError, match=r"attention_implementation is 'mosaic', .* and keys in parts; use auto"):
        kernel_choice.attention_implementation("mosaic", model, 16, on_gpu=True, has_part=True)  # in float32

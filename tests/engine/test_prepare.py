"""Preparation before the weights: fingerprints, and a cache that fits the largest step."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from jaxllm.cache_spec import row_bytes
from jaxllm.config import EngineConfig
from jaxllm.device_ops import GatherBlocks
from jaxllm.engine import prepare, resolve, stage_plans, step_sizes
from jaxllm.engine.prepare import Prepared
from jaxllm.engine.resolve import resolve_sizes
from jaxllm.engine_plan import plan_engine
from jaxllm.errors import ConfigError
from jaxllm.layers.build import build_model
from jaxllm.loaders.load import load_weights
from jaxllm.models.load_config import load_model_config
from jaxllm.runner.runner import ModelRunner
from jaxllm.sampling.processors import Processor
from jaxllm.sampling.variants import Variant
from jaxllm.start_times import StartTimes
from tests.helpers import engines, goldens
from tests.helpers.tiers import need_tiers

DIRECTORY = goldens.golden("llama_gqa").directory


def prepared(**options) -> Prepared:
    config = EngineConfig.from_options(model=str(DIRECTORY), **{**engines.SMALL, **options})
    return Prepared.of(config, DIRECTORY, (), StartTimes())


def test_programs_are_prepared_without_host_memory():
    """A machine that compiles them for others need not have it."""
    need_tiers()
    assert prepared(kv_offloading_size=900_000.0).runner.op_runner(GatherBlocks).num_slots > 1


def difference(one: Prepared, other: Prepared) -> set[str]:
    a, b = one.fingerprint(), other.fingerprint()
    return {name for name in {*a, *b} if a.get(name) != b.get(name)}


def test_equal_engines_have_equal_fingerprints_of_plain_values():
    one = prepared()
    assert difference(one, prepared()) == set()
    assert json.loads(json.dumps(one.fingerprint())).keys() == one.fingerprint().keys()


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"max_num_seqs": 3}, {"max_num_seqs", "num_gpu_blocks"}),
        ({"max_model_len": 64}, {"max_model_len", "num_gpu_blocks"}),
        ({"tensor_parallel_size": 2}, {"tensor_parallel_size"}),
        ({"decode_buckets": (2, 4)}, {"decode_buckets"}),
        ({"dtype": "bfloat16"}, {"model's dtype", "model's kv_cache_dtype"}),
        ({"attention_implementation": "reference"}, {"attention_implementation"}),
        ({"enable_prefix_caching": False, "seed": 3}, set()),  # no program depends on these
    ],
)
def test_what_programs_depend_on_shows(options, names):
    assert difference(prepared(), prepared(**options)) == names


def test_by_default_states_by_row_take_at_most_a_quarter_of_the_device(caplog):
    caplog.set_level(logging.INFO, logger="jaxllm")
    directory = goldens.golden("qwen3_next").directory
    options = {
        **engines.SMALL,
        "max_num_seqs": None,
        "max_num_batched_tokens": None,
        "decode_buckets": None,
        "token_buckets": None,
    }
    config, model = resolve_sizes(EngineConfig.from_options(model=str(directory), **options), directory, device_bytes=8 << 20)
    assert config.scheduler.max_num_seqs == int(2 * 2**20 / row_bytes(model) - 1) // 8 * 8 < 256
    assert "max_num_seqs is" in caplog.text
    options["max_num_seqs"] = 200
    config, _ = resolve_sizes(EngineConfig.from_options(model=str(directory), **options), directory, device_bytes=8 << 20)
    assert config.scheduler.max_num_seqs == 200


@pytest.mark.parametrize(
    ("given", "max_num_seqs", "on_gpu", "sizes"),
    [
        ((1, 4, 64), 64, True, (8, 64)),
        ((1,), 64, True, (8,)),
        ((1, 2), 4, True, (8,)),
        ((8, 16), 64, True, (8, 16)),
        ((1, 4, 64), 64, False, (1, 4, 64)),
    ],
)
def test_on_a_gpu_decodes_of_a_few_rows_run_as_ones_of_eight(caplog, given, max_num_seqs, on_gpu, sizes):
    directory = goldens.golden("llama_gqa").directory
    options = {"model": str(directory), "decode_buckets": given, "max_num_seqs": max_num_seqs}
    config, _ = resolve_sizes(EngineConfig.from_options(**options), directory, device_bytes=8 << 20 if on_gpu else None)
    assert config.compile.decode_buckets == sizes
    assert (f"decode_buckets has {given[0]}: steps of fewer than {sizes[0]} rows run as ones" in caplog.text) == (
        sizes != given
    )


@pytest.mark.parametrize(
    ("name", "gibibytes", "options", "beside_decodes", "alone"),
    [
        ("llama_gqa", 64, {}, 3072, 8192),
        ("llama_gqa", 63, {}, 3072, 3072),
        ("llama_gqa", 64, {"max_num_batched_tokens": 2048}, 2048, 2048),  # a promise about memory and latency
        ("llama_gqa", 64, {"max_num_prefill_tokens": 6144}, 3072, 6144),
        ("llama_gqa", 64, {"max_model_len": 5000}, 3072, 5000),
        ("llama_gqa", 64, {"pipeline_parallel_size": 2}, 3072, 3072),
        ("llama_gqa", 64, {"prefill_context_parallel_size": 2}, 6144, 6144),
        ("gemma3", 64, {}, 3072, 3072),  # windows
        (
            "mixtral",
            64,
            {"enable_expert_parallel": True, "data_parallel_size": 5, "max_num_batched_tokens": 4096},
            4096,
            4096,
        ),  # data-parallel ranks
    ],
)
def test_steps_of_long_prompts_are_larger_by_default_where_that_costs_little(name, gibibytes, options, beside_decodes, alone):
    directory = goldens.golden(name).directory
    asked = {"model": str(directory), "hf_overrides": {"max_position_embeddings": 1 << 15}, "block_size": 16, **options}
    config, _ = resolve_sizes(EngineConfig.from_options(**asked), directory, device_bytes=gibibytes << 30)
    assert (config.scheduler.max_num_batched_tokens, config.scheduler.max_num_prefill_tokens) == (beside_decodes, alone)


def test_larger_steps_may_not_take_the_memory_of_the_cache(monkeypatch):
    monkeypatch.setattr(step_sizes, "weight_bytes", lambda model: (64 << 30) - (1 << 20))
    directory = goldens.golden("llama_gqa").directory
    options = {"model": str(directory), "hf_overrides": {"max_position_embeddings": 1 << 15}}
    config, _ = resolve_sizes(EngineConfig.from_options(**options), directory, device_bytes=64 << 30)
    assert config.scheduler.max_num_prefill_tokens == config.scheduler.max_num_batched_tokens == 3072


def test_programs_depend_on_the_implementation_of_every_op():
    one = prepared()
    for op, name in {
        "paged_attention": "attention_implementation",
        "rope_cache_write": "rope_cache_write implementation",
        "sampling": "sampling implementation",
    }.items():
        assert difference(one, replace(one, kernels=replace(one.kernels, **{op: "triton"}))) == {name}


def test_the_source_is_part_of_it(monkeypatch):
    one = prepared()
    before = one.fingerprint()
    monkeypatch.setattr("jaxllm.engine.fingerprint.source_digest", lambda: "other")
    after = one.fingerprint()
    assert {name for name in after if after[name] != before[name]} == {"jaxllm version"}


def test_programs_that_contain_a_custom_processor_are_not_stored():
    processor = Processor("same", lambda logits_RV, context: logits_RV)
    config = EngineConfig.from_options(model=str(DIRECTORY), **engines.SMALL)
    plain, custom = prepared().runner.shapes, Prepared.of(config, DIRECTORY, (processor,), StartTimes()).runner.shapes
    assert all(map(plain.is_storable, plain.all_keys()))
    kept_out = [key for key in custom.all_keys() if not custom.is_storable(key)]
    assert {(key.kind, key.variant) for key in kept_out} == {
        ("sample", Variant.FULL),
        ("new_state", Variant.GREEDY),
        ("admit", Variant.GREEDY),
    }


def test_weights_are_counted_exactly_before_they_are_loaded():
    one = prepared()
    weights = load_weights(one.model_config, one.stages[0].model, DIRECTORY, load_format="auto", mesh=one.mesh)
    one.runner.set_weights(weights)
    assert one.plan.weight_bytes == sum(x.nbytes for x in one.runner.params)


def test_weights_of_another_shape_are_a_bug():
    one, other = prepared(), prepared(dtype="bfloat16")
    weights = load_weights(other.model_config, other.stages[0].model, DIRECTORY, load_format="auto", mesh=one.mesh)
    with pytest.raises(AssertionError, match="another shape or place"):
        one.runner.set_weights(weights)


def test_a_step_that_needs_more_than_estimated_makes_the_cache_smaller(monkeypatch):
    """And every program is made anew; one that does not change the cache costs nothing."""
    started = []
    monkeypatch.setattr(ModelRunner, "start_programs", lambda self, rare_later: started.append(self))
    first = prepared()
    needed = first.plan.work_bytes + 1
    monkeypatch.setattr(ModelRunner, "work_bytes", lambda self: needed)
    assert first.settled(rare_later=True).runner is first.runner and not started
    real = stage_plans.memory_plan

    def on_a_small_device(*args, work_bytes=None, **options):
        plan = real(*args, work_bytes=work_bytes, **options)
        return plan if work_bytes is None else replace(plan, num_blocks=plan.num_blocks - 5)

    monkeypatch.setattr(stage_plans, "memory_plan", on_a_small_device)
    second = first.settled(rare_later=True)
    assert second.plan.num_blocks == first.plan.num_blocks - 5 and second.plan.work_bytes == needed
    assert started == [second.runner] and second.runner.shapes.num_blocks == second.plan.num_blocks


def test_a_directory_that_is_no_artifact_is_an_error_before_anything_is_loaded():
    with pytest.raises(ConfigError, match="no compiled artifact"):
        prepared(compiled_artifact=str(DIRECTORY))


def test_experts_that_each_step_widens_are_told(caplog):
    config = load_model_config(goldens.FOLDER / "qwen3_moe", quantization="int8").for_tensor_parallel(1)
    for each, count in ((config.in_tiles(), 0), (config, 1)):
        prepare.tell_of_widened_weights([build_model(each)], "bfloat16")
        assert sum("--dequantize if they fit into memory in bfloat16" in text for text in caplog.messages) == count


@pytest.mark.parametrize(
    ("has_kernels", "dequantize", "is_stored"), [(True, None, True), (False, None, False), (False, False, True)]
)
def test_fp8_blocks_stay_as_stored_on_a_gpu_that_has_kernels_for_them_or_if_asked(
    monkeypatch, has_kernels, dequantize, is_stored
):
    monkeypatch.setattr(resolve, "wants_tiles", lambda *_, **__: has_kernels)
    given = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    config = EngineConfig.from_options(
        model="unused", hf_overrides=given, dequantize=dequantize, skip_tokenizer_init=True, load_format="dummy"
    )
    _, model_config = resolve_sizes(config, goldens.FOLDER / "qwen3", device_bytes=16 << 30)
    assert [format.computes for format in model_config.formats] == [is_stored]


def test_a_plan_for_gpus_elsewhere_has_fp8_blocks_as_kernels_take_them(caplog):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32}
    given = {**sizes, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}

    def planned(**options):
        options = {"hf_overrides": given, "skip_tokenizer_init": True, "load_format": "dummy", **options}
        config = EngineConfig.from_options(model=str(goldens.FOLDER / "qwen3"), **options)
        return plan_engine(config, device_bytes=8 << 30).memory.weight_bytes

    in_layers = 2 * 256 * (2 * 8 * 32 + 2 * 2 * 32 + 3 * 512)
    others = 2 * (128 * 256 + 5 * 256 + 2 * 2 * 32)  # embedding and norms, in 16 bits
    with caplog.at_level(logging.INFO, "jaxllm"):
        assert planned() == in_layers + 4 * in_layers // 128 + others  # a float32 scale for 128 inputs of each output
        wide = {planned(**each) for each in ({"dequantize": True}, {"dtype": "float16"}, {"attention_implementation": "xla"})}
    assert wide == {2 * in_layers + others}
    assert sum("for others add --dequantize" in text for text in caplog.messages) == 1


@pytest.mark.parametrize(("length", "is_told"), [(None, True), (8, False), (100, False)])
def test_a_model_that_would_choose_tokens_of_longer_sequences_says_how_to_get_these(length, is_told, caplog):
    model = str(goldens.golden("glm_moe_dsa").directory)
    with caplog.at_level(logging.WARNING, "jaxllm"):
        resolve_sizes(EngineConfig.from_options(model=model, max_model_len=length), Path(model))
    told = "requests may have up to 8 tokens, all of which layers attend to; --max-model-len, up to 256, makes them choose"
    assert (told in caplog.text) is is_told

"""Engines whose devices split tokens give the tokens of transformers and of one device."""

from dataclasses import replace
from typing import Any

import pytest

from jaxllm import LLM, LoRARequest, SamplingParams
from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.engine.fault_points import injected
from jaxllm.kernel_policy import CPU
from scripts.gpu_checks import traffic
from tests.expert_load import test_counts
from tests.helpers import engines, goldens, peft_files
from tests.helpers.parity import check

NAME = "llama_gqa"


POLICY = replace(CPU, min_shared_tokens=16)
"""Steps of the tiny models are shared out too."""


def make_core(name: str, **options: Any) -> EngineCore:
    return engines.make_core(name, **{"kernel_policy": POLICY, **options})


def make_llm(model: str, **options: Any) -> LLM:
    config = EngineConfig.from_options(model=model, **options)
    return LLM.from_config(config, core=EngineCore(config, kernel_policy=POLICY))


@pytest.fixture(scope="module")
def core():
    core = make_core(NAME, prefill_context_parallel_size=2, block_size=8)
    yield core
    core.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_num_batched_tokens": 9}, id="chunks", marks=pytest.mark.newer),
        pytest.param({"num_blocks": 8, "max_in_flight": 3}, id="preempted"),
        pytest.param({"async_scheduling": False}, id="one step at a time"),
    ],
)
def test_tokens_and_prompt_logprobs_are_right(core, options):
    """Prompts of 1 to 40 tokens, in chunks and whole, mixed with decodes, preempted, and begun from cached prefixes."""
    engines.reschedule(core, **options)
    check(NAME, core)
    assert (core.stats().num_preemptions > 0) == ("num_blocks" in options)
    check(NAME, core, prompt_logprobs=False)
    assert core.stats().prefix_cache_hits > 0 or "num_blocks" in options


@pytest.mark.slow
def test_each_device_has_all_weights_and_half_of_each_block(core):
    (array, *_), (weight, *_) = core.runner.caches, core.runner.params
    assert array.shape[2] == 16 and {shard.data.shape[2] for shard in array.addressable_shards} == {8}
    assert weight.sharding.is_fully_replicated and len(weight.sharding.device_set) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        # groups of layers, with windows and without; decodes of many requests are shared out too
        ("gemma3", 3, {"kernel_policy": replace(CPU, min_shared_tokens=4)}),
        ("mistral_window", 4, {"num_gpu_blocks_override": 5}),  # blocks that leave the window, keys of it in some parts alone
        ("gpt_oss", 4, test_counts.OPTIONS),  # sinks; tokens of experts are counted over all devices
    ],
    ids=lambda value: str(value) if not isinstance(value, dict) else "",
)
def test_models(name, size, options):
    """Norms of heads: below. Parts of the keys in Triton's kernel: tests/pallas_kernels/test_parts.py."""
    core = make_core(name, prefill_context_parallel_size=size, block_size=8, **options)
    check(name, core)
    assert "num_gpu_blocks_override" not in options or core.stats().num_preemptions > 0
    if options is test_counts.OPTIONS:
        test_counts.check(name, core)
    core.shutdown()


DEMO: dict[str, Any] = {"hf_overrides": {"num_hidden_layers": 1}, "load_format": "dummy"}


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*donated.*")
def test_requests_of_every_kind_have_the_answers_of_one_device(tmp_path, monkeypatch):
    """Greedy and seeded, with every filter, penalty, bias, ban and form, with logprobs of tokens and prompts; mixed, preempted, from
    cached prefixes, after failed steps and after sleep; and vectors. Nothing is compiled late, and every donation is used."""
    monkeypatch.setenv("JAXLLM_CACHE_DIR", str(tmp_path))
    size = traffic.TINY
    with LLM("demo", **DEMO, **size.options()) as llm:
        expected, vectors = traffic.answers(llm, size), traffic.vectors(llm, size)
    split = {"prefill_context_parallel_size": 2, "tensor_parallel_size": 2, "block_size": 8, "num_gpu_blocks_override": 14}
    with make_llm("demo", **DEMO, **size.options(**split, warmup="background")) as llm:
        core: Any = llm.llm_engine.core
        core.finish_compiling()
        assert traffic.differing(traffic.answers(llm, size), expected) == []
        before = core.stats()
        assert before.num_preemptions > 0
        assert traffic.off_by(traffic.vectors(llm, size), vectors) < traffic.TOLERANCE
        with injected("step:3:oom,result:7:oom,draw:2:oom"):
            assert traffic.differing(traffic.answers(llm, size), expected) == []
        assert core.stats().num_retried_steps == 3 and core.stats().prefix_cache_hits > before.prefix_cache_hits
        llm.sleep(1)
        llm.wake_up()
        assert traffic.differing(traffic.answers(llm, size, ("greedy", "long")), expected) == []
        llm.llm_engine.check_integrity()
        assert core.runner.programs.num_compiled_after_warmup == 0


@pytest.mark.slow
def test_adapters_and_a_cache_of_8_bits(tmp_path):
    """Requests with an adapter and without, from prompts in several chunks, mixed with decodes."""
    directory = goldens.of_one_layer("qwen3", tmp_path / "model")
    adapter = LoRARequest("adapted", 1, str(peft_files.write(tmp_path / "adapter", directory, rank=8, strength=0.3)))
    prompts = [{"prompt_token_ids": [3 + (7 * i + 5 * j) % 110 for j in range(1 + 13 * i)]} for i in range(6)]
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    options: dict[str, Any] = {**engines.SMALL, "dtype": "float32", "max_num_batched_tokens": 40, "token_buckets": (40,)}
    options |= {"kv_cache_dtype": "fp8", "enable_lora": True, "max_lora_rank": 8}
    found = []
    for size in (1, 2):
        with make_llm(str(directory), prefill_context_parallel_size=size, **options) as llm:
            outputs = llm.generate(prompts, sampling, lora_request=[None, adapter, adapter] * 2, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]

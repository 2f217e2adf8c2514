"""Engines whose weights stay in 4 bits, and what works on weights: experts on each device, adapters and sleep. Drafts: test_tiles.py."""

import functools

import numpy as np
import pytest

from jaxllm import LLM, LoRARequest, SamplingParams
from tests.helpers import engines, goldens, peft_files
from tests.helpers.quantized import PROMPT, answer, assert_answered, assert_answers, load

EPLB = {"enable_expert_parallel": True, "enable_eplb": True, "eplb_config": {"step_interval": 3, "num_redundant_experts": 2}}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Makes a golden with weights in int4, and one with the same numbers in float32. Of mixtures the first layer."""

    @functools.cache
    def make(golden):
        packed, plain, layer = (tmp_path_factory.mktemp(golden) for _ in range(3))
        source = goldens.of_one_layer(golden, layer) if golden == "qwen3_moe" else goldens.FOLDER / golden
        goldens.save(*load(source, quantization="int4"), packed, source)
        goldens.save(*load(packed, dequantize=True), plain, packed)
        return packed, plain

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("golden", "options"),
    [
        pytest.param("qwen3_moe", {"data_parallel_size": 2, **EPLB}, marks=pytest.mark.newer),
        ("llama_gqa", {"pipeline_parallel_size": 2}),
        ("llama_gqa", {"share_layers": True}),
    ],
)
def test_any_number_of_devices_answers_as_with_the_widened_weights(checkpoints, golden, options):
    assert_answers(*checkpoints(golden), **options)


@pytest.mark.slow
def test_shares_of_experts_in_tiles_answer_as_those_as_stored(checkpoints):
    """Of int8 with a scale per output: devices have a part of each expert, padded to whole tiles."""
    folder, options = checkpoints("qwen3_moe")[1], {"quantization": "int8", "tensor_parallel_size": 4}
    assert_answered(
        answer(folder, num_tokens=1, attention_implementation="triton", **options), load(folder, quantization="int8")
    )


def answers(model, adapter):
    """With the adapter and without."""
    llm = LLM(str(model), **engines.SMALL, enable_lora=True)
    prompts, adapters = [{"prompt_token_ids": PROMPT}] * 2, [adapter, None]
    outputs = [output.outputs[0] for output in llm.generate(prompts, PARAMS, lora_request=adapters, use_tqdm=False)]
    llm.shutdown()
    tokens = [list(output.token_ids) for output in outputs]
    return tokens, np.array(
        [[entry[token].logprob for entry, token in zip(o.logprobs, o.token_ids, strict=True)] for o in outputs]
    )


@pytest.mark.slow
def test_adapters_change_packed_weights(checkpoints, tmp_path):
    packed, plain = checkpoints("qwen3_moe")
    adapter = LoRARequest("changed", 1, str(peft_files.write(tmp_path, plain)))
    (tokens, logprobs), (wanted_tokens, wanted) = (answers(model, adapter) for model in (packed, plain))
    assert tokens == wanted_tokens
    np.testing.assert_allclose(logprobs, wanted, atol=1e-4)
    assert not np.allclose(*logprobs, atol=1e-2)


@pytest.mark.slow
def test_packed_weights_sleep_and_wake_up(checkpoints):
    llm = LLM(str(checkpoints("llama_gqa")[0]), **engines.SMALL)
    first, *later = (_after(llm, level) for level in (None, 1, 2))
    llm.shutdown()
    assert later == [first, first]


def _after(llm, level):
    if level is not None:
        llm.sleep(level)
        llm.wake_up()
    [output] = llm.generate({"prompt_token_ids": PROMPT}, PARAMS, use_tqdm=False)
    return list(output.outputs[0].token_ids)

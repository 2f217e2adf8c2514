"""Engines whose weights stay in 4 bits, and what works on weights: experts on each device, adapters and sleep. Drafts: test_tiles.py."""

import functools

import numpy as np
import pytest

from jaxllm import LLM, LoRARequest, SamplingParams
from tests.helpers import engines, goldens, peft_files
from tests.helpers.quantized import PROMPT, answer, load

EPLB = {"enable_expert_parallel": True, "enable_eplb": True, "eplb_config": {"step_interval": 3, "num_redundant_experts": 2}}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Makes a golden with weights in int4, and one with the same numbers in float32."""

    @functools.cache
    def make(golden):
        packed, plain = (tmp_path_factory.mktemp(golden) for _ in range(2))
        goldens.save(*load(goldens.FOLDER / golden, quantization="int4"), packed, goldens.FOLDER / golden)
        goldens.save(*load(packed, dequantize=True), plain, packed)
        return packed, plain

    return make


@pytest.fixture(scope="module")
def answer_of_widened(checkpoints):
    return functools.cache(lambda golden: answer(checkpoints(golden)[1]))


def assert_alike(found, wanted):
    assert found[0] == wanted[0]
    np.testing.assert_allclose(found[1], wanted[1], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("golden", "options"),
    [
        pytest.param("qwen3_moe", {"data_parallel_size": 2, **EPLB}, marks=pytest.mark.newer),
        ("deepseek_v3", {"tensor_parallel_size": 2}),
        ("llama_gqa", {"pipeline_parallel_size": 2}),
        ("llama_gqa", {"share_layers": True}),
    ],
)
def test_any_number_of_devices_answers_as_with_the_widened_weights(checkpoints, answer_of_widened, golden, options):
    assert_alike(answer(checkpoints(golden)[0], **options), answer_of_widened(golden))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"data_parallel_size": 2, **EPLB}])
def test_experts_in_tiles_answer_as_those_as_stored(checkpoints, answer_of_widened, options):
    packed, _ = checkpoints("qwen3_moe")
    assert_alike(answer(packed, attention_implementation="triton", **options), answer_of_widened("qwen3_moe"))


@pytest.mark.slow
def test_shares_of_experts_in_tiles_answer_as_those_as_stored():
    """Of int8 with a scale per output: devices have a part of each expert, padded to whole tiles."""
    folder, options = goldens.FOLDER / "qwen3_moe", {"quantization": "int8", "tensor_parallel_size": 4}
    assert_alike(answer(folder, attention_implementation="triton", **options), answer(folder, quantization="int8"))


def answers(model, prompt=PROMPT, lora=None, **options):
    llm = LLM(str(model), **{**engines.SMALL, **options})
    [output] = llm.generate({"prompt_token_ids": prompt}, PARAMS, lora_request=lora, use_tqdm=False)
    llm.shutdown()
    tokens = list(output.outputs[0].token_ids)
    return tokens, np.array([entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, tokens, strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize("golden", ["llama_gqa", "qwen3_moe"])
def test_adapters_change_packed_weights(checkpoints, tmp_path, golden):
    packed, plain = checkpoints(golden)
    adapter = LoRARequest("changed", 1, str(peft_files.write(tmp_path, goldens.FOLDER / golden)))
    found, wanted = (answers(model, lora=adapter, enable_lora=True) for model in (packed, plain))
    assert_alike(found, wanted)
    assert not np.allclose(found[1], answers(packed)[1], atol=1e-2)


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

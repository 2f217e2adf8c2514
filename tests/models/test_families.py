"""Every family and variant against what transformers computed (tests/goldens)."""

import jax
import numpy as np
import pytest
from flax import nnx

from jaxllm.layers.build import build_model, num_parameters
from jaxllm.models.load_config import load_model_config
from tests.helpers import goldens
from tests.helpers.slow import slow_except

LONGEST = 104


def logprobs(logits_TV: np.ndarray) -> np.ndarray:
    return np.asarray(jax.nn.log_softmax(logits_TV, axis=-1))


OF_EACH_KIND = ["llama_gqa", "llama_rope_llama3", "gpt2", "qwen3_moe", "gemma3", "gemma4", "gpt_oss", "deepseek_v3"]
OF_EACH_KIND += ["qwen3_next", "nemotron_h", "lfm2", "mimo_v2_flash"]
"""Modules of parts that other families are composed of."""


@pytest.mark.parametrize("name", slow_except(OF_EACH_KIND, goldens.NAMES))
def test_logits_logprobs_and_greedy_tokens_equal_transformers(name):
    golden = goldens.golden(name)
    config, state = goldens.load(golden.directory)
    for i, result in enumerate(golden.results):
        # The tokens that were generated are fed back at once: each must be the likeliest after those before it.
        sequence = result.prompt + result.tokens
        logits_TV = goldens.logits(config, state, sequence, pad_to=LONGEST)
        if i == 0:
            np.testing.assert_allclose(logits_TV[: len(result.prompt)], golden.first_prompt_logits, atol=1e-4)
        start = len(result.prompt) - 1
        assert logits_TV[start:-1].argmax(-1).tolist() == result.tokens
        logprobs_TV = logprobs(logits_TV)
        found = [logprobs_TV[t, token] for t, token in enumerate(sequence[1:])]
        np.testing.assert_allclose(found[:start], result.prompt_logprobs, atol=1e-4)
        np.testing.assert_allclose(found[start:], result.logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "size"),
    slow_except([("qwen3", 2), ("llama_bias", 8)], [("llama_mqa", 8), ("llama_bias", 8), ("qwen2", 2), ("qwen3", 2)]),
)
def test_tensor_parallel_gives_the_same_logits(name, size):
    golden = goldens.golden(name)
    config, state = goldens.load(golden.directory, tensor_parallel_size=size)
    prompt = golden.results[0].prompt
    logits_TV = goldens.logits(config, state, prompt, pad_to=LONGEST)
    assert logits_TV.shape == (len(prompt), config.padded_vocab_size)
    np.testing.assert_allclose(logits_TV[:, : config.vocab_size], golden.first_prompt_logits, atol=1e-4)
    assert (logits_TV[:, config.vocab_size :] == -np.inf).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["laguna", "mimo_v2_flash"])
def test_gates_and_narrow_values_are_split(name):
    golden = goldens.golden(name)
    config, state = goldens.load(golden.directory, tensor_parallel_size=2)
    logits_TV = goldens.logits(config, state, golden.results[0].prompt, pad_to=LONGEST)
    np.testing.assert_allclose(logits_TV, golden.first_prompt_logits, atol=1e-4)


@pytest.mark.parametrize("name", goldens.NAMES)
def test_parameters_are_counted_right(name):
    config = load_model_config(goldens.FOLDER / name)
    assert num_parameters(config) == sum(leaf.size for leaf in jax.tree.leaves(nnx.state(build_model(config))))


def test_building_takes_no_memory():
    config = load_model_config(
        goldens.FOLDER / "llama_gqa", overrides={"hidden_size": 65536, "intermediate_size": 262144, "vocab_size": 10**6}
    )
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(nnx.state(build_model(config))))

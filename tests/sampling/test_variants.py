import subprocess
import sys

import pytest

from jaxllm.sampling.variants import Variant, needs_logprobs, needs_state, variant_of
from jaxllm.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("values", "variant"),
    [
        ({"temperature": 0}, Variant.GREEDY),
        ({"temperature": 0, "logprobs": 3}, Variant.GREEDY),
        ({}, Variant.RANDOM),
        ({"top_k": 4, "top_p": 0.5, "min_p": 0.1}, Variant.RANDOM),
        ({"temperature": 0, "repetition_penalty": 1.1}, Variant.FULL),
        ({"frequency_penalty": 0.1}, Variant.FULL),
        ({"presence_penalty": -0.1}, Variant.FULL),
        ({"min_tokens": 1}, Variant.FULL),
        ({"logit_bias": {1: 0.5}}, Variant.FULL),
        ({"allowed_token_ids": [1]}, Variant.FULL),
        ({"bad_words": ["a"]}, Variant.FULL),
        ({"bad_words_token_ids": [[1]]}, Variant.FULL),
        ({"extra_args": {"boost": []}}, Variant.FULL),
        ({"stop": "x", "max_tokens": 3, "logit_bias": {}}, Variant.RANDOM),
    ],
    ids=str,
)
def test_each_request_gets_the_plainest_program_that_serves_it(values, variant):
    params = SamplingParams(**values)
    assert variant_of(params) == variant
    assert needs_state(params) == (variant is Variant.FULL)


def test_top_n_sigma_needs_the_full_program_but_no_state():
    params = SamplingParams(top_n_sigma=1.0)
    assert variant_of(params) is Variant.FULL and not needs_state(params)
    assert variant_of(SamplingParams(top_n_sigma=-1)) is Variant.RANDOM
    assert variant_of(SamplingParams(top_n_sigma=1.0, temperature=0)) is Variant.GREEDY


def test_a_batch_takes_the_highest_variant():
    assert max(Variant.GREEDY, Variant.FULL, Variant.RANDOM) is Variant.FULL


def test_processed_logprobs_need_the_full_program_but_no_state():
    params = SamplingParams(temperature=0, logprobs=0)
    assert needs_logprobs(params) and not needs_state(params)
    assert variant_of(params, full_logprobs=True) is Variant.FULL
    assert variant_of(SamplingParams(temperature=0), full_logprobs=True) is Variant.GREEDY
    assert needs_logprobs(SamplingParams(logprob_token_ids=[1])) and not needs_logprobs(SamplingParams(prompt_logprobs=1))


def test_it_is_asked_without_loading_jax():
    code = "import jaxllm.sampling.variants, jaxllm.sampling_params, sys; print('jax' in sys.modules, 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False False\n"

import dataclasses
import math

import numpy as np
import pytest

from jaxllm.config import flags
from jaxllm.errors import InvalidRequestError
from jaxllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"n": 0}, ["n is 0", "at least 1"]),
        ({"n": 100_000}, ["n is 100000", "16384"]),
        ({"n": True}, ["n is True", "integer"]),
        ({"n": 2, "temperature": 0}, ["n is 2", "temperature is 0"]),
        ({"presence_penalty": 2.1}, ["2.1", "at most 2"]),
        ({"frequency_penalty": -3}, ["-3", "at least -2"]),
        ({"repetition_penalty": 0}, ["above 0"]),
        ({"repetition_penalty": math.inf}, ["inf", "finite"]),
        ({"temperature": math.nan}, ["nan"]),
        ({"temperature": -0.1}, ["-0.1", "at least 0"]),
        ({"temperature": 1e7}, ["10000000.0", "at most 1000000"]),
        ({"temperature": "hot"}, ["'hot'", "number"]),
        ({"temperature": True}, ["True", "number"]),
        ({"top_p": 0}, ["0", "above 0"]),
        ({"top_p": 2}, ["2", "at most 1"]),
        ({"top_k": -2}, ["-2", "at least -1"]),
        ({"top_k": 1.5}, ["1.5", "integer"]),
        ({"min_p": 1.1}, ["1.1", "at most 1"]),
        ({"seed": 2**63}, [str(2**63)]),
        ({"seed": 1.0}, ["1.0", "integer"]),
        ({"stop": ""}, ["empty string"]),
        ({"stop": ["a", ""]}, ["empty string"]),
        ({"stop": [1]}, ["1", "strings"]),
        ({"stop": "x", "detokenize": False}, ["detokenize"]),
        ({"stop_token_ids": ["a"]}, ["'a'", "integers"]),
        ({"top_n_sigma": -1.5}, ["top_n_sigma is -1.5", "finite and at least -1"]),
        ({"top_n_sigma": math.inf}, ["inf"]),
        ({"thinking_token_budget": -2}, ["thinking_token_budget is -2", "at least -1"]),
        ({"num_speculative_tokens": -1}, ["num_speculative_tokens is -1", "at least 0"]),
        ({"n": None}, ["n is None", "an integer"]),
        ({"stop_token_ids": 3}, ["3", "list"]),
        ({"ignore_eos": 1}, ["ignore_eos is 1"]),
        ({"max_tokens": 0}, ["max_tokens is 0", "at least 1"]),
        ({"max_tokens": -5}, ["max_tokens is -5"]),
        ({"min_tokens": -1}, ["min_tokens is -1"]),
        ({"min_tokens": 20, "max_tokens": 10}, ["min_tokens is 20", "10"]),
        ({"logprobs": -2}, ["logprobs is -2"]),
        ({"prompt_logprobs": 1.5}, ["1.5"]),
        ({"logprob_token_ids": list(range(129))}, ["129", "128"]),
        ({"logprob_token_ids": [1, 2], "logprobs": 3}, ["logprobs is 3", "2"]),
        ({"logprob_token_ids": []}, ["empty"]),
        ({"output_kind": "DELTA"}, ["'DELTA'", "RequestOutputKind"]),
        ({"stream_interval": 0}, ["stream_interval is 0"]),
        ({"logit_bias": {"a": 1, "3": 1, "b": 2}}, ["'a', 'b'"]),
        ({"logit_bias": {3: math.nan}}, ["nan"]),
        ({"logit_bias": {3: "x"}}, ["'x'"]),
        ({"allowed_token_ids": []}, ["empty"]),
        ({"bad_words": ["ok", ""]}, ["empty string"]),
        ({"bad_words": "word"}, ["'word'", "list"]),
        ({"extra_args": [1]}, ["dict"]),
        ({"repetition_detection": {"max_pattern_size": 3}}, ["min_count"]),
        ({"repetition_detection": {"max_pattern_size": 3, "min_count": 1}}, ["min_count is 1", "at least 2"]),
        ({"repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}}, ["3", "at least 4"]),
        ({"structured_outputs": {}}, ["has none"]),
    ],
)
def test_a_bad_value_is_refused_with_parameter_value_and_limit(values, parts):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**values)
    assert caught.value.param in values
    assert caught.value.param in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_a_misspelled_name_is_refused():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)


def test_values_are_brought_into_one_form():
    params = SamplingParams(
        temperature=np.float32(1),
        top_k=-1,
        top_n_sigma=-1,
        seed=-1,
        stop="end",
        stop_token_ids=(5, 3, 5),
        logprobs=True,
        prompt_logprobs=False,
        logit_bias={"7": 250, 8: -math.inf},
        allowed_token_ids=np.array([1, 2]),
        max_tokens=np.int64(9),
        repetition_detection={"max_pattern_size": 4, "min_count": 3},
    )
    assert (params.temperature, params.top_k, params.top_n_sigma, params.seed, params.max_tokens) == (1.0, 0, 0, None, 9)
    assert type(params.max_tokens) is int and type(params.temperature) is float
    assert (params.stop, params.stop_token_ids, params.bad_words) == (["end"], [5, 3], [])
    assert (params.logprobs, params.prompt_logprobs) == (1, None)
    assert params.logit_bias == {7: 100.0, 8: -100.0}
    assert params.allowed_token_ids == [1, 2]
    assert params.repetition_detection == {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3}
    assert params.structured_outputs is None


def test_greedy_resets_the_filters():
    params = SamplingParams(temperature=1e-6, top_p=0.5, top_k=7, min_p=0.2, top_n_sigma=1)
    assert params.is_greedy
    assert params == SamplingParams(temperature=0)


def test_a_tiny_temperature_is_raised_with_a_warning(caplog):
    caplog.set_level("WARNING", "jaxllm")
    assert SamplingParams(temperature=0.00317).temperature == 0.01
    assert "0.01" in caplog.text


def test_prompt_logprobs_skip_the_prefix_cache_unless_told():
    assert SamplingParams(prompt_logprobs=0).skip_reading_prefix_cache is True
    assert SamplingParams().skip_reading_prefix_cache is False
    assert SamplingParams(prompt_logprobs=0, skip_reading_prefix_cache=False).skip_reading_prefix_cache is False


def test_from_optional_skips_none():
    assert SamplingParams.from_optional(temperature=None, max_tokens=3) == SamplingParams(max_tokens=3)


def test_a_clone_shares_nothing():
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, output_kind=RequestOutputKind.DELTA)
    clone = params.clone()
    assert clone == params
    clone.stop.append("b")
    clone.logit_bias[1] = 3.0
    assert params.stop == ["a"] and params.logit_bias == {1: 2.0}
    assert dataclasses.replace(params, n=2).n == 2


def verify(params, **limits):
    params.verify(**{"vocab_size": 100, "max_model_len": 64, "max_logprobs": 20, "num_prompt_tokens": 10, **limits})


@pytest.mark.parametrize(
    ("values", "limits", "param", "parts"),
    [
        ({}, {"num_prompt_tokens": 64}, "prompt", ["64", "--max-model-len"]),
        ({"min_tokens": 60, "max_tokens": 60}, {}, "min_tokens", ["60", "54", "64"]),
        ({"logprobs": 21}, {}, "logprobs", ["21", "20", "--max-logprobs"]),
        ({"prompt_logprobs": 21}, {}, "prompt_logprobs", ["21", "20"]),
        ({"logprobs": -1}, {}, "logprobs", ["-1", "100", "20"]),
        ({"logprobs": 101}, {"max_logprobs": -1}, "logprobs", ["101", "100"]),
        ({"stop_token_ids": [99, 100]}, {}, "stop_token_ids", ["100", "0 to 99"]),
        ({"allowed_token_ids": [-1]}, {}, "allowed_token_ids", ["-1"]),
        ({"logit_bias": {100: 1}}, {}, "logit_bias", ["100"]),
        ({"logprob_token_ids": [100]}, {}, "logprob_token_ids", ["100"]),
        ({"bad_words_token_ids": [[1, 100]]}, {}, "bad_words", ["100"]),
        ({"bad_words_token_ids": [[1]] * 129}, {}, "bad_words", ["129", "128"]),
        ({"bad_words_token_ids": [[1] * 17]}, {}, "bad_words", ["17", "16"]),
        ({"extra_args": {"nope": [1.0]}}, {"processors": {"boost": 1}}, "extra_args", ["'nope'", "boost"]),
        ({"extra_args": {"boost": [1.0, 2.0]}}, {"processors": {"boost": 1}}, "extra_args", ["2", "1"]),
        ({"extra_args": {"boost": ["x"]}}, {"processors": {"boost": 1}}, "extra_args", ["'x'"]),
        ({"extra_args": {"boost": 1.0}}, {"processors": {"boost": 1}}, "extra_args", ["list"]),
    ],
)
def test_verify_refuses_what_the_model_cannot_serve(values, limits, param, parts):
    with pytest.raises(InvalidRequestError) as caught:
        verify(SamplingParams(**{"max_tokens": None, **values}), **limits)
    assert caught.value.param == param
    for part in parts:
        assert part in str(caught.value)


def test_verify_accepts_the_limits_themselves():
    verify(SamplingParams(logprobs=20, prompt_logprobs=20, stop_token_ids=[0, 99], max_tokens=10_000))
    verify(SamplingParams(logprobs=-1), max_logprobs=-1)
    verify(SamplingParams(logprobs=-1), max_logprobs=100)
    verify(SamplingParams(logprob_token_ids=list(range(60))))
    verify(SamplingParams(bad_words_token_ids=[[1] * 16] * 128))
    verify(SamplingParams(extra_args={"boost": [1]}), processors={"boost": 1})
    verify(SamplingParams(), num_prompt_tokens=63)


def test_the_command_line_sees_help_for_the_common_fields():
    shown = {flag.name: flag for flag in flags(SamplingParams)}
    assert {"n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop", "logprobs"} <= set(shown)
    assert all(flag.help for flag in shown.values())
    assert {flag.group for flag in shown.values()} == {"Sampling"}


def test_beam_search_params_are_checked():
    assert BeamSearchParams(4, 10).length_penalty == 1.0
    for values in ({"beam_width": 0}, {"max_tokens": 0}, {"length_penalty": math.nan}, {"allowed_token_ids": []}):
        with pytest.raises(InvalidRequestError, match=next(iter(values))):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **values})

import json
from pathlib import Path
from typing import Any

import pytest

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.log import info_once
from jaxllm.request_options import RequestOptions
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.generation_config import LLAMA_CPP, GenerationConfig, load_generation_config
from jaxllm.text.input_processor import InputProcessor
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.fake_engine_core import tiny_model_config
from tests.helpers.tiny_tokenizers import BOS, write_tokenizer

MAX_LEN = 32


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def processor_of(
    tokenizer: Tokenizer | None,
    generation_config: GenerationConfig | None = None,
    *,
    seed: int | None = None,
    policy: str = "fcfs",
    **model_eos: Any,
) -> InputProcessor:
    vocab_size = tokenizer.vocab_size if tokenizer is not None else 100
    model_config = tiny_model_config(vocab_size, **model_eos)
    config = EngineConfig.from_options(seed=seed, scheduling_policy=policy)
    return InputProcessor(config, model_config, MAX_LEN, tokenizer, generation_config)


def test_every_form_of_prompt_means_the_same(tokenizer: Tokenizer) -> None:
    processor = processor_of(tokenizer)
    ids = tokenizer.encode("hi fox")
    for prompt in (
        "hi fox",
        {"prompt": "hi fox"},
        ids,
        tuple(ids),
        {"prompt_token_ids": ids},
        {"prompt": "x", "prompt_token_ids": ids},
    ):
        request = processor.process("r", prompt, SamplingParams())  # type: ignore[arg-type]
        assert request.prompt_token_ids == ids and request.children[0].prompt_token_ids == ids
    assert processor.process("r", "hi fox", SamplingParams()).prompt == "hi fox"
    assert processor.process("r", ids, SamplingParams()).prompt is None
    assert processor.process("r", {"prompt": "hi", "cache_salt": "s"}, SamplingParams()).children[0].options.cache_salt == "s"
    assert processor.tokenize_texts(["hi fox", ids]) == [{"prompt": "hi fox", "prompt_token_ids": ids}, ids]


def test_a_bos_in_the_text_is_not_doubled(tokenizer: Tokenizer) -> None:
    processor = processor_of(tokenizer)
    for prompt in ("hi", f"{BOS}hi", {"prompt": f"{BOS}hi"}, *processor.tokenize_texts([f"{BOS}hi"])):
        assert processor.process("r", prompt, SamplingParams()).prompt_token_ids == tokenizer.encode("hi")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "message", "param"),
    [
        ("", "prompt is empty", "prompt"),
        ([], "prompt is empty", "prompt"),
        ({"prompt_token_ids": []}, "prompt is empty", "prompt"),
        ({}, "neither 'prompt' nor", "prompt"),
        (None, "prompt is a NoneType", "prompt"),
        ("caf\udce9", "half a surrogate pair", "prompt"),
        (7, "prompt is a int", "prompt"),
        ([1, "x"], "'x' at position 1, must have integers", "prompt_token_ids"),
        ([1, True], "True at position 1", "prompt_token_ids"),
        ([1, 2.0], "2.0 at position 1", "prompt_token_ids"),
        ({"prompt_token_ids": "ab"}, "prompt_token_ids is a str", "prompt_token_ids"),
        ({"prompt": 3}, "prompt is a int, must be a string", "prompt"),
        ({"promt": "x"}, "unknown key of a prompt 'promt'; did you mean 'prompt'", "prompt"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt is empty", "cache_salt"),
        ({"prompt": "x", "cache_salt": 7}, "cache_salt is a int", "cache_salt"),
        ({"prompt": "x", "cache_salt": "s" * 129}, "cache_salt has 129 characters, may have 128", "cache_salt"),
        ({"prompt": "x", "cache_salt": "a@b"}, "cache_salt has the character '@'", "cache_salt"),
        ({"prompt": "x", "cache_salt": "a/b"}, "cache_salt has the character '/'", "cache_salt"),
        ({"prompt": "x", "cache_salt": "a\\b"}, "cache_salt has the character", "cache_salt"),
        ({"prompt": "x", "cache_salt": "a\0b"}, "cache_salt has the character", "cache_salt"),
        ([1, -1], "token id -1 at position 1; the vocabulary has 0 to", "prompt_token_ids"),
        ([10**6], "token id 1000000 at position 0; the vocabulary has 0 to", "prompt_token_ids"),
        ([1] * MAX_LEN, "prompt has 32 tokens, the model takes 32.*--max-model-len", "prompt"),
    ],
)
def test_a_bad_prompt_is_a_clear_error(tokenizer: Tokenizer, prompt: Any, message: str, param: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        processor_of(tokenizer).process("r", prompt, SamplingParams())
    assert caught.value.param == param


def test_wrong_arguments_are_clear_errors(tokenizer: Tokenizer) -> None:
    processor = processor_of(tokenizer)
    with pytest.raises(TypeError, match="request_id is a int"):
        processor.process(3, "x", SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="sampling_params is a dict"):
        processor.process("r", "x", {"n": 1})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="priority is 'high'"):
        processor.process("r", "x", SamplingParams(), RequestOptions(priority="high"))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="logprobs"):
        processor.process("r", "x", SamplingParams(logprobs=21))


def test_a_priority_has_no_effect_without_the_policy_of_that_name(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    info_once.cache_clear()
    with caplog.at_level("INFO", "jaxllm"):
        for priority in (0, 1, 2):
            options = RequestOptions(priority=priority)
            request = processor_of(tokenizer).process("r", "x", SamplingParams(), options)
            assert request.children[0].options.priority == 0
    assert caplog.text.count("--scheduling-policy priority") == 1
    with pytest.raises(InvalidRequestError, match="64 bits"):
        processor_of(tokenizer, policy="priority").process("r", "x", SamplingParams(), RequestOptions(priority=2**63))


@pytest.mark.parametrize("name", ["queue_timeout_seconds", "timeout_seconds"])
def test_timeouts_are_checked_and_passed_on(tokenizer: Tokenizer, name: str) -> None:
    processor = processor_of(tokenizer)
    request = processor.process("r", "x", SamplingParams(n=2), RequestOptions(**{name: 2.5}))  # type: ignore[arg-type]
    assert [getattr(child.options, name) for child in request.children] == [2.5, 2.5]
    for wrong in (0, -1, float("nan"), float("inf"), True, "1"):
        with pytest.raises(InvalidRequestError, match=f"{name} is") as caught:
            processor.process("r", "x", SamplingParams(), RequestOptions(**{name: wrong}))  # type: ignore[arg-type]
        assert caught.value.param == name


@pytest.mark.parametrize("name", ["max_load_tokens", "max_offload_tokens"])
def test_limits_of_tokens_are_checked_and_passed_on(tokenizer: Tokenizer, name: str) -> None:
    processor = processor_of(tokenizer)
    request = processor.process("r", "x", SamplingParams(n=2), RequestOptions(**{name: 0}))  # type: ignore[arg-type]
    assert [getattr(child.options, name) for child in request.children] == [0, 0]
    for wrong in (-1, 2**63, 1.0, True, "1"):
        with pytest.raises(InvalidRequestError, match=f"{name} is .*, must be an integer from 0") as caught:
            processor.process("r", "x", SamplingParams(), RequestOptions(**{name: wrong}))  # type: ignore[arg-type]
        assert caught.value.param == name


def test_without_a_tokenizer_text_is_refused_wherever_it_comes() -> None:
    processor = processor_of(None)
    assert processor.process("r", [1, 2], SamplingParams()).prompt_token_ids == [1, 2]
    for prompt, params in (("x", {}), ([1], {"stop": "x"}), ([1], {"bad_words": ["x"]})):
        with pytest.raises(InvalidRequestError, match="tokenizer"):
            processor.process("r", prompt, SamplingParams(**params))  # type: ignore[arg-type]


def test_max_tokens_fits_the_model(tokenizer: Tokenizer) -> None:
    processor = processor_of(tokenizer)
    for asked, given in ((None, 22), (5, 5), (100, 22)):
        assert processor.process("r", [1] * 10, SamplingParams(max_tokens=asked)).params.max_tokens == given


def test_the_caller_s_params_are_left_alone(tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=None, bad_words=["fox"])
    processor_of(tokenizer).process("r", "x", params)
    assert params == SamplingParams(max_tokens=None, bad_words=["fox"])


def test_a_seed_is_drawn_where_none_is_given(tokenizer: Tokenizer) -> None:
    processor = processor_of(tokenizer)
    seeds = {processor.process("r", "x", SamplingParams()).children[0].sampling_params.seed for _ in range(20)}
    assert len(seeds) == 20 and all(seed is not None and 0 <= seed < 2**63 for seed in seeds)
    assert processor.process("r", "x", SamplingParams(seed=5)).children[0].sampling_params.seed == 5


def test_an_engine_s_seed_makes_the_drawn_seeds_repeat(tokenizer: Tokenizer) -> None:
    def seeds(seed: int) -> list[int | None]:
        processor = processor_of(tokenizer, seed=seed)
        return [processor.process("r", "x", SamplingParams()).children[0].sampling_params.seed for _ in range(5)]

    assert seeds(1) == seeds(1) and len(set(seeds(1))) == 5
    assert not set(seeds(1)) & set(seeds(2))


def test_n_answers_are_n_requests(tokenizer: Tokenizer) -> None:
    processor = processor_of(tokenizer, policy="priority")
    request = processor.process("r", "x", SamplingParams(n=3, seed=2**63 - 2), RequestOptions(priority=4))
    assert [child.request_id for child in request.children] == [f"{i}_{request.internal_id}" for i in range(3)]
    assert [child.sampling_params.n for child in request.children] == [1, 1, 1]
    assert [child.sampling_params.seed for child in request.children] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert {child.options.priority for child in request.children} == {4}
    unseeded = processor.process("r", "x", SamplingParams(n=3)).children
    assert len({child.sampling_params.seed for child in unseeded}) == 3


def test_requests_may_share_an_id(tokenizer: Tokenizer) -> None:
    processor = processor_of(tokenizer)
    first, second = (processor.process("r", "x", SamplingParams()) for _ in range(2))
    assert first.request_id == second.request_id == "r"
    assert first.children[0].request_id != second.children[0].request_id


def test_bad_words_are_spelled_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    request = processor_of(tokenizer).process("r", "x", SamplingParams(bad_words=["fox"]))
    spellings = [tokenizer.encode(text, add_special_tokens=False) for text in ("fox", " fox")]
    assert request.children[0].sampling_params.bad_words_token_ids == spellings


def test_eos_ids_are_the_tokenizer_s_then_the_generation_config_s_or_the_model_s(tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_token_id
    assert processor_of(tokenizer).eos_token_ids == (eos,)
    assert processor_of(tokenizer, GenerationConfig({}, (7, eos, 9)), eos_token_ids=(3,)).eos_token_ids == (eos, 7, 9)  # type: ignore[arg-type]
    assert processor_of(tokenizer, eos_token_ids=(3,)).process("r", "x", SamplingParams()).children[0].eos_token_ids == (eos, 3)
    assert processor_of(None, GenerationConfig({}, (7,))).eos_token_ids == (7,)


@pytest.mark.parametrize(
    ("option", "content", "override", "in_chats", "elsewhere", "told"),
    [
        ("auto", None, None, LLAMA_CPP, {}, "as the model's generation_config.json is missing"),
        ("auto", {"eos_token_id": 5, "max_new_tokens": 9}, None, {**LLAMA_CPP, "max_tokens": 9}, {"max_tokens": 9}, "sets none"),
        ("auto", None, {"top_p": 0.5}, {**LLAMA_CPP, "top_p": 0.5}, {"top_p": 0.5}, "is missing, override_generation_config"),
        ("auto", {"top_k": 7}, {"top_p": 0.5}, {"top_k": 7, "top_p": 0.5}, {"top_k": 7, "top_p": 0.5}, "the model's generation_"),
        ("none", {"top_k": 7}, None, {}, {}, "no values (generation_config is none)"),
    ],
)  # fmt: skip
def test_chats_sample_as_llama_cpp_where_the_model_says_nothing(
    tmp_path: Path, option: str, content: Any, override: Any, in_chats: Any, elsewhere: Any, told: str
) -> None:
    if content is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
    found = load_generation_config(option, tmp_path, override)
    processor = processor_of(None, found)
    assert processor.default_sampling_params(chat=True) == SamplingParams(**in_chats)
    assert processor.default_sampling_params() == SamplingParams(**elsewhere)
    assert told in found.describe_chats()


def test_defaults_come_from_the_generation_config(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_tokenizer(
        tmp_path, generation_config={"temperature": 0.6, "top_k": None, "max_new_tokens": 9, "eos_token_id": [4, 5]}
    )
    found = load_generation_config("auto", tmp_path)
    assert found.eos_token_ids == (4, 5)
    assert processor_of(tokenizer, found).default_sampling_params() == SamplingParams(temperature=0.6, max_tokens=9)
    assert load_generation_config(str(tmp_path), None) == found
    assert load_generation_config("none", tmp_path) == GenerationConfig({}, (4, 5))
    over = {"temperature": 0.1, "max_new_tokens": 7, "min_p": 0.5}
    overridden = found.sampling_values | {"temperature": 0.1, "max_tokens": 7, "min_p": 0.5}
    assert load_generation_config("auto", tmp_path, over) == GenerationConfig(overridden, (4, 5))
    assert load_generation_config("none", tmp_path, {"top_k": 3}).sampling_values == {"top_k": 3}
    for wrong, told in [({"beams": 3}, "can have .*temperature, top_p"), ({"temperature": -9}, "temperature is -9")]:
        with pytest.raises(ConfigError, match=f"override_generation_config.*{told}"):
            load_generation_config("auto", tmp_path, wrong)
    with pytest.raises(ConfigError, match="must be auto, none or a directory"):
        load_generation_config("nowhere", tmp_path)
    with pytest.raises(ConfigError, match="generation_config.json.*temperature"):
        processor_of(tokenizer, GenerationConfig({"temperature": -9.0})).default_sampling_params()

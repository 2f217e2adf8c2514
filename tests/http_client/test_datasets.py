import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.http_client import datasets
from jaxllm.http_client.datasets import LoadPrompt, PromptWriter


class Letters:
    """Every letter is a token, but "ab" is one too: encoding what was decoded may be shorter."""

    def __len__(self) -> int:
        return 30 + datasets.NUM_SPECIAL_IDS

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = []
        while text:
            is_pair = text.startswith("ab")
            ids.append(26 if is_pair else ord(text[0]) - ord("a"))
            text = text[2 if is_pair else 1 :]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join("ab" if token == 26 else chr(ord("a") + token % 26) for token in token_ids)


def writer(**options: Any) -> PromptWriter:
    return PromptWriter(np.random.default_rng(0), **options)


def test_random_lengths_lie_in_their_range_and_use_all_of_it() -> None:
    prompts = datasets.random_prompts(writer(), 2000, input_len=10, output_len=4, range_ratio=0.5)
    assert {prompt.num_prompt_tokens for prompt in prompts} == set(range(5, 16))
    assert {prompt.num_output_tokens for prompt in prompts} == set(range(2, 7))
    assert all(isinstance(p.prompt, list) and len(p.prompt) == p.num_prompt_tokens for p in prompts)


def test_random_ids_exist_in_every_model_or_in_the_one_given() -> None:
    def highest(**options: Any) -> int:
        return max(writer(**options).ids(5000))

    assert 700 < highest() < 1000 - 256
    assert 9000 < highest(vocab_size=10_000) < 10_000 - 256


def test_prompts_repeat_with_the_seed() -> None:
    assert datasets.random_prompts(writer(), 3, input_len=5, output_len=2) == datasets.random_prompts(
        writer(), 3, input_len=5, output_len=2
    )


def test_a_shared_prefix_begins_every_prompt() -> None:
    prompts = datasets.random_prompts(writer(), 5, input_len=4, output_len=2, prefix_len=6)
    assert {p.num_prompt_tokens for p in prompts} == {10} and len({tuple(p.prompt[:6]) for p in prompts}) == 1


def test_repeated_prefixes_are_shared_evenly() -> None:
    prompts = datasets.prefix_repetition_prompts(writer(), 20, prefix_len=8, suffix_len=3, num_prefixes=4, output_len=2)
    beginnings = [tuple(p.prompt[:8]) for p in prompts]
    assert sorted(beginnings.count(each) for each in set(beginnings)) == [5, 5, 5, 5]
    assert len({tuple(p.prompt) for p in prompts}) == 20


def test_text_of_a_tokenizer_has_the_length_asked_for() -> None:
    for length in (1, 7, 50):
        prompt = writer(tokenizer=Letters(), as_text=True).prompt([0, 1] * length, 3)
        assert isinstance(prompt.prompt, str)
        assert prompt.num_prompt_tokens == len(Letters().encode(prompt.prompt, add_special_tokens=False)) == 2 * length


def test_text_without_a_tokenizer_has_a_word_a_token_and_leaves_counting_to_the_server() -> None:
    prompt = writer(as_text=True).prompt([1, 2, 3], 3)
    assert isinstance(prompt.prompt, str) and len(prompt.prompt.split()) == 3 and prompt.num_prompt_tokens is None


def test_sharegpt_asks_the_first_question_and_wants_as_long_an_answer(tmp_path: Path) -> None:
    def talk(*values: str) -> dict[str, Any]:
        return {"conversations": [{"from": "x", "value": value} for value in values]}

    path = tmp_path / "talks.json"
    path.write_text(json.dumps([talk("hello", "goodbye", "more"), talk("abc", "goodbye"), talk("alone"), "no talk", {}]))
    rng = np.random.default_rng(0)
    prompts = datasets.sharegpt_prompts(str(path), 3, rng, Letters(), None)
    assert prompts == [LoadPrompt("hello", 7, 5)] * 3
    prompts = datasets.sharegpt_prompts(str(path), 2, rng, None, 9)
    assert {(p.prompt, p.num_output_tokens) for p in prompts} == {("hello", 9), ("abc", 9)}
    with pytest.raises(ConfigError, match="--tokenizer"):
        datasets.sharegpt_prompts(str(path), 3, rng, None, None)


def test_custom_lines_are_text_ids_or_messages(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\u2028b", "output_tokens": 3}\n\n{"prompt": [5, 6]}\n')
    assert datasets.custom_prompts(str(path), 3, None, chat=False) == [
        LoadPrompt("a\u2028b", 3),
        LoadPrompt([5, 6], 256, 2),
        LoadPrompt("a\u2028b", 3),
    ]
    assert [p.num_output_tokens for p in datasets.custom_prompts(str(path), None, 8, chat=False)] == [8, 8]
    path.write_text('{"messages": [{"role": "user", "content": "x"}]}')
    assert datasets.custom_prompts(str(path), None, None, chat=True)[0].prompt == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("line", "chat", "message"),
    [
        ('{"text": "x"}', False, "line 1 needs prompt"),
        ('{"prompt": []}', False, "line 1 needs prompt"),
        ('{"prompt": "x", "output_tokens": 0}', False, "output_tokens is 0"),
        ('{"messages": [{"role": "user"}]}', False, "--backend openai-chat"),
        ('{"prompt": [1]}', True, "--backend openai"),
        ("[1]", False, "line 1 must be a JSON object"),
        ("{", False, "line 1 is not JSON"),
        ("", False, "has no prompts"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, chat: bool, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=message):
        datasets.custom_prompts(str(path), None, None, chat=chat)


def test_the_range_ratio_is_less_than_one() -> None:
    with pytest.raises(ConfigError, match="range ratio"):
        datasets.random_prompts(writer(), 1, input_len=5, output_len=2, range_ratio=1.0)

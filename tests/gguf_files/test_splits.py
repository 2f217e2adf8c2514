"""How texts are split, against llama.cpp's own parts of them (build 11549, in splits.json).

Its parts were read off tokens of a vocabulary that merges any bytes that are neighbours in one of the texts. `null` stands where
llama.cpp approximates a model's pattern: it takes letters of other scripts for one case, and marks for no letters.
"""

import json
from pathlib import Path

import pytest

from jaxllm.gguf_files.splits import SPLITS, pre_tokenizer
from jaxllm.text.byte_letters import BYTES

KNOWN = json.loads(Path(__file__).with_name("splits.json").read_text(encoding="utf-8"))
BY_CASE = {"При|Вет| мир": "gpt-4o tekken tiny_aya youtu kimi-k2", "हिन्दी": "gpt-4o tekken kimi-k2"}


def parts(name, text):
    split = pre_tokenizer(name).pre_tokenize_str(text)
    return [bytes(BYTES[letter] for letter in part).decode() for part, _ in split]


@pytest.mark.parametrize("name", KNOWN["parts"])
def test_texts_are_split_as_by_llama_cpp(name):
    for text, expected in zip(KNOWN["texts"], KNOWN["parts"][name], strict=True):
        if expected is not None:
            assert parts(name, text) == expected.split("␟")


def test_every_way_to_split_is_known():
    assert {SPLITS[name] for name in KNOWN["parts"]} == set(SPLITS.values())


@pytest.mark.parametrize("expected", BY_CASE)
def test_words_end_where_upper_case_begins_in_every_script(expected):
    for name in BY_CASE[expected].split():
        assert parts(name, expected.replace("|", "")) == expected.split("|")

"""Pairs of texts as one prompt, against the same tokenizer in transformers, which cuts the longer text first."""

import random

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, processors

from jaxllm.errors import InvalidRequestError
from jaxllm.text.pairs import UNCUT, PairCut, encode_pairs, joined_texts, second_start
from jaxllm.text.tokenizer import Tokenizer

WORDS = ["one", "two", "three", "four", "five", "six", "##ty", "##s"]


def word_piece() -> Backend:
    vocab = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    backend.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", special)
    return backend


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(word_piece(), {"sep_token": "[SEP]", "cls_token": "[CLS]", "unk_token": "[UNK]", "pad_token": "[PAD]"})


def texts(rng: random.Random) -> tuple[str, str]:
    first, second = (" ".join(rng.choices(["One", "sixty", "threes", "five", "other"], k=rng.randint(1, 14))) for _ in range(2))
    return first, second


@pytest.mark.parametrize("side", ["right", "left"])
def test_pairs_are_cut_as_tokenizers_cut_them(tokenizer: Tokenizer, side: str) -> None:
    rng, oracle = random.Random(0), word_piece()
    for _ in range(300):
        pair, limit = texts(rng), rng.randint(5, 30)
        oracle.enable_truncation(limit, strategy="longest_first", direction=side)
        expected = oracle.encode(*pair)
        (found,) = encode_pairs(tokenizer, [pair], PairCut(limit, side=side), longest=64)
        assert (found.ids, found.type_ids) == (expected.ids, expected.type_ids)


def test_each_text_may_have_a_limit(tokenizer: Tokenizer) -> None:
    pair = ("one two three four", "five six one two")
    (found,) = encode_pairs(tokenizer, [pair], PairCut(None, 2, 3), longest=64)
    (expected,) = encode_pairs(tokenizer, [("one two", "five six one")], UNCUT, longest=64)
    assert found == expected
    (plain,) = encode_pairs(tokenizer, [pair], UNCUT, longest=64, add_special_tokens=False)
    assert plain.ids == [id for text in pair for id in tokenizer.encode(text, add_special_tokens=False)]
    assert joined_texts(tokenizer, [("one two ", "three four")], PairCut(9, None, 1)) == ["one two three"]
    for length, message in ((65, "the model takes 64"), (2, "has 3 special tokens alone")):
        with pytest.raises(InvalidRequestError, match=message):
            encode_pairs(tokenizer, [pair], PairCut(length), longest=64)


def test_types_say_where_the_second_text_starts() -> None:
    assert second_start({"prompt_token_ids": [5, 6, 7], "token_type_ids": [0, 0, 1]}, 3) == 2
    assert second_start({"prompt_token_ids": [5], "token_type_ids": [0]}, 1) is None and second_start([5, 6], 2) is None
    for types, message in (([0, 1], "has 2 types"), ([0, 1, 0], "then 1"), ([0, 2, 2], "then 1"), (3, "has no types")):
        with pytest.raises(InvalidRequestError, match=message):
            second_start({"token_type_ids": types}, 3)

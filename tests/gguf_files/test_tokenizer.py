"""Tokenizers made of what GGUF files say, against tokenizers made by other means of the same vocabulary."""

import time

import pytest
from tokenizers.implementations import BertWordPieceTokenizer

from jaxllm.errors import ModelLoadError
from jaxllm.hub import resolve_model
from jaxllm.text.tokenizer import load_tokenizer

gguf = pytest.importorskip("gguf")

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Makes the tokenizer of a file with such entries, and of tokens with types."""
    monkeypatch.setenv("JAXLLM_CACHE_DIR", str(tmp_path / "cache"))
    count = iter(range(100))

    def make(kind, tokens, types=None, scores=None, merges=None, **entries):
        file = tmp_path / f"{next(count)}.gguf"
        writer = gguf.GGUFWriter(file, "llama")
        writer.add_tokenizer_model(kind)
        if tokens:
            writer.add_token_list(tokens)
            writer.add_token_types(types or [NORMAL] * len(tokens))
        for add, values in ((writer.add_token_scores, scores), (writer.add_token_merges, merges)):
            if values is not None:
                add(values)
        for name, value in entries.items():
            {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}[type(value)](
                f"tokenizer.ggml.{name}", value
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return load_tokenizer(resolve_model(str(file)))

    return make


def test_words_in_pieces(made):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "play", "##ing", "un", "##play", "##able", "cafe", "!", "中", "[", "x"]
    stored = [piece if piece in pieces[:4] else piece[2:] if piece.startswith("##") else f"▁{piece}" for piece in pieces]
    ids = {"padding_token_id": 0, "unknown_token_id": 1, "bos_token_id": 2, "seperator_token_id": 3}
    tokenizer = made("bert", stored, [CONTROL] * 4 + [NORMAL] * 10, **ids)
    expected = BertWordPieceTokenizer(dict(zip(pieces, range(len(pieces)), strict=True)))
    for text in ("Playing unplayable café!", "中x [ zzz", ""):
        assert tokenizer.encode(text) == expected.encode(text).ids
        assert tokenizer.encode(text, False) == expected.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode("unplayable playing", False)) == "unplayable playing"


def test_unigrams(made):
    pieces = {
        "<pad>": 0,
        "</s>": 0,
        "<unk>": 0,
        "▁": -4,
        "▁hello": -3,
        "▁he": -2,
        "llo": -2.5,
        "▁wor": -3,
        "ld": -3,
        "l": -5,
        "d": -5,
    }
    types = [CONTROL, CONTROL, 2] + [NORMAL] * 8
    tokenizer = made(
        "t5", list(pieces), types, list(map(float, pieces.values())), add_space_prefix=True, remove_extra_whitespaces=True
    )
    spelled = tokenizer.convert_ids_to_tokens(tokenizer.encode("  hello   world zz</s>ld"))
    assert spelled == ["▁hello", "▁wor", "ld", "▁", "<unk>", "</s>", "▁", "ld", "</s>"]
    assert tokenizer.decode(tokenizer.encode("hello world", False)) == "hello world"
    as_it_is = made("t5", list(pieces), types, list(map(float, pieces.values())), add_eos_token=False)
    assert as_it_is.convert_ids_to_tokens(as_it_is.encode("ld  hello")) == ["ld", "▁", "▁hello"]


def test_characters_with_merges(made):
    tokens = ["<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abc▁", "ab", "▁ab", "b▁"]
    types = [CONTROL, 2, *[BYTE] * 256, *[NORMAL] * 7]
    ids = {"bos_token_id": 0, "unknown_token_id": 1}
    for kind, more in (("gemma4", {}), ("gpt2", {"pre": "sarvam-moe", "add_bos_token": True})):
        tokenizer = made(kind, tokens, types, merges=["a b", "▁ ab", "b ▁"], **ids, **more)
        found = tokenizer.encode("ab ab é")
        assert tokenizer.convert_ids_to_tokens(found) == ["<bos>", "ab", "▁ab", "▁", "<0xC3>", "<0xA9>"]
        assert tokenizer.decode(found, skip_special_tokens=True) == "ab ab é"


def test_digits_and_the_first_token_follow_the_name_of_the_split(made):
    def encode(pre, **more):
        return made(
            "gpt2", ["1", "2", "12", "<s>"], [1, 1, 1, CONTROL], merges=["1 2"], bos_token_id=3, pre=pre, **more
        ).encode("12")

    assert [encode(pre) for pre in ("gpt-2", "smollm", "qwen2", "llama-bpe")] == [[2], [0, 1], [0, 1], [3, 2]]
    assert encode("llama-bpe", add_bos_token=False) == [2]
    assert encode("gpt-2", add_bos_token=True, add_eos_token=True, eos_token_id=0) == [3, 2, 0]


def test_words_that_merges_do_not_reach(made):
    tokens, merges = ["a", "b", "c", "abc", "ab"], ["a b"]
    assert made("gpt2", tokens, merges=merges, pre="llama-bpe", add_bos_token=False).encode("abc") == [3]
    assert made("gpt2", tokens, merges=merges, pre="qwen2").encode("abc") == [4, 2]


def test_what_cannot_be_made_is_named(made):
    for message, arguments in {
        "has a tokenizer of the kind 'rwkv', supported: gpt2, gemma4, llama, bert, t5; pass --tokenizer": ("rwkv", ["a"]),
        "splits texts as 'zzz' .tokenizer.ggml.pre., none of the 89 names in docs/MODELS.md; pass --tokenizer": ("gpt2", ["a"]),
        "a tokenizer of pairs without tokenizer.ggml.merges; pass --tokenizer": ("gemma4", ["a"]),
        "a unigram tokenizer without scores or an unknown token; pass --tokenizer": ("t5", ["a"]),
    }.items():
        with pytest.raises(ModelLoadError, match=message):
            made(*arguments, pre="zzz")
    with pytest.raises(ModelLoadError, match="merges 'a' and 'b', of which it has not all tokens; pass --tokenizer"):
        made("gpt2", ["a", "b"], merges=["a b"])


def test_tokens_of_any_length_and_number_take_no_long_time(made):
    begin = time.process_time()
    with pytest.raises(ModelLoadError, match="a token of 300000 characters, at most 1024 are possible; pass --tokenizer"):
        made("llama", ["<unk>", "<s>", "</s>", "a", "a" * 300_000])
    names = [f"<t{i}>" for i in range(10_000)]  # alternately special and not
    tokenizer = made("llama", ["<unk>", "<s>", "</s>", "a", *names], [NORMAL] * 4 + [CONTROL, USER_DEFINED] * 5_000)
    assert [id for id in tokenizer.encode("<t0>a<t1>") if id > 2] == [4, 3, 5]
    assert (4 in tokenizer.all_special_ids, 5 in tokenizer.all_special_ids) == (True, False)
    equal = made("llama", ["<unk>", "<s>", "</s>"] + ["a"] * 100_000)
    assert equal.vocab_size == 4
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"bos_token_id": "x"}, "tokenizer of wrong types .*bos_token_id"),
        ({"pre": 1}, "tokenizer of wrong types .*pre"),
        ({"scores": "x"}, "tokenizer of wrong types .*scores"),
    ],
)
def test_values_of_wrong_types_are_told(made, entries, message):
    with pytest.raises(ModelLoadError, match=message):
        made("llama", ["<unk>", "<s>", "</s>", "a"], **entries)

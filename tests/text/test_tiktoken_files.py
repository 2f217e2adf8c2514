"""tiktoken.model against the rule of merges that the library tiktoken has."""

import base64
import json
import random
from pathlib import Path

import pytest

from jaxllm.errors import ModelLoadError
from jaxllm.gguf_files.splits import pre_tokenizer
from jaxllm.text.byte_letters import BYTES
from jaxllm.text.tokenizer import load_tokenizer
from tests.helpers.byte_ranks import TEXTS, merged, ranks

NAMED = {"[BOS]": True, "[EOS]": True, "<|im_end|>": True, "<think>": False}


def write(
    directory: Path,
    ranks: dict[bytes, int],
    *,
    first: int | None = None,
    kind: str = "TikTokenTokenizer",
    named: dict[str, bool] = NAMED,
) -> Path:
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (directory / "tiktoken.model").write_text("".join(lines))
    first = len(ranks) if first is None else first
    added = {first + 2 * i: {"content": text, "special": special} for i, (text, special) in enumerate(named.items())}
    config = {"tokenizer_class": kind, "eos_token": "[EOS]", "added_tokens_decoder": added}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_ids_are_those_of_merges_by_rank(tmp_path: Path) -> None:
    known = ranks()
    tokenizer = load_tokenizer(write(tmp_path, known))
    split, letters = pre_tokenizer("kimi-k2"), random.Random(2)
    texts = [*TEXTS, *("".join(letters.choices("aabx the é中\n1'", k=30)) for _ in range(200))]
    for text in texts:
        parts = [bytes(BYTES[letter] for letter in part) for part, _ in split.pre_tokenize_str(text)]
        assert b"".join(parts) == text.encode()
        ids = tokenizer.encode(text)
        assert ids == [id for part in parts for id in merged(part, known)]
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_special_tokens_have_their_ids_and_others_are_reserved(tmp_path: Path) -> None:
    known = ranks()
    tokenizer = load_tokenizer(write(tmp_path, known))
    first = len(known)
    assert tokenizer.vocab_size == first + 256
    assert [tokenizer.convert_token_to_id(text) for text in NAMED] == [first, first + 2, first + 4, first + 6]
    assert tokenizer.encode("[BOS]a<think><|im_end|>") == [first, known[b"a"], first + 6, first + 4]
    assert tokenizer.decode([first, known[b"a"], first + 6, first + 1], skip_special_tokens=True) == "a<think>"
    assert tokenizer.convert_id_to_token(first + 255) == f"<|reserved_token_{first + 255}|>"
    assert tokenizer.eos_token_id == first + 2


def test_what_is_no_such_tokenizer_is_told(tmp_path: Path) -> None:
    known = ranks()

    def told(content: bytes) -> str:
        (tmp_path / "tiktoken.model").write_bytes(content)
        with pytest.raises(ModelLoadError) as error:
            load_tokenizer(tmp_path)
        return str(error.value)

    write(tmp_path, known)
    whole = (tmp_path / "tiktoken.model").read_bytes()
    assert "no token in base64" in told(b"*** 0\n")
    assert "must have the rank 0" in told(b"YQ== 1\n")
    assert "no tokens for 255 single bytes" in told(b"YQ== 0\n")
    assert "is not a tokenizer" in told(b"YQ== many\n")
    write(tmp_path, known, first=3)
    assert "added_tokens_decoder has the id 3, must be from" in told(whole)
    write(tmp_path, known, named={"a": True})
    assert f"gives 'a' the id {len(known)}, but it is the token {known[b'a']}" in told(whole)
    write(tmp_path, known, kind="OtherTokenizer")
    assert "is of the tokenizer_class 'OtherTokenizer'" in told(whole)

"""tiktoken.model against the rule of merges that the library tiktoken has, computed plainly."""

import base64
import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from jaxllm.errors import ModelLoadError
from jaxllm.gguf_files.splits import pre_tokenizer
from jaxllm.text.byte_letters import BYTES
from jaxllm.text.tokenizer import load_tokenizer

TEXTS = (
    "The quick fox's den, it's 1234567 m\r\n\r\n  away 😀",
    "天気がいい中文abc中文",
    "aaaaaaaaaaaaaab bbbbab",
    " \n\t x",
    "ÄÖüß\x00\x7f",
    "",
)
LEARNT = " ".join(TEXTS) * 3 + "the then there aaab baaa aabaab xxxx xxx"
NAMED = {"[BOS]": True, "[EOS]": True, "<|im_end|>": True, "<think>": False}


def ranks() -> dict[bytes, int]:
    """The single bytes in another order, then tokens learnt from a text."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    learner.train_from_iterator(LEARNT.split(" "), trainers.BpeTrainer(vocab_size=120, min_frequency=2, show_progress=False))
    learnt = [bytes(BYTES[letter] for letter in token) for token in learner.get_vocab() if len(token) > 1]
    order = random.Random(1).sample(range(256), 256)
    return {
        token: rank
        for rank, token in enumerate([*(bytes([byte]) for byte in order), *sorted(learnt, key=lambda t: (len(t), t))])
    }


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


def merged(part: bytes, ranks: dict[bytes, int]) -> list[int]:
    """The pair of neighbours that make the token of the lowest rank is merged, the first of equal ones, until there is none."""
    if part in ranks:
        return [ranks[part]]
    pieces = [bytes([byte]) for byte in part]
    while pairs := [(ranks[a + b], i) for i, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False)) if a + b in ranks]:
        _, i = min(pairs)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return [ranks[piece] for piece in pieces]


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

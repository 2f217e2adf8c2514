"""tekken.json against the rule of merges that the library tiktoken has, behind special tokens."""

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest

from jaxllm.errors import ModelLoadError
from jaxllm.gguf_files.splits import SPLITS, pre_tokenizer
from jaxllm.text.byte_letters import BYTES
from jaxllm.text.tokenizer import load_tokenizer
from tests.helpers.byte_ranks import TEXTS, merged, ranks

NUM_SPECIAL = 30


def write(directory: Path, known: dict[bytes, int], **changes: Any) -> Path:
    """A file with tokens that its default_vocab_size leaves out."""
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None} for token, rank in known.items()
    ]
    config = {
        "pattern": SPLITS["tekken"][0],
        "num_vocab_tokens": len(vocab) + 1,
        "default_vocab_size": NUM_SPECIAL + len(vocab),
        "default_num_special_tokens": NUM_SPECIAL,
        "version": "v3",
    }
    more = {"rank": len(vocab), "token_bytes": base64.b64encode(b"the quick").decode(), "token_str": "the quick"}
    found = {"config": config, "vocab": [*vocab, more], "image": {"image_patch_size": 14}}
    (directory / "tekken.json").write_text(json.dumps({**found, **changes}))
    return directory


def test_ids_are_those_of_merges_by_rank_behind_special_tokens(tmp_path: Path) -> None:
    known = ranks()
    tokenizer = load_tokenizer(write(tmp_path, known))
    split, letters = pre_tokenizer("tekken"), random.Random(2)
    texts = [*TEXTS, *("".join(letters.choices("aabx the éB中\n1'/", k=30)) for _ in range(200))]
    for text in texts:
        parts = [bytes(BYTES[letter] for letter in part) for part, _ in split.pre_tokenize_str(text)]
        ids = [NUM_SPECIAL + id for part in parts for id in merged(part, known)]
        assert tokenizer.encode(text) == [1, *ids] and tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.vocab_size == NUM_SPECIAL + len(known)


def test_special_tokens_are_those_of_the_file_or_the_first_of_all_versions(tmp_path: Path) -> None:
    known = ranks()
    a = NUM_SPECIAL + known[b"a"]
    tokenizer = load_tokenizer(write(tmp_path, known))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 11)
    assert tokenizer.encode("[INST]a[/INST]<SPECIAL_29>", False) == [3, a, 4, 29]
    assert tokenizer.encode_as_text("[INST]a", is_start=True)[-1:] == [a] and 3 not in tokenizer.encode_as_text(
        "[INST]a", is_start=True
    )
    assert tokenizer.decode([1, 3, a, 4, 29, 2], skip_special_tokens=True) == "a"
    assert [one.ids[:1] for one in tokenizer.encode_pairs([("a", "b")])] == [[1]]
    given = [
        {"rank": 1, "token_str": "<s>", "is_control": True},
        {"rank": 2, "token_str": "</s>"},
        {"rank": 5, "token_str": "[ARGS]"},
    ]
    tokenizer = load_tokenizer(write(tmp_path, known, special_tokens=given))
    assert tokenizer.encode("[ARGS]a", False) == [5, a] and tokenizer.eos_token_id == 2
    assert tokenizer.convert_id_to_token(3) == "<SPECIAL_3>" and tokenizer.pad_token_id is None


def test_what_is_no_such_tokenizer_is_told(tmp_path: Path) -> None:
    known = ranks()
    whole = json.loads((write(tmp_path, known) / "tekken.json").read_text())

    def told(**changes: Any) -> str:
        write(tmp_path, known, **changes)
        with pytest.raises(ModelLoadError, match="is not a tokenizer") as error:
            load_tokenizer(tmp_path)
        return str(error.value)

    def config(**values: Any) -> str:
        return told(config={**whole["config"], **values})

    assert "must have the rank 1" in told(vocab=[{"rank": 0, "token_bytes": "YQ=="}, *whole["vocab"][2:]])
    assert "Invalid base64" in told(vocab=[{"rank": 0, "token_bytes": "***"}])
    assert f"leaves {len(known) + 2} tokens behind {NUM_SPECIAL} special ones" in config(
        default_vocab_size=NUM_SPECIAL + len(known) + 2
    )
    assert "a special token has the rank 19, but there are 9" in config(default_num_special_tokens=9)
    assert "two special tokens have the same rank" in told(special_tokens=[{"rank": 1, "token_str": text} for text in "<>"])
    assert "spelled as another token" in told(special_tokens=[{"rank": 1, "token_str": "a"}])
    assert "pattern" in config(pattern=None)
    assert "is not a tokenizer" in config(pattern="(")

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxllm.errors import InvalidRequestError, ModelLoadError
from jaxllm.text.model_files import text_files
from jaxllm.text.tokenizer import SlowTokenizer, load_tokenizer
from tests.helpers.tiny_tokenizers import BOS, EOS, KINDS, PLAIN, ROLE, write_tokenizer

TEXT = "The quick fox 😀 says 中文, doesn't it?"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_text_survives_encoding_and_decoding(tmp_path: Path, kind: str) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, kind))
    ids = tokenizer.encode(TEXT)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT
    assert tokenizer.encode(TEXT, add_special_tokens=False) == ids[1:]
    assert tokenizer.encode_batch([TEXT, "a"]) == [ids, tokenizer.encode("a")]


@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_transformers(tmp_path: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    ours = load_tokenizer(write_tokenizer(tmp_path, kind))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ids = theirs(TEXT)["input_ids"]
    assert ours.encode(TEXT) == ids
    assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    assert ours.bos_token_id == theirs.bos_token_id and ours.eos_token_id == theirs.eos_token_id
    assert set(theirs.all_special_ids) <= ours.all_special_ids
    assert len(ours) == len(theirs)
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    messages = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(messages, add_generation_prompt=True) == list(
        theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    )


def test_special_tokens_are_known(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (BOS, EOS, None)
    assert tokenizer.pad_token_id is None
    role, plain = tokenizer.convert_token_to_id(ROLE), tokenizer.convert_token_to_id(PLAIN)
    assert role in tokenizer.all_special_ids and plain not in tokenizer.all_special_ids
    assert tokenizer.added_tokens[plain] == PLAIN
    assert tokenizer.vocab_size == len(tokenizer.get_vocab()) == max(tokenizer.get_vocab().values()) + 1


def test_special_tokens_may_be_objects_in_a_file_of_their_own(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": EOS, "lstrip": False}}))
    assert load_tokenizer(tmp_path).eos_token == EOS


def test_tokens_only_in_the_config_are_added(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    size = load_tokenizer(tmp_path).vocab_size
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["added_tokens_decoder"] = {str(size): {"content": "<new>", "special": True}}
    file.write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a<new>b")[-2] == size and size in tokenizer.all_special_ids


def test_ids_outside_the_vocabulary_have_no_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    assert tokenizer.decode([10**6]) == "" and tokenizer.token_text(10**6) == "" and tokenizer.token_bytes(10**6) == b""


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_token_texts_put_together_are_the_text(tmp_path: Path, kind: str) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, kind))
    ids = tokenizer.encode("The quick brown fox", add_special_tokens=False)
    assert "".join(map(tokenizer.token_text, ids)).strip() == "The quick brown fox"
    assert tokenizer.token_text(ids[1]).startswith(" ") or tokenizer.token_text(ids[1]).isalpha()


def test_truncation_in_the_file_is_not_obeyed(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    state = json.loads(file.read_text())
    state["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(state))
    assert len(load_tokenizer(tmp_path).encode(TEXT)) > 4


def test_templates_are_found_wherever_they_are(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    assert load_tokenizer(write_tokenizer(tmp_path, chat_template=named)).chat_templates == {
        "default": "one",
        "tool_use": "two",
    }
    (tmp_path / "chat_template.jinja").write_text("three")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("four")
    assert load_tokenizer(tmp_path).chat_templates == {"default": "three", "tool_use": "two", "rag": "four"}


def test_a_missing_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="tokenizer missing.*--tokenizer or --skip-tokenizer-init"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_corrupt_file_is_a_clear_error(tmp_path: Path, file: str) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / file).write_text("{")
    with pytest.raises(ModelLoadError, match=file):
        load_tokenizer(tmp_path)


def test_an_unknown_name_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="nobody/nothing.*go online"):
        text_files("nobody/nothing", download_dir=str(tmp_path))
    assert text_files(str(tmp_path)) == tmp_path


def test_a_tokenizer_without_tokenizer_json_comes_through_transformers(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "fast"))
    old = tmp_path / "old"
    old.mkdir()
    state = json.loads((tmp_path / "fast" / "tokenizer.json").read_text())["model"]
    (old / "vocab.json").write_text(json.dumps(state["vocab"]))
    (old / "merges.txt").write_text("\n".join(" ".join(pair) for pair in state["merges"]))
    (old / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": EOS}))
    loaded = load_tokenizer(old)
    assert loaded.eos_token == EOS and loaded.decode(loaded.encode(TEXT)) == TEXT
    assert loaded.encode(TEXT, add_special_tokens=False) == tokenizer.encode(TEXT, add_special_tokens=False)


def test_a_python_tokenizer_has_the_same_methods() -> None:
    from transformers import ByT5Tokenizer

    tokenizer = SlowTokenizer(ByT5Tokenizer())
    ids = tokenizer.encode("Köln", add_special_tokens=False)
    assert (
        tokenizer.decode(ids) == "Köln" and not tokenizer.is_byte_level and tokenizer.eos_token_id in tokenizer.all_special_ids
    )
    assert tokenizer.convert_ids_to_tokens(ids)[0] == "K" and tokenizer.convert_id_to_token(10**6) is None


def test_other_threads_run_while_a_long_text_is_encoded(tmp_path: Path) -> None:
    tokenizer, pause, stop = load_tokenizer(write_tokenizer(tmp_path)), 0.0, threading.Event()

    def watch() -> None:
        nonlocal pause
        last = time.perf_counter()
        while not stop.is_set():
            pause, last = max(pause, (now := time.perf_counter()) - last), now

    def longest_pause(work: Callable[[], Any]) -> float:
        """Longest pause of the other thread, as a fraction of the work's time."""
        nonlocal pause
        pause, began = 0.0, time.perf_counter()
        work()
        return pause / (time.perf_counter() - began)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        text = "word " * 60_000
        assert min(longest_pause(lambda: tokenizer.encode(text)) for _ in range(3)) < 0.6
    finally:
        stop.set()
        thread.join()


def test_the_fast_path_does_not_import_transformers(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from jaxllm.text.tokenizer import load_tokenizer
assert load_tokenizer(Path({str(write_tokenizer(tmp_path))!r})).encode("hi")
assert not {{"transformers", "jax", "torch"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def with_part(directory: Path, name: str, part: object) -> Path:
    write_tokenizer(directory)
    file = directory / "tokenizer.json"
    whole = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**whole, name: part}), encoding="utf-8")
    return directory


def replace(pattern: dict[str, str], content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": pattern, "content": content}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        ("normalizer", replace({"String": "a"}, "b" * 100_000), "make up to 400000 characters of one, at most 64"),
        ("normalizer", {"type": "Sequence", "normalizers": [replace({"String": "a"}, "aa")] * 30}, "at most 64 are allowed"),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [BYTES] * 500}, "at most 64 are allowed"),
        ("decoder", {"type": "Sequence", "decoders": [replace({"String": "a"}, "aa")] * 30}, "at most 64 are allowed"),
        (
            "post_processor",
            {
                "type": "TemplateProcessing",
                "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 50,
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {},
            },
            "its template has 50 pieces and a text 50 times",
        ),
        ("model", {"type": "BPE", "vocab": {"a": 2**31}, "merges": []}, "have ids up to 2147483648"),
        ("model", {"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "?" * 5000}, "Unk token `.*` not found"),
        ("version", "x" * 10**6, "Unknown tokenizer version"),
    ],
)
def test_hostile_tokenizers_are_refused(tmp_path: Path, name: str, part: object, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as raised:
        load_tokenizer(with_part(tmp_path, name, part))
    assert "tokenizer.json is not a tokenizer" in str(raised.value) and len(str(raised.value)) < 600


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", "[" * 10**6, "nests deeper than 64"),
        ("tokenizer_config.json", {"bos_token": 1.5}, "bos_token"),
        ("tokenizer_config.json", {"eos_token": "\ud800"}, "broken"),
        ("tokenizer_config.json", {"eos_token": "x" * 2000}, "a token has 2000 characters, at most 1024"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1": {"special": True}}}, "content"),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "added_tokens_decoder"),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}, "template"),
        ("special_tokens_map.json", {"pad_token": {"content": [1]}}, "content"),
        ("chat_template.json", {"chat_template": "x" * (2**20 + 1)}, "a chat template has 1048577 characters, at most 1048576"),
    ],
)
def test_hostile_files_beside_a_tokenizer_are_refused(tmp_path: Path, name: str, content: object, message: str) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    with pytest.raises(ModelLoadError, match=message) as raised:
        load_tokenizer(tmp_path)
    assert name in str(raised.value) and len(str(raised.value)) < 600


def test_a_text_that_takes_a_pattern_too_many_tries_is_refused(tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = load_tokenizer(with_part(tmp_path, "pre_tokenizer", {"type": "Sequence", "pretokenizers": [split, BYTES]}))
    assert tokenizer.encode("short")
    for encode in (
        tokenizer.encode,
        lambda text: tokenizer.encode_batch([text]),
        lambda text: tokenizer.encode_as_text(text, is_start=True),
    ):
        with pytest.raises(InvalidRequestError, match="the tokenizer cannot split this text: .*retry-limit"):
            encode("a" * 40 + "b")

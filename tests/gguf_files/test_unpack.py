"""The directory that is made of a GGUF file: what it has, and when it is made anew."""

import errno
import json
import shutil
from pathlib import Path

import pytest

from jaxllm.errors import ModelLoadError
from jaxllm.gguf_files import unpack as unpacking
from jaxllm.hub import resolve_model
from jaxllm.text.generation_config import LLAMA_CPP, load_generation_config
from jaxllm.text.tokenizer import load_tokenizer

gguf = pytest.importorskip("gguf")


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file whose tokenizer cannot be made."""
    monkeypatch.setenv("JAXLLM_CACHE_DIR", str(tmp_path / "cache"))
    return write(tmp_path / "model.gguf", pre="unheard-of")


def write(file, *, pre, sampling=()):
    writer = gguf.GGUFWriter(file, "llama")
    for name, value in dict(sampling).items():
        (writer.add_int32 if isinstance(value, int) else writer.add_float32)(f"general.sampling.{name}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["1", "2", "12"])
    writer.add_token_types([1, 1, 1])
    writer.add_token_merges(["1 2"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_tokenizer_that_cannot_be_made_is_an_error_where_one_is_needed(file, caplog):
    for _ in range(2):
        directory = resolve_model(str(file))
        with pytest.raises(ModelLoadError, match="tokenizer missing: .*model.gguf splits texts as 'unheard-of'.*--tokenizer"):
            load_tokenizer(directory)
    assert not caplog.records


def test_new_rules_make_a_new_directory(file, monkeypatch):
    first = resolve_model(str(file))
    assert resolve_model(str(file)) == first
    monkeypatch.setattr(unpacking, "_rules", lambda: "those of another version")
    monkeypatch.setattr(unpacking, "tokenizer_files", lambda file: ("{}", {}))
    second = resolve_model(str(file))
    assert second != first and (second / "tokenizer.json").read_text() == "{}"


def test_a_directory_that_another_process_made_is_taken(file, monkeypatch):
    rename = Path.rename

    def too_late(self, target):
        shutil.copytree(self, target)
        rename(self, target)

    monkeypatch.setattr(Path, "rename", too_late)
    directory = resolve_model(str(file))
    assert json.loads((directory / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert list(directory.parent.iterdir()) == [directory]


def test_a_directory_that_cannot_be_made_is_an_error(file, monkeypatch):
    def full(self, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        with pytest.raises(ModelLoadError, match="cannot be unpacked: .*No space left.*set .JAXLLM_CACHE_DIR"):
            resolve_model(str(file))
    directory = resolve_model(str(file))
    (directory / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=f"cannot be unpacked: .*remove {directory}"):
        resolve_model(str(file))


def test_sampling_values_that_a_file_recommends_are_the_models_defaults(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("JAXLLM_CACHE_DIR", str(tmp_path / "cache"))
    recommended = {"temp": 0.6, "top_k": 20, "penalty_repeat": 1.05, "mirostat": 2}
    with_values = load_generation_config(
        "auto", resolve_model(str(write(tmp_path / "a.gguf", pre="gpt-2", sampling=recommended)))
    )
    assert (
        with_values.chat_values == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05} == with_values.sampling_values
    )
    assert "recommends sampling with mirostat 2, which is not supported" in caplog.text
    without = load_generation_config("auto", resolve_model(str(write(tmp_path / "b.gguf", pre="gpt-2"))))
    assert without.chat_values == LLAMA_CPP and without.sampling_values == {}

"""The directory that is made of a GGUF file: what it has, and when it is made anew."""

import errno
import json
import shutil
from pathlib import Path

import pytest

from jaxllm.errors import ModelLoadError
from jaxllm.gguf_files import unpack as unpacking
from jaxllm.hub import resolve_model
from jaxllm.text.tokenizer import load_tokenizer

gguf = pytest.importorskip("gguf")


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file whose tokenizer cannot be made."""
    monkeypatch.setenv("JAXLLM_CACHE_DIR", str(tmp_path / "cache"))
    return write(tmp_path / "model.gguf", pre="unheard-of")


def write(file, *, pre):
    writer = gguf.GGUFWriter(file, "llama")
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

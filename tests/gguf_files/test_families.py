"""The config.json of a GGUF file."""

import pytest

from jaxllm.gguf_files.families import config_json
from jaxllm.gguf_files.reading import GgufFile

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize(
    ("ids", "ends"),
    [
        ({}, [1, 3]),
        ({"eos": 0}, [0, 1, 3]),
        ({"eos": 0, "eot": 1}, [0, 1]),
        ({"eos": 0, "eot": 1, "eom": 2}, [0, 1, 2]),
    ],
)
def test_a_turn_ends_at_tokens_that_the_file_names_or_that_are_known_by_text(tmp_path, ids, ends):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_token_list(["</s>", "<|eot_id|>", "<|other|>", "<|im_end|>", "<|end|>"])
    writer.add_token_types([3, 3, 3, 3, 1])  # the last is an ordinary token
    for kind, id in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{kind}_token_id", id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert config_json(GgufFile([tmp_path / "model.gguf"]))["eos_token_id"] == ends

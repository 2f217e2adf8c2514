"""`jaxllm inspect`: how layers are shown, and files that cannot start."""

import json
import re

import numpy as np
import pytest

from jaxllm.cli.main import main
from tests.helpers import vision_checkpoint

WIDTH = 256


def write(file, *, architecture="llama", pre="smollm", number_format="F32"):
    """A model of one layer without values, of which the keys' weights have the number format."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(64)
    writer.add_block_count(1)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["a", "b", "ab", "c"])
    writer.add_token_merges(["a b"])
    layer = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for name, count in {"token_embd": 4, **{f"blk.0.{name}": WIDTH for name in layer}}.items():
        kind = gguf.GGMLQuantizationType[number_format if name.endswith("attn_k") else "F32"]
        values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        stored = np.zeros((count, WIDTH // values * num_bytes), np.uint8)
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.zeros(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("made", "options", "verdict"),
    [
        ({}, [], "it fits"),
        ({"pre": "unheard-of"}, [], "it cannot start: tokenizer missing: .*splits texts as 'unheard-of'.*pass --tokenizer"),
        ({"pre": "unheard-of"}, ["--tokenizer", "demo"], "it fits"),
        ({"pre": "unheard-of"}, ["--skip-tokenizer-init"], "it fits"),
        ({"number_format": "IQ2_XXS"}, [], "it cannot start: .*self_attn.k_proj.weight is IQ2_XXS"),
        ({"architecture": "unheard-of"}, [], "has the architecture 'unheard-of'; from GGUF files llama, "),
    ],
)
def test_what_cannot_start_does_not_fit(made, options, verdict, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAXLLM_CACHE_DIR", str(tmp_path / "cache"))
    write(tmp_path / "model.gguf", **made)
    command = ["inspect", str(tmp_path / "model.gguf"), *options]
    starts = verdict == "it fits"
    assert main(command) == (0 if starts else 1)
    shown = capsys.readouterr()
    assert any(re.search(verdict, line) for line in (shown.out + shown.err).splitlines())
    assert starts == ("it fits" in shown.out)
    if "architecture" not in made:
        assert main([*command, "--json"]) == (0 if starts else 1)
        report = json.loads(capsys.readouterr().out)
        assert report["memory_plan"]["fits"] is starts and (report["fault"] is None) is starts


def test_a_model_of_alternating_layers_is_shown_in_100_columns(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 24,
        "sliding_window": 32,
        "max_position_embeddings": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines() if not line.startswith("model ")) <= 100
    lines = " ".join(shown.split())
    assert "layers 0-4, 6-10, 12-16, 18-22: attention (num_heads 8, num_kv_heads 4, head_dim 256, rope, window 32, " in lines
    assert "layers 5, 11, …, 23: attention (num_heads 8, num_kv_heads 4, head_dim 256, rope (theta 1000000.0), head" in lines
    assert "full attention, layers 5, 11, …, 23: 32.0 KiB a token, at most " in lines


def test_how_a_model_sees_images_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAXLLM_CACHE_DIR", str(tmp_path / "cache"))
    directory = str(vision_checkpoint.write(tmp_path / "model"))
    assert main(["inspect", directory]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    told = "images qwen3_vl, an encoder of 2 layers of width 32 for patches of 16 x 16 pixels, at most 16384 of an image"
    assert told in shown and "640x480 pixels are 234 tokens" in shown
    assert main(["inspect", directory, "--language-model-only", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] is None


def test_what_fits_in_host_memory_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["inspect", "demo", "--dtype", "bfloat16", "--device-memory", "80G"]
    assert main([*command, "--kv-offloading-size", "64"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("host memory"))
    told = "64.00 GiB: 1398101 blocks of 48.0 KiB, 22369616 tokens; copies take 192.0 MiB of each device"
    assert line == f"host memory for blocks: {told}"
    assert main([*command, "--json"]) == 0 and json.loads(capsys.readouterr().out)["host_memory"] is None
    assert main([*command, "--kv-offloading-size", "64", "-tp", "2", "--data-parallel-size", "2", "--json"]) == 0
    host = json.loads(capsys.readouterr().out)["host_memory"]
    assert (host["num_bytes"], host["num_blocks"], host["block_bytes"]) == (32 << 30, (64 << 30) // 2 // 49152, 49152)


def test_host_memory_that_this_machine_has_not_is_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "demo", "--kv-offloading-size", "900000"]) == 1
    assert "it does not fit: kv_offloading_size is 9e+05 GiB, but " in capsys.readouterr().out

"""`jaxllm inspect FILE.gguf` of files that cannot start."""

import json
import re

import numpy as np
import pytest

from jaxllm.cli.main import main

gguf = pytest.importorskip("gguf")

WIDTH = 256


def write(file, *, architecture="llama", pre="smollm", number_format="F32"):
    """A model of one layer without values, of which the keys' weights have the number format."""
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

"""Queries, keys and values in one tensor with a run for each of several devices, as MiMo-V2.5 has them."""

import json

import numpy as np
import pytest
from ml_dtypes import float8_e4m3fn
from safetensors.numpy import load_file, save_file

from tests.helpers import goldens
from tests.helpers.slow import slow_except

SOURCE = goldens.FOLDER / "mimo_v2_flash"
RUNS, BLOCK = 2, 16
"""KV heads of layers without a window; rows of a run of such a layer, 68, are no multiple of a block."""


def write(directory, *, is_fp8):
    """The golden's checkpoint in this layout, and its tensors as they were, those in fp8 rounded."""
    directory.mkdir()
    raw = json.loads((SOURCE / "config.json").read_text())
    tensors = {name: value.astype(np.float32) for name, value in load_file(SOURCE / "model.safetensors").items()}
    written = dict(tensors)
    for layer in range(raw["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.self_attn."
        names = [f"{prefix}{letter}_proj.weight" for letter in "qkv"]
        runs = [np.concatenate(parts) for parts in zip(*(np.split(written.pop(name), RUNS) for name in names), strict=True)]
        scales = []
        if is_fp8:
            runs, scales = map(list, zip(*map(rounded, runs), strict=True))
            written[f"{prefix}qkv_proj.weight_scale_inv"] = np.concatenate(scales)
            wide = [codes.astype(np.float32) * spread(scale, codes.shape) for codes, scale in zip(runs, scales, strict=True)]
            ends = np.cumsum([len(tensors[name]) // RUNS for name in names])[:-1]
            for name, *parts in zip(names, *(np.split(run, ends) for run in wide), strict=True):
                tensors[name] = np.concatenate(parts)
        written[f"{prefix}qkv_proj.weight"] = np.concatenate(runs)
    raw |= {"architectures": ["MiMoV2ForCausalLM"], "attention_projection_layout": "fused_qkv"}
    if is_fp8:
        others = sorted({name.removesuffix(".weight") for name in written if not name.endswith(("qkv_proj.weight", "_inv"))})
        raw["quantization_config"] = {
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
            "activation_scheme": "dynamic",
            "modules_to_not_convert": others,
        }
    (directory / "config.json").write_text(json.dumps(raw))
    save_file(written, directory / "model.safetensors")
    return tensors


def rounded(weight):
    """Its fp8 codes, and the scales of its blocks."""
    rows, columns = -(-len(weight) // BLOCK), -(-weight.shape[1] // BLOCK)
    padded = np.zeros((rows * BLOCK, columns * BLOCK), np.float32)
    padded[: weight.shape[0], : weight.shape[1]] = np.abs(weight)
    scale = padded.reshape(rows, BLOCK, columns, BLOCK).max((1, 3)) / 448
    return (weight / spread(scale, weight.shape)).astype(float8_e4m3fn), scale


def spread(scale, shape):
    return scale.repeat(BLOCK, 0).repeat(BLOCK, 1)[: shape[0], : shape[1]]


@pytest.mark.parametrize(("is_fp8", "size"), slow_except([(False, 1)], [(False, 1), (False, 2), (True, 1), (True, 2)]))
@pytest.mark.slow
def test_runs_are_read_as_tensors_apart(is_fp8, size, tmp_path):
    tensors = write(tmp_path / "fused", is_fp8=is_fp8)
    (tmp_path / "apart").mkdir()
    (tmp_path / "apart" / "config.json").write_text((SOURCE / "config.json").read_text())
    save_file(tensors, tmp_path / "apart" / "model.safetensors")
    token_ids = list(range(3, 30))
    fused, apart = (
        goldens.logits(*goldens.load(tmp_path / name, tensor_parallel_size=size), token_ids) for name in ("fused", "apart")
    )
    np.testing.assert_allclose(fused, apart, atol=1e-4)

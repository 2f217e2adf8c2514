"""Text models inside of checkpoints that see images, by the names of the hub."""

import json
import logging

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.errors import ModelLoadError
from tests.helpers import goldens


def test_the_text_model_of_kimi_k25_is_deepseek_v3(tmp_path, caplog):
    golden = goldens.golden("deepseek_v3")
    text = json.loads((golden.directory / "config.json").read_text())
    raw = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "vision_config": {},
        "text_config": {**text, "model_type": "kimi_k2"},
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors = load_file(golden.directory / "model.safetensors")
    nested = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    tower = {"vision_tower.patch_embed.proj.weight": np.ones(3, np.float32), "mm_projector.proj.0.bias": np.ones(3, np.float32)}
    save_file({**nested, **tower}, tmp_path / "model.safetensors")
    caplog.set_level(logging.INFO, logger="jaxllm")
    (expected, expected_state), (config, state) = goldens.load(golden.directory), goldens.load(tmp_path)
    assert "2 tensors are not used, such as mm_projector.proj.0.bias" in caplog.text
    assert config.layers == expected.layers
    for found, leaf in zip(jax.tree.leaves(state), jax.tree.leaves(expected_state), strict=True):
        np.testing.assert_array_equal(found, leaf)
    save_file({**nested, "other_tower.weight": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="1 unused: other_tower.weight"):
        goldens.load(tmp_path)

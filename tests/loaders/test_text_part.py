"""Checkpoints that hold other models beside a text model, of which the text model alone is loaded."""

import json
import logging
import re

import jax
import numpy as np
import pytest

from jaxllm.errors import ModelLoadError
from jaxllm.layers.build import build_model
from jaxllm.loaders.checkpoint import TensorEntry
from jaxllm.loaders.load import check_weights, load_weights
from jaxllm.loaders.safetensors import Checkpoint
from jaxllm.loaders.tensor_names import as_named_here
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.mesh import make_mesh
from scripts.saving import save_safetensors, write_safetensors
from tests.helpers import goldens

TOWERS = {"model.visual.blocks.0.weight": (3, 2), "vision_tower.embeddings.weight": (3,), "mtp.fc.weight": (2,)}
PLACES = {
    "model.language_model.": "lm_head.",
    "language_model.model.": "language_model.lm_head.",
    "language_model.": "lm_head.",
    "model.": "lm_head.",
}
"""Where checkpoints have the text model, and its head."""


def nested(directory, golden: str, architecture: str, place: str = "model.language_model.", **values) -> None:
    """Write a golden as the text model of a checkpoint of several models. values: of config.json."""
    source = goldens.FOLDER / golden
    raw = json.loads((source / "config.json").read_text())
    del raw["architectures"]
    (directory / "config.json").write_text(json.dumps({"architectures": [architecture], "text_config": raw, **values}))
    checkpoint = Checkpoint(source)
    tensors = {
        re.sub("^model.", place, name).replace("lm_head.", PLACES[place]): checkpoint.tensor(name)
        for name in checkpoint.entries
    }
    write_safetensors(
        directory / "model.safetensors", {**tensors, **{name: np.ones(shape, np.int16) for name, shape in TOWERS.items()}}
    )


def assert_loads_as(directory, golden: str) -> None:
    """The model of a directory has the weights of a golden."""
    _, expected = goldens.load(goldens.FOLDER / golden)
    _, found = goldens.load(directory)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("place", PLACES)
def test_other_models_are_left_out_wherever_the_text_model_is(tmp_path, place, caplog):
    """Their type, int16, is one that no weight could be read in."""
    nested(tmp_path, "llama_gqa", "StrangeForConditionalGeneration", place)
    caplog.set_level(logging.INFO, logger="jaxllm")
    check_weights(load_model_config(tmp_path), tmp_path)
    assert_loads_as(tmp_path, "llama_gqa")
    assert "3 tensors of 0.0 MiB are not of the model, and left out: " in caplog.text
    if place != "language_model.":  # as a bare decoder is saved, the others' names too without `model.`
        assert all(told in caplog.text for told in ("model.visual (1)", "vision_tower (1)", "mtp (1)"))


@pytest.mark.parametrize("architecture", ["Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"])
def test_qwen_3_5_is_read_from_all_its_classes(tmp_path, architecture):
    nested(tmp_path, "qwen3_5", architecture)
    assert_loads_as(tmp_path, "qwen3_5")


def test_what_stands_outside_of_the_text_models_part_goes_first(tmp_path):
    nested(tmp_path, "llama_gqa", "StrangeForConditionalGeneration", tie_word_embeddings=True)
    assert load_model_config(tmp_path).tie_word_embeddings
    assert not load_model_config(tmp_path, overrides={"tie_word_embeddings": None}).tie_word_embeddings
    generic = {"text_config": {"model_type": "kimi_k2"}, "architectures": ["StrangeForConditionalGeneration"]}
    with pytest.raises(ModelLoadError, match="vocab_size is missing"):
        load_model_config(tmp_path, overrides=generic)
    with pytest.raises(ModelLoadError, match="unknown architecture StrangeForConditionalGeneration"):
        load_model_config(tmp_path, overrides={**generic, "text_config": {"model_type": ["llama"]}})
    with pytest.raises(ModelLoadError, match="text_config is of a model whose tensors Strange.* has no names for"):
        load_model_config(
            tmp_path, overrides={"text_config": json.loads((goldens.FOLDER / "gpt2" / "config.json").read_text())}
        )
    with pytest.raises(ModelLoadError, match="unknown architecture PaliGemmaForConditionalGeneration"):
        load_model_config(tmp_path, overrides={"architectures": ["PaliGemmaForConditionalGeneration"]})


def test_what_a_family_ignores_has_the_names_of_the_checkpoint(tmp_path):
    """The indexers of DeepSeek-V3.2's layers."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 64}
    raw = {"architectures": ["StrangeForConditionalGeneration"], "text_config": {**sizes, "model_type": "deepseek_v32"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = load_model_config(tmp_path)
    assert config.names.ignored == tuple(f"model.language_model.layers.{i}.self_attn.indexer." for i in range(4))


def test_missing_and_strange_tensors_of_the_text_model_are_named(tmp_path):
    nested(tmp_path, "llama_gqa", "StrangeForConditionalGeneration", "language_model.model.")
    checkpoint = Checkpoint(tmp_path)
    tensors = {name: np.array(checkpoint.tensor(name)) for name in checkpoint.entries if name not in TOWERS}
    tensors["language_model.model.layers.0.mlp.strange.weight"] = tensors.pop(
        "language_model.model.layers.0.mlp.up_proj.weight"
    )
    write_safetensors(tmp_path / "model.safetensors", tensors)
    config = load_model_config(tmp_path)
    told = r"1 missing: model.language_model.layers.0.mlp.up_proj.weight; 1 unused: model.language_model.layers.0.mlp.strange.weight"
    with pytest.raises(ModelLoadError, match=told):
        check_weights(config, tmp_path)
    write_safetensors(tmp_path / "model.safetensors", {**tensors, "model.norm.weight": np.ones(64, np.float32)})
    with pytest.raises(ModelLoadError, match="tensors of two text models"):
        check_weights(config, tmp_path)


@pytest.mark.parametrize("name", ["language_model.model.layers.0.self_attn.q_proj", r"re:language_model\.model\.layers\.0\..*"])
def test_modules_that_stay_plain_are_known_by_other_names_too(tmp_path, name):
    """As a program that quantises had the model in another class than the one that wrote the checkpoint."""
    given = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": [name]}
    nested(tmp_path, "llama_gqa", "StrangeForConditionalGeneration")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["text_config"]["quantization_config"] = given
    (tmp_path / "config.json").write_text(json.dumps(raw))
    if name.startswith("re:"):
        (format,) = load_model_config(tmp_path).formats
        covered = [format.covers(f"model.language_model.layers.{i}.self_attn.q_proj") for i in (0, 1)]
        assert covered == [False, True]
    else:
        with pytest.raises(ModelLoadError, match="layers.0.self_attn.q_proj is not"):
            load_model_config(tmp_path)


def test_experts_of_a_layer_in_one_tensor_are_read_too(tmp_path):
    """As transformers 5 holds them."""
    source = goldens.FOLDER / "qwen3_moe"
    checkpoint = Checkpoint(source)
    tensors = {name: np.array(checkpoint.tensor(name)) for name in checkpoint.entries if ".experts." not in name}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([checkpoint.tensor(f"{prefix}.{i}.{part}_proj.weight") for i in range(8)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{prefix}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{prefix}.down_proj": down}
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    write_safetensors(tmp_path / "model.safetensors", tensors)
    assert_loads_as(tmp_path, "qwen3_moe")
    # Files of PyTorch say how far neighbours are from each other: here gates and ups of all experts from the last input to the first.
    fused = np.asfortranarray(tensors["model.layers.0.mlp.experts.gate_up_proj"])
    fused.T.tofile(tmp_path / "storage")
    entry = TensorEntry(tmp_path / "storage", "BF16", fused.shape, 0, fused.nbytes, fused.strides)
    strided = Checkpoint(tmp_path)
    strided.entries = as_named_here(load_model_config(tmp_path), {"model.layers.0.mlp.experts.gate_up_proj": entry})
    for name in strided.entries:
        np.testing.assert_array_equal(strided.tensor(name), checkpoint.tensor(name))
    assert len(strided.entries) == 16


@pytest.mark.parametrize(
    ("architecture", "text"),
    [
        ("Gemma3ForConditionalGeneration", {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}),
        ("Llama4ForConditionalGeneration", {"num_local_experts": 3, "intermediate_size_mlp": 64}),
    ],
)
@pytest.mark.slow
def test_what_was_saved_is_read_again(tmp_path, architecture, text):
    raw = json.loads((goldens.FOLDER / "llama_gqa" / "config.json").read_text())
    described = {"architectures": [architecture], "text_config": {**raw, "head_dim": 16, **text}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    config = load_model_config(tmp_path)
    state = load_weights(config, build_model(config), tmp_path, load_format="dummy", mesh=make_mesh())
    save_safetensors(config, state, tmp_path, described)
    jax.tree.map(np.testing.assert_array_equal, goldens.load(tmp_path)[1], state)


def test_the_text_model_of_nemotron_omni(tmp_path):
    source, checkpoint = goldens.FOLDER / "nemotron_h", Checkpoint(goldens.FOLDER / "nemotron_h")
    raw = json.loads((source / "config.json").read_text())
    omni = {"architectures": ["NemotronH_Nano_Omni_Reasoning_V3"], "llm_config": raw, "sound_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(omni))
    tensors = {f"language_model.{name}": checkpoint.tensor(name) for name in checkpoint.entries}
    others = (
        "vision_model.radio_model.blocks.0.weight",
        "mlp1.0.weight",
        "sound_encoder.encoder.x",
        "sound_projection.norm.weight",
    )
    write_safetensors(tmp_path / "model.safetensors", {**tensors, **{name: np.ones(3, np.int16) for name in others}})
    assert_loads_as(tmp_path, "nemotron_h")

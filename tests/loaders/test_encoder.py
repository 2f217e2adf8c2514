"""The encoder of images as a part of an engine's weights."""

import json
import math
import runpy
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from jaxllm.config import ModelOptions
from jaxllm.errors import ModelLoadError
from jaxllm.layers.build import build_model, build_tower, num_parameters, weight_bytes
from jaxllm.layers.parameters import parameters
from jaxllm.loaders import orbax
from jaxllm.loaders.encoder import load_encoder, vision_weights
from jaxllm.loaders.formats import open_checkpoint
from jaxllm.loaders.load import check_weights, load_weights
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.mesh import make_mesh
from jaxllm.progress import SILENT
from jaxllm.runner.weights import Weights
from scripts.saving import save_safetensors, write_safetensors
from tests.helpers import pictures, vision_checkpoint, whisper_checkpoint
from tests.helpers.slow import slow_except

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return vision_checkpoint.write(tmp_path_factory.mktemp("model"))


def changed(directory, to, change):
    """A copy of a checkpoint with other tensors."""
    checkpoint = open_checkpoint(directory)
    tensors = change({name: checkpoint.tensor(name) for name in checkpoint.entries})
    (to / "config.json").write_text((directory / "config.json").read_text())
    write_safetensors(to / "model.safetensors", tensors)
    return to


@pytest.mark.parametrize("load_format", slow_except(["auto"], ["auto", "dummy"]))
@pytest.mark.slow
def test_every_device_has_the_whole_encoder(directory, load_format):
    config, mesh = load_model_config(directory).for_tensor_parallel(2), make_mesh(2)
    part = vision_weights(ModelOptions(model=str(directory), load_format=load_format), config)
    text = load_weights(config, build_model(config), directory, load_format=load_format, mesh=mesh)
    state = part.load(mesh, SILENT)
    assert all(variable[...].sharding.is_fully_replicated for _, variable in parameters(state))
    # As an engine flattens its models and gives programs each of them.
    weights = Weights([build_model(config), part.model], mesh)
    _, tower = (merge(weights.flatten([text, state])) for merge in weights.merges)
    found = pictures.encode(config, nnx.state(tower), [pictures.picture(0, 64, 32)], num_patches=16)
    assert np.isfinite(found).all()
    if load_format == "auto":
        _, _, alone = pictures.load(directory)
        expected = pictures.encode(load_model_config(directory), alone, [pictures.picture(0, 64, 32)], num_patches=16)
        np.testing.assert_array_equal(found, expected)


def test_the_weights_of_all_frames_of_a_patch_are_kept_in_float32(directory):
    config, _, tower = pictures.load(directory, dtype="bfloat16")
    stored = open_checkpoint(directory).tensor("model.visual.patch_embed.proj.weight")
    found = tower["patch"][...]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, stored.reshape(len(stored), 3, 2, -1).transpose(2, 1, 3, 0))


def test_without_its_encoder_a_model_takes_text_alone(directory):
    config = load_model_config(directory, language_model_only=True)
    assert config.vision is None and vision_weights(ModelOptions(model=str(directory)), config) is None
    check_weights(config, directory)
    found = load_weights(config, build_model(config), directory, load_format="auto", mesh=make_mesh(1))
    whole = load_weights(load_model_config(directory), build_model(config), directory, load_format="auto", mesh=make_mesh(1))
    jax.tree.map(np.testing.assert_array_equal, found, whole)


def test_tensors_that_do_not_fit_are_named(directory, tmp_path):
    def change(tensors):
        del tensors["model.visual.blocks.1.norm2.bias"]
        tensors["model.visual.blocks.2.norm1.bias"] = np.zeros(32, np.float32)
        tensors["model.visual.merger.linear_fc2.weight"] = np.zeros((64, 64), np.float32)
        return tensors

    changed(directory, tmp_path, change)
    config = load_model_config(tmp_path)
    wanted = (
        "1 missing: model.visual.blocks.1.norm2.bias; 1 unused: model.visual.blocks.2.norm1.bias; 1 of the wrong shape: "
        r"model.visual.merger.linear_fc2.weight is \[64, 64\], must be \[64, 128\]"
    )
    with pytest.raises(ModelLoadError, match=wanted):
        check_weights(config, tmp_path)
    with pytest.raises(ModelLoadError, match=wanted):
        load_encoder(config, build_tower(config), config.vision.encoder, tmp_path, mesh=make_mesh(1))


def test_a_checkpoint_without_a_head_is_read_too(directory, tmp_path):
    """As embedding models are saved: names begin behind `model.`."""
    changed(directory, tmp_path, lambda tensors: {name.removeprefix("model."): value for name, value in tensors.items()})
    raw = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "architectures": ["Qwen3VLModel"]}))
    assert not load_model_config(tmp_path).generates
    for found, expected in zip(pictures.load(tmp_path)[1:], pictures.load(directory)[1:], strict=True):
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_other_names_of_an_encoder_are_read_too(tmp_path):
    """As transformers 5 saves Gemma 3, and with a head that makes one vector of an image."""
    directory = vision_checkpoint.write(tmp_path / "released", "gemma3")
    (tmp_path / "saved").mkdir()

    def change(tensors):
        named = {name.replace("vision_tower.vision_model.", "vision_tower."): value for name, value in tensors.items()}
        return {**named, "vision_tower.head.probe": np.zeros((1, 1, 32), np.float32)}

    saved = changed(directory, tmp_path / "saved", change)
    check_weights(load_model_config(saved), saved)
    for found, expected in zip(pictures.load(saved)[1:], pictures.load(directory)[1:], strict=True):
        jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"mm_tokens_per_image": 10}, "mm_tokens_per_image is 10, must be a square whose root divides the 6 patches"),
        ({"mm_tokens_per_image": 16}, "mm_tokens_per_image is 16, must be a square"),
        (
            {"vision_config": {"model_type": "clip_vision_model"}},
            "model_type is 'clip_vision_model', supported: 'siglip_vision_model'",
        ),
        (
            {"vision_config": {"num_attention_heads": 5}},
            "hidden_size of vision_config is 768, must be a multiple of its 5 heads",
        ),
    ],
)
def test_configs_of_gemma_3_that_cannot_be_computed(tmp_path, values, fault):
    vision_checkpoint.write(tmp_path, "gemma3")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **values}))
    with pytest.raises(ModelLoadError, match=fault):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("part", "values", "fault"),
    [
        ("vision_config", {"out_hidden_size": 48}, "out_hidden_size is 48, supported: 64"),
        ("vision_config", {"deepstack_visual_indexes": [2]}, "must be ascending layers of the 2 of vision_config"),
        ("vision_config", {"num_position_embeddings": 60}, "num_position_embeddings is 60, must be a square"),
        ("vision_config", {"num_heads": 3}, "hidden_size of vision_config is 32, must be a multiple of 4 times its 3 heads"),
        ("text_config", {"rope_parameters": {"mrope_section": [4, 2]}}, r"mrope_section is \[4, 2\], must be 3 integers"),
        ("text_config", {"rope_parameters": {"mrope_section": [4, 2, 3]}}, r"mrope_section is \[4, 2, 3\], must sum to 8"),
    ],
)
def test_configs_that_cannot_be_computed(directory, tmp_path, part, values, fault):
    raw = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, part: raw[part] | values}))
    with pytest.raises(ModelLoadError, match=fault):
        load_model_config(tmp_path)


def test_values_of_the_text_part_count_where_the_whole_has_none(directory, tmp_path):
    raw = json.loads((directory / "config.json").read_text())
    del raw["dtype"], raw["eos_token_id"]
    raw["text_config"] |= {"dtype": "float16", "eos_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = load_model_config(tmp_path, on_gpu=True)
    assert (config.dtype, config.eos_token_ids) == ("float16", (0,))
    (tmp_path / "config.json").write_text(json.dumps({**raw, "eos_token_id": [3]}))
    assert load_model_config(tmp_path).eos_token_ids == (3,)


@pytest.mark.slow
def test_a_converted_checkpoint_and_a_saved_one_keep_the_encoder(directory, tmp_path):
    converted, saved = tmp_path / "converted", tmp_path / "saved"
    runpy.run_path(str(SCRIPTS / "convert_checkpoint.py"))["convert"](directory, converted, "auto")
    config, text, tower = pictures.load(directory)
    save_safetensors(config, text, saved, json.loads((directory / "config.json").read_text()), tower=tower)
    check_weights(load_model_config(saved), saved)
    for found in (pictures.load(converted), pictures.load(saved)):
        assert found[0] == config
        jax.tree.map(np.testing.assert_array_equal, found[1:], (text, tower))
    on_two = load_encoder(config, build_tower(config), config.vision.encoder, converted, mesh=make_mesh(2))
    assert all(variable[...].sharding.is_fully_replicated for _, variable in parameters(on_two))
    shutil.rmtree(converted / orbax.ENCODER / "d")
    with pytest.raises(ModelLoadError, match=r"encoder.orbax is truncated or corrupt; convert it again"):
        pictures.load(converted)
    shutil.rmtree(converted / orbax.ENCODER)
    with pytest.raises(ModelLoadError, match="without its encoder; convert the model again, or use --language-model"):
        pictures.load(converted)


def test_the_size_of_a_model_counts_its_encoder(directory):
    config = load_model_config(directory)
    alone = replace(config, vision=None)
    count = sum(math.prod(variable.shape) for _, variable in parameters(build_tower(config)))
    assert num_parameters(config) - num_parameters(alone) == count
    tensors = open_checkpoint(directory).entries
    of_file = sum(math.prod(tensors[name].shape) for name in tensors if ".visual." in name)
    assert of_file == count
    assert weight_bytes(config) - weight_bytes(alone) == 4 * count


def test_the_size_of_a_model_counts_its_encoder_of_audio(tmp_path):
    directory = whisper_checkpoint.write(tmp_path / "model")
    config, tensors = load_model_config(directory, dtype="float32"), open_checkpoint(directory).entries
    assert config.tie_word_embeddings
    count = sum(math.prod(entry.shape) for name, entry in tensors.items() if name != "proj_out.weight")
    assert config.audio is not None
    count += (config.num_layers + config.audio.num_layers) * config.hidden_size  # keys get zeros as biases
    assert num_parameters(config) == count
    assert weight_bytes(config) == 4 * count

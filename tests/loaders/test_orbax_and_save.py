import json
import runpy
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxllm.errors import JaxLLMError, ModelLoadError
from jaxllm.layers.build import build_model
from jaxllm.layers.parameters import parameters
from jaxllm.loaders import orbax, safetensors
from jaxllm.loaders.load import load_weights
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.mesh import make_mesh
from scripts.demo_data.initial_weights import init_params
from tests.helpers import goldens

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"


def assert_equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.sharding == y.sharding
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    output = tmp_path_factory.mktemp("orbax") / "qwen2"
    runpy.run_path(str(SCRIPTS / "convert_checkpoint.py"))["convert"](goldens.FOLDER / "qwen2", output, "auto")
    return output


@pytest.mark.parametrize("size", [1, 2, 8])
def test_converted_checkpoint_gives_the_same_arrays(converted, size):
    assert_equal(
        goldens.load(converted, tensor_parallel_size=size)[1],
        goldens.load(goldens.FOLDER / "qwen2", tensor_parallel_size=size)[1],
    )


def test_a_stage_reads_its_own_arrays(converted):
    config = load_model_config(converted)
    stage = load_weights(config, build_model(config, range(1)), converted, load_format="orbax", mesh=make_mesh())
    whole = dict(parameters(goldens.load(converted)[1]))
    found = dict(parameters(stage))
    assert {path[:2] for path in found} == {("blocks", 0), ("embedding", "weight")}
    assert all(np.array_equal(variable[...], whole[path][...]) for path, variable in found.items())


def test_converted_checkpoint_keeps_its_type(converted):
    config = load_model_config(converted, on_gpu=True)
    state = load_weights(config, build_model(config), converted, load_format="orbax", mesh=make_mesh())
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state)} == {"bfloat16"}


def test_converting_into_a_used_directory_is_refused(converted):
    convert = runpy.run_path(str(SCRIPTS / "convert_checkpoint.py"))["convert"]
    with pytest.raises(JaxLLMError, match="not empty"):
        convert(goldens.FOLDER / "qwen2", converted, "auto")


def test_orbax_misfits_come_in_one_error(converted, tmp_path):
    directory = shutil.copytree(converted, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"intermediate_size": 48, "num_hidden_layers": 1}))
    with pytest.raises(ModelLoadError) as caught:
        goldens.load(directory)
    message = str(caught.value)
    assert "blocks.0.mlp.down.weight is [96, 64], must be [48, 64]" in message
    assert "7 unused" in message or "unused: blocks.1." in message


def test_damaged_orbax_checkpoint_is_told(converted, tmp_path):
    directory = shutil.copytree(converted, tmp_path / "model")
    weights = directory / orbax.WEIGHTS
    for part in ("d", "ocdbt.process_0"):
        shutil.rmtree(weights / part)
    with pytest.raises(ModelLoadError, match="truncated or corrupt.*convert it again"):
        goldens.load(directory)
    (weights / "_METADATA").write_text("{}")
    with pytest.raises(ModelLoadError, match="truncated or corrupt.*convert it again"):
        goldens.load(directory)
    shutil.rmtree(weights)
    with pytest.raises(ModelLoadError, match="not an orbax checkpoint"):
        goldens.load(directory, load_format="orbax")


@pytest.mark.parametrize(
    "name", ["llama_bias", "llama_rope_yarn", "llama_rope_linear", "mistral_window", "qwen2_window", "deepseek_v3"]
)
def test_saved_checkpoint_loads_again(name, tmp_path):
    config, state = goldens.load(goldens.FOLDER / name)
    goldens.save(config, state, tmp_path, goldens.FOLDER / name)
    again, loaded = goldens.load(tmp_path)
    assert again == config
    assert_equal(loaded, state)


@pytest.mark.torch
@pytest.mark.parametrize("name", ["llama_rope_llama3", "qwen3"])
def test_saved_checkpoint_is_read_by_transformers(name, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    config = load_model_config(goldens.FOLDER / name)
    state = init_params(build_model(config), jax.random.key(0))
    goldens.save(config, state, tmp_path, goldens.FOLDER / name)
    token_ids = list(range(40))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path)(torch.tensor([token_ids])).logits[0].numpy()
    np.testing.assert_allclose(goldens.logits(config, state, token_ids), expected, atol=1e-4)


def test_a_converted_model_with_a_head_can_be_loaded_without_it(tmp_path):
    source, converted = goldens.FOLDER / "llama_gqa", tmp_path / "converted"
    runpy.run_path(str(SCRIPTS / "convert_checkpoint.py"))["convert"](source, converted, "float32")
    config = load_model_config(source, runner="pooling")
    states = [
        load_weights(config, build_model(config), each, load_format="auto", mesh=make_mesh()) for each in (source, converted)
    ]
    assert_equal(*states)


def test_a_model_without_a_head_is_saved_as_one(tmp_path):
    directory = shutil.copytree(goldens.FOLDER / "llama_gqa", tmp_path / "model")
    config = load_model_config(directory, runner="pooling")
    model = build_model(config)
    state = load_weights(config, model, directory, load_format="auto", mesh=make_mesh())
    goldens.save(config, state, tmp_path / "saved", directory)
    again = load_model_config(tmp_path / "saved")
    assert not again.generates and again.architecture == config.architecture
    assert_equal(state, load_weights(again, build_model(again), tmp_path / "saved", load_format="auto", mesh=make_mesh()))


@pytest.mark.slow
def test_experts_without_a_gate_are_saved_in_the_shapes_of_the_checkpoint(tmp_path):
    source = goldens.FOLDER / "nemotron_h"
    goldens.save(*goldens.load(source, load_format="dummy"), tmp_path, source)
    saved, stored = (safetensors.Checkpoint(directory).entries for directory in (tmp_path, source))
    assert {name: entry.shape for name, entry in saved.items()} == {name: entry.shape for name, entry in stored.items()}

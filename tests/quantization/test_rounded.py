"""Weights that become int8 or int4 while they load."""

import dataclasses
import runpy
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ModelLoadError
from jaxllm.loaders import orbax, safetensors
from jaxllm.quantization import numbers
from jaxllm.quantization.numbers import Scheme
from jaxllm.quantization.packed import round_to_nearest
from tests.helpers import goldens
from tests.helpers.quantized import PROMPT, answer, assert_answered, assert_equal, by_path, load
from tests.helpers.slow import slow_except


@pytest.mark.parametrize(("number", "group", "size"), [("int4", 32, 8), ("int4", None, 8), ("uint8b128", None, 128)])
def test_values_are_rounded_to_the_nearest(number, group, size):
    """The largest of a group lies half a step beyond the largest number; zeros stay zeros, whatever their scale."""
    scheme = Scheme(number, group, scale_type="bfloat16")
    weight = np.random.default_rng(0).normal(size=(12, 64)).astype(np.float32)
    weight[3] = 0
    weight[5] *= 1e-6
    codes, scale = round_to_nearest(jnp.asarray(weight), scheme)
    wide = numbers.widen({"codes": np.asarray(codes), "scale": np.asarray(scale)}, scheme, np)
    groups = np.abs(weight).reshape(12, -1, group or 64)
    step = np.repeat(np.asarray(scale, np.float32), groups.shape[2], axis=1)
    np.testing.assert_allclose(step.reshape(groups.shape)[[0, 5], :, 0], groups.max(-1)[[0, 5]] / (size - 0.5), rtol=2**-8)
    assert (np.abs(wide - weight) <= 0.51 * step + 2**-8 * np.abs(weight)).all() and (wide[3] == 0).all()
    assert np.abs(wide - weight).max() > 0


@pytest.mark.parametrize(
    ("golden", "quantization"),
    [("llama_gqa", "int8"), ("gpt2", "int4"), pytest.param("deepseek_v3", "int8", marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_saved_weights_load_again(tmp_path, golden, quantization):
    """Experts too, and weights that a checkpoint holds with the inputs first."""
    source = goldens.FOLDER / golden
    config, state = load(source, quantization=quantization)
    goldens.save(config, state, tmp_path, source)
    again, loaded = load(tmp_path)
    assert dataclasses.replace(again, formats=config.formats) == config
    assert_equal(loaded, state)
    assert any(name.endswith("weight_packed") for name in safetensors.Checkpoint(tmp_path).entries)
    many = goldens.logits(*load(source, quantization=quantization, tensor_parallel_size=2), PROMPT)
    one = goldens.logits(config, state, PROMPT)
    np.testing.assert_allclose(goldens.logits(*load(tmp_path, dequantize=True), PROMPT), one, atol=1e-4)
    np.testing.assert_allclose(many[:, : one.shape[1]], one, atol=1e-4)


def test_int8_logits_are_near_those_of_the_weights_as_they_were():
    exact = goldens.logits(*load(goldens.FOLDER / "qwen2"), PROMPT)
    found = goldens.logits(*load(goldens.FOLDER / "qwen2", quantization="int8"), PROMPT)
    assert 0 < np.square(found - exact).mean() < 0.05**2 * np.square(exact).mean()


@pytest.mark.parametrize("quantization", slow_except(["int4"], ["int8", "int4"]))
def test_converted_weights_answer_as_those_that_are_rounded_while_loading(tmp_path, quantization):
    source, output = goldens.FOLDER / "llama_gqa", tmp_path / "output"
    script = Path(__file__).parent.parent.parent / "scripts" / "convert_checkpoint.py"
    runpy.run_path(str(script))["convert"](source, output, "auto", quantization)
    assert orbax.is_checkpoint(output)
    state, rounded = load(output)[1], load(source, quantization=quantization)[1]
    packed = {name: array for name, array in by_path(rounded).items() if name.endswith((".codes", ".scale"))}
    assert packed
    for name, array in packed.items():
        np.testing.assert_array_equal(by_path(state)[name], array, err_msg=name)
    with pytest.raises(ModelLoadError, match="whose weights stay as they are; leave --quantization out"):
        load(output, quantization=quantization)


def test_each_weight_has_groups_of_the_largest_power_of_two_that_divides_its_inputs():
    config, state = load(goldens.FOLDER / "llama_gqa", quantization="int4")
    mlp = state["blocks"][0]["mlp"]
    inputs = [config.hidden_size, config.layers[0].mlp.width]
    assert inputs == [64, 96]
    sizes = [n // mlp[part]["weight"]["scale"][...].shape[-1] for n, part in zip(inputs, ("gate_up", "down"), strict=True)]
    assert sizes == [64, 32]


@pytest.mark.slow
def test_an_engine_with_experts_on_each_device(tmp_path):
    options = {"quantization": "int4", "tensor_parallel_size": 2, "enable_expert_parallel": True}
    source = goldens.of_one_layer("qwen3_moe", tmp_path)
    assert_answered(answer(source, **options), load(source, quantization="int4"))

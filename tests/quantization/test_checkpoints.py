"""Checkpoints with fp8 weights, written here from the goldens, against the same numbers without quantisation."""

import dataclasses
import json
import runpy
import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.errors import ModelLoadError
from jaxllm.layers.build import build_model
from jaxllm.layers.parameters import axes_of, parameters
from jaxllm.loaders import orbax, safetensors
from jaxllm.loaders.load import load_checkpoint
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.axes import sharding
from jaxllm.parallel.mesh import make_mesh
from scripts.saving import CACHE_SCHEME, save_orbax
from tests.helpers import goldens
from tests.helpers.quantized import PROMPT, assert_answers, assert_equal, by_path, load, write
from tests.helpers.quantized import assert_near as assert_logits_near
from tests.helpers.slow import slow_except

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
NUMBER = {"num_bits": 8, "type": "float", "symmetric": True}
DYNAMIC = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**NUMBER, "strategy": "channel", "dynamic": False},
            "input_activations": {**NUMBER, "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head"],
}


def per_channel(name, weight):
    scale = np.abs(weight).max(axis=1, keepdims=True) / 448
    return {name: (weight / scale).astype(FP8), name + "_scale": scale.astype(np.float32)}


def per_tensor(name, weight):
    scale = np.abs(weight).max() / 448
    return {
        name: (weight / scale).astype(FP8),
        name + "_scale": scale.reshape(1).astype(np.float32),
        name.replace("weight", "input_scale"): np.ones(1, np.float32),
    }


def per_block(name, weight, size=32):
    rows, columns = (-(-n // size) for n in weight.shape)
    scale = np.empty((rows, columns), np.float32)
    values = np.empty(weight.shape, FP8)
    for i in range(rows):
        for j in range(columns):
            at = np.s_[i * size : (i + 1) * size, j * size : (j + 1) * size]
            scale[i, j] = np.abs(weight[at]).max() / 448
            values[at] = (weight[at] / scale[i, j]).astype(FP8)
    return {name: values, name + "_scale_inv": scale}


def spread(values, scale, size=32):
    """The weight of values and scales per block."""
    return values.astype(np.float32) * np.kron(scale, np.ones((size, size), np.float32))[: values.shape[0], : values.shape[1]]


def widened_blocks(name, weight, size=32):
    return {name: spread(*per_block(name, weight, size).values(), size)}


@pytest.mark.parametrize("is_gated", [False, True])
def test_stored_scales_give_what_quantising_while_loading_gives(tmp_path, is_gated):
    golden = "qwen3_next" if is_gated else "llama_gqa"

    def quantize(name, weight):
        is_plain = ".experts." in name or "in_proj_ba" in name
        return {name: weight} if is_plain else per_channel(name, weight)

    ignored = {"ignore": ["lm_head", "re:.*experts.*", "re:.*in_proj_ba"]}
    config, stored = load(write(tmp_path, DYNAMIC | ignored, quantize, golden=golden))
    assert config.formats[0].computes
    stored, computed = by_path(stored), by_path(load(goldens.FOLDER / golden, quantization="fp8")[1])
    assert stored.keys() == computed.keys()
    for name, array in stored.items():
        differs = ~np.isclose(array, computed[name], rtol=1e-6)
        assert differs.mean() < 0.01, name  # ties, that the last bit of the scale decides


def assert_near(logits, golden):
    """The goldens are random models with large weights, in which errors grow; trained ones are far more patient."""
    exact = goldens.logits(*load(goldens.FOLDER / golden), PROMPT)
    assert 0 < np.square(logits - exact).mean() < 0.35**2 * np.square(exact).mean()


def test_logits_are_near_those_of_the_weights_as_they_were():
    assert_near(goldens.logits(*load(goldens.FOLDER / "qwen2", quantization="fp8"), PROMPT), "qwen2")


@pytest.mark.parametrize("scale_shape", [(1,), ()])
def test_a_scale_of_a_whole_tensor_counts_for_each_of_its_outputs(tmp_path, scale_shape):
    def quantize(name, weight):
        return {key: value.reshape(scale_shape) if "scale" in key else value for key, value in per_tensor(name, weight).items()}

    directory = write(tmp_path, {"quant_method": "fp8", "activation_scheme": "static"}, quantize)
    config, state = load(directory)
    weights = safetensors.Checkpoint(directory)
    qkv = state["blocks"][0]["attention"]["qkv"]["weight"]
    for place, letter in ((0, "q"), (-2, "k"), (-1, "v")):
        scale = np.asarray(qkv["scale"][...])[:, place]
        assert (scale == weights.tensor(f"model.layers.0.self_attn.{letter}_proj.weight_scale").reshape(())).all()
    if scale_shape:
        assert_near(goldens.logits(config, state, PROMPT), "llama_gqa")


def test_transformers_names_of_scales_of_whole_tensors(tmp_path):
    """As in Ministral 3 and Devstral 2."""

    def renamed(name, weight):
        values, scale, _ = per_tensor(name, weight).values()
        return {
            name: values,
            f"{name}_scale_inv": scale.reshape(()),
            name.replace("weight", "activation_scale"): np.float32(1),
        }

    given = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    state = load(write(tmp_path / "renamed", given, renamed))[1]
    assert_equal(state, load(write(tmp_path / "usual", given, per_tensor))[1])


def test_weights_that_are_rounded_once_more_are_told(tmp_path):
    directory = write(tmp_path, DYNAMIC, per_channel)
    assert [format.told("bfloat16") for format in load_model_config(directory).formats] == [
        "fp8 weights as the checkpoint has them"
    ]
    told = [format.told("bfloat16") for format in load_model_config(directory, quantization="int8").formats]
    assert told == ["", "the checkpoint's fp8 weights become bfloat16"]


@pytest.mark.parametrize(("stored", "size"), slow_except([(False, 2)], [(False, 2), (True, 8)]))
def test_many_devices_compute_the_same(tmp_path, stored, size):
    directory, quantization = goldens.FOLDER / "llama_gqa", "fp8"
    if stored:
        directory, quantization = write(tmp_path, DYNAMIC, per_channel), None
    one = load(directory, quantization=quantization)
    many = load(directory, quantization=quantization, tensor_parallel_size=size)
    for _, variable in parameters(many[1]):
        values = variable[...]
        assert values.sharding.is_equivalent_to(sharding(make_mesh(size), axes_of(variable)), values.ndim)
    vocabulary = one[0].vocab_size
    logits = goldens.logits(*one, PROMPT)
    difference = goldens.logits(*many, PROMPT)[:, :vocabulary] - logits
    # Another order of summation may round a value the other way.
    assert np.square(difference).mean() < 0.05**2 * np.square(logits).mean()


def test_a_layer_that_a_checkpoint_with_blocks_excludes_stays_plain_in_fp8_by_channel_too():
    excluded, other = (f"model.layers.{i}.mlp.down_proj" for i in range(2))
    given = {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": [excluded]}
    directory, overrides = goldens.FOLDER / "llama_gqa", {"quantization_config": given}
    formats = load_model_config(directory, overrides=overrides, quantization="fp8").formats
    assert [format.covers(excluded) for format in formats] == [False, False] and all(format.covers(other) for format in formats)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_reading_on_the_device_gives_the_same_arrays(tmp_path, quantization):
    directory = write(tmp_path, {"quant_method": "fp8", "weight_block_size": [32, 32]}, per_block)
    config = load_model_config(directory, quantization=quantization)
    model, mesh = build_model(config), make_mesh(1)
    host, device = (
        load_checkpoint(config, model, directory, mesh=mesh, transform_on_device=on_device) for on_device in (False, True)
    )
    assert_equal(host, device)


def test_weights_with_a_scale_per_block_stay_as_stored_or_are_widened_if_asked(tmp_path):
    directory = write(tmp_path, {"quant_method": "fp8", "weight_block_size": [32, 32]}, per_block)
    tensors = safetensors.Checkpoint(directory)
    name = "model.layers.1.mlp.down_proj.weight"
    values, scale = tensors.tensor(name).astype(np.float32), tensors.tensor(name + "_scale_inv")
    down = load(directory)[1]["blocks"][1]["mlp"]["down"]["weight"]
    assert down["codes"][...].dtype == FP8
    np.testing.assert_array_equal(np.asarray(down["codes"][...], np.float32), values)
    np.testing.assert_array_equal(down["scale"][...], np.repeat(scale, 32, axis=0)[: len(values)])
    wanted = spread(values, scale)
    widened = load(directory, dequantize=True)[1]["blocks"][1]["mlp"]["down"]["weight"]
    np.testing.assert_array_equal(np.asarray(widened[...]).T, wanted)
    down = load(directory, quantization="fp8")[1]["blocks"][1]["mlp"]["down"]["weight"]
    again = np.asarray(down["values"][...], np.float32) * np.asarray(down["scale"][...])[:, None]
    assert np.abs(again - wanted).max() <= np.abs(wanted).max() / 16


@pytest.mark.parametrize(
    ("golden", "size"), [("deepseek_v3", 1), ("deepseek_v3", 2), ("qwen3_next", 1), ("qwen3_next", 4), ("qwen3_5", 2)]
)
def test_block_scales_of_experts_and_of_weights_that_are_cut_up(tmp_path, golden, size):
    """Weights that latents are multiplied with; queries and gates of one tensor, with copies of KV heads; heads of linear attention."""
    stored = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    blocks = write(tmp_path / "blocks", stored, per_block, golden=golden)
    plain = write(tmp_path / "plain", None, widened_blocks, golden=golden)
    found, wanted = (load(path, tensor_parallel_size=size, dequantize=True)[1] for path in (blocks, plain))
    assert_equal(found, wanted)


@pytest.mark.parametrize(
    ("golden", "size", "block"),
    slow_except(
        [("qwen3_moe", 2, 32)],
        [("qwen3_moe", 2, 32), ("qwen3_moe", 4, 128), ("deepseek_v3", 2, 32), ("llama_gqa", 4, 128)],
    ),
)
@pytest.mark.slow
def test_devices_share_weights_with_a_scale_per_block(tmp_path, golden, size, block):
    """Blocks that devices share, and blocks that the end of the inputs cuts: 96 inputs in blocks of 128."""
    stored = {"quant_method": "fp8", "weight_block_size": [block, block]}
    blocks = write(tmp_path / "blocks", stored, partial(per_block, size=block), golden=golden)
    plain = write(tmp_path / "plain", None, partial(widened_blocks, size=block), golden=golden)
    assert any("mlp.gate_up" in name and name.endswith("codes") for name in by_path(load(blocks)[1]))
    assert_logits_near(blocks, plain, tensor_parallel_size=size)


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "num_tokens"), [("triton", 1), ("auto", 8)])
def test_an_engine_answers_with_experts_of_blocks_as_with_the_widened_weights(tmp_path, implementation, num_tokens):
    stored = {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": ["lm_head", "mlp.gate"]}
    golden = str(goldens.of_one_layer("qwen3_moe", tmp_path / "layer"))
    blocks = write(tmp_path / "blocks", stored, per_block, golden=golden)
    plain = write(tmp_path / "plain", None, widened_blocks, golden=golden)
    assert_answers(blocks, plain, tensor_parallel_size=2, attention_implementation=implementation, num_tokens=num_tokens)


@pytest.mark.parametrize("dtype", ["float8_e8m0fnu", "bfloat16"])
def test_scales_of_blocks_in_other_types(tmp_path, dtype):
    """`scale_fmt: ue8m0`, as in DeepSeek-V3.1, stored as exponents too."""

    def quantize(name, weight):
        tensors = per_block(name, weight)
        scale = np.exp2(np.ceil(np.log2(tensors[f"{name}_scale_inv"]))).astype(np.float32)
        stored = {name: (weight / np.kron(scale, np.ones((32, 32)))[: len(weight), : weight.shape[1]]).astype(FP8)}
        return stored | {f"{name}_scale_inv": scale}

    def narrow(name, weight):
        return {key: x if x.dtype == FP8 else x.astype(dtype) for key, x in quantize(name, weight).items()}

    given = {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"}
    states = [load(write(tmp_path / write_.__name__, given, write_))[1] for write_ in (quantize, narrow)]
    assert_equal(*states)


def test_saved_weights_with_a_scale_per_block_load_again(tmp_path):
    source = write(tmp_path / "source", {"quant_method": "fp8", "weight_block_size": [128, 128]}, partial(per_block, size=128))
    config, state = load(source)
    goldens.save(config, state, tmp_path / "saved", source)
    saved, stored = safetensors.Checkpoint(tmp_path / "saved"), safetensors.Checkpoint(source)
    name = "model.layers.1.mlp.down_proj.weight_scale_inv"
    np.testing.assert_array_equal(saved.tensor(name), stored.tensor(name))
    assert_equal(load(tmp_path / "saved")[1], state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, name: tensors | {name: tensors[name].astype(np.float32)}, "is F32 .*not quantised, by --hf-overrides"),
        (lambda tensors, name: {name: tensors[name]}, "1 missing: model.layers.1.mlp.down_proj.weight_scale_inv"),
        (lambda tensors, name: tensors | {f"{name}_scale_inv": np.ones((3, 1), np.float32)}, r"\[3, 1\]"),
        (
            lambda tensors, name: tensors | {f"{name}_scale_inv": tensors[f"{name}_scale_inv"] * np.float32(np.nan)},
            "scales of model.layers.1.mlp.down_proj.weight are no numbers",
        ),
    ],
)
def test_damaged_weights_with_a_scale_per_block_are_refused(tmp_path, change, message):
    def quantize(name, weight):
        tensors = per_block(name, weight)
        return change(tensors, name) if name == "model.layers.1.mlp.down_proj.weight" else tensors

    with pytest.raises(ModelLoadError, match=message):
        load(write(tmp_path, {"quant_method": "fp8", "weight_block_size": [32, 32]}, quantize))


def test_ignored_modules_stay_as_they_are(tmp_path):
    ignored = ["lm_head", "re:.*layers\\.1\\.mlp.*", "model.layers.0.self_attn.o_proj"]

    def quantize(name, weight):
        plain = "layers.1.mlp" in name or "layers.0.self_attn.o_proj" in name
        return {name: weight} if plain else per_channel(name, weight)

    config, state = load(write(tmp_path, DYNAMIC | {"ignore": ignored}, quantize))
    names = by_path(state)
    assert "blocks.1.mlp.down.weight" in names and "blocks.0.attention.out.weight" in names
    assert "blocks.0.mlp.down.weight.values" in names and "blocks.1.attention.out.weight.scale" in names
    assert np.isfinite(goldens.logits(config, state, PROMPT)).all()


@pytest.mark.parametrize(("golden", "module"), [("qwen3_next", "in_proj_ba"), ("qwen3_5", "in_proj_a")])
def test_gates_of_linear_attention_are_made_of_plain_weights_unless_the_checkpoint_has_fp8_ones(tmp_path, golden, module):
    source = goldens.FOLDER / golden
    config, state = load(source, quantization="fp8")
    assert {"blocks.0.attention.ba.weight", "blocks.0.attention.qkvz.weight.values"} <= by_path(state).keys()
    goldens.save(config, state, tmp_path, source)
    assert_equal(load(tmp_path)[1], state)
    stored = load_model_config(source, overrides={"quantization_config": DYNAMIC})
    assert stored.formats[0].covers(f"model.layers.0.linear_attn.{module}")


def test_half_of_a_product_cannot_be_quantised(tmp_path):
    directory = write(tmp_path, DYNAMIC | {"ignore": ["model.layers.0.mlp.up_proj"]}, per_channel)
    with pytest.raises(ModelLoadError, match="gate_proj is, model.layers.0.mlp.up_proj is not"):
        load_model_config(directory)


def test_missing_scales_are_named(tmp_path):
    def quantize(name, weight):
        tensors = per_channel(name, weight)
        return {key: value for key, value in tensors.items() if key != "model.layers.1.mlp.down_proj.weight_scale"}

    with pytest.raises(ModelLoadError, match=r"1 missing: model\.layers\.1\.mlp\.down_proj\.weight_scale"):
        load(write(tmp_path, DYNAMIC, quantize))


@pytest.mark.parametrize(
    ("golden", "stored", "quantize"),
    [
        ("llama_gqa", DYNAMIC, per_channel),
        ("llama_gqa", {"quant_method": "fp8"}, per_tensor),
        ("deepseek_v3", {"quant_method": "fp8", "weight_block_size": [32, 32]}, per_block),
        ("deepseek_v3", DYNAMIC, per_channel),
    ],
)
@pytest.mark.parametrize("size", slow_except([2], [1, 2]))
def test_fp8_weights_that_are_no_linear_layers_are_widened(tmp_path, golden, stored, quantize, size):
    """A head, the embedding, experts, and what latents are multiplied with, whatever a scale belongs to."""

    def widened(name, weight):
        values, scale = list(quantize(name, weight).values())[:2]
        wide = spread(values, scale) if quantize is per_block else values.astype(np.float32) * scale
        return {name: wide.astype(np.float32)}

    def outside(quantize):
        """The tensors of a checkpoint that `write` leaves as they are."""
        source = safetensors.Checkpoint(goldens.FOLDER / golden)
        names = ("lm_head.weight", "model.embed_tokens.weight")
        return {k: v for name in names for k, v in quantize(name, np.asarray(source.tensor(name), np.float32)).items()}

    blocks = write(tmp_path / "fp8", stored, quantize, golden=golden, more=outside(quantize))
    plain = write(tmp_path / "plain", None, widened, golden=golden, more=outside(widened))
    options = {"dequantize": True} if quantize is per_block else {}
    found = by_path(load(blocks, tensor_parallel_size=size, **options)[1])
    expected = by_path(load(plain, tensor_parallel_size=size)[1])
    shared = found.keys() & expected.keys()
    assert {"head.weight", "embedding.weight"} <= shared and any("mlp.gate_up" in name for name in shared) == (
        golden != "llama_gqa"
    )
    for name in shared:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6, err_msg=name)


def test_a_scale_of_a_plain_head_is_told(tmp_path):
    more = {"lm_head.weight_scale": np.ones((128, 1), np.float32)}
    with pytest.raises(ModelLoadError, match="unused: lm_head.weight_scale"):
        load(write(tmp_path, DYNAMIC, per_channel, more=more))


@pytest.mark.parametrize(
    ("quantization_config", "message"),
    [
        ({"quant_method": "quark"}, "quant_method 'quark'; supported: "),
        (DYNAMIC | {"format": "pack-quantized"}, "format pack-quantized, 8 bits of type float"),
        (DYNAMIC | {"config_groups": {}}, "0 config_groups"),
        ({"quant_method": "fp8", "activation_scheme": "sometimes"}, "'sometimes', must be dynamic or static"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "is 128, must be two sizes"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'e5m2'"),
        ("fp8", "must be an object"),
    ],
)
def test_other_formats_are_refused_with_what_is_supported(tmp_path, quantization_config, message):
    with pytest.raises(ModelLoadError, match=message):
        load_model_config(write(tmp_path, quantization_config, per_channel))


def test_saved_fp8_weights_load_again(tmp_path):
    config, state = load(goldens.FOLDER / "qwen3", quantization="fp8")
    goldens.save(config, state, tmp_path, goldens.FOLDER / "qwen3")
    again, loaded = load(tmp_path)
    assert dataclasses.replace(again, formats=config.formats) == config
    assert_equal(loaded, state)
    entry = safetensors.Checkpoint(tmp_path).entries["model.layers.0.self_attn.q_proj.weight_scale"]
    assert entry.dtype == "F32" and entry.shape[1] == 1


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_converted_checkpoints_of_blocks_load_again(tmp_path, quantization):
    source = write(tmp_path / "source", {"quant_method": "fp8", "weight_block_size": [32, 32]}, per_block)
    script = Path(__file__).parent.parent.parent / "scripts" / "convert_checkpoint.py"
    runpy.run_path(str(script))["convert"](source, tmp_path / "output", "float32", quantization)
    assert orbax.is_checkpoint(tmp_path / "output")
    config, state = load(tmp_path / "output")
    assert [format.computes for format in config.formats] == [True]
    assert_equal(state, load(source, quantization=quantization)[1])


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_scales_of_the_cache_stay_where_weights_become_others(tmp_path, quantization):
    more = {"model.layers.0.self_attn.k_scale": np.array([0.5], np.float32)}
    given = {"quant_method": "fp8", "weight_block_size": [32, 32], "kv_cache_scheme": {**NUMBER, "strategy": "tensor"}}
    source = write(tmp_path / "source", given, per_block, more=more)
    script = Path(__file__).parent.parent.parent / "scripts" / "convert_checkpoint.py"
    runpy.run_path(str(script))["convert"](source, tmp_path / "output", "float32", quantization)
    config, state = load(tmp_path / "output")
    assert config.kv_cache_dtype == "float8_e4m3fn" and config.kv_format is not None
    np.testing.assert_array_equal(state["blocks"][0]["attention"]["kv_scale"][...], [0.5, 1])
    assert_equal(state, load(source, quantization=quantization)[1])


def test_plain_orbax_weights_are_not_quantised_while_loading(tmp_path):
    config, state = load(goldens.FOLDER / "qwen3")
    save_orbax(config, state, tmp_path)
    shutil.copy(goldens.FOLDER / "qwen3" / "config.json", tmp_path)
    with pytest.raises(
        ModelLoadError, match=r"convert the original again with scripts/convert_checkpoint\.py --quantization fp8"
    ):
        load(tmp_path, quantization="fp8")


def test_scales_of_the_cache_are_read_under_their_names(tmp_path, caplog):
    more = {
        "model.layers.0.self_attn.k_scale": np.array([0.5], np.float32),
        "model.layers.0.self_attn.v_proj.output_scale": np.array([0.25], np.float32),
    }
    scheme = {**NUMBER, "strategy": "tensor", "dynamic": False}
    directory = write(tmp_path, DYNAMIC | {"kv_cache_scheme": scheme}, per_channel, more=more)
    with caplog.at_level("WARNING", logger="jaxllm"):
        config, state = load(directory)
    assert config.kv_cache_dtype == "float8_e4m3fn"
    blocks = state["blocks"]
    np.testing.assert_array_equal(blocks[0]["attention"]["kv_scale"][...], [0.5, 0.25])
    np.testing.assert_array_equal(blocks[1]["attention"]["kv_scale"][...], [1, 1])
    goldens.save(config, state, tmp_path / "saved", tmp_path)
    assert_equal(load(tmp_path / "saved")[1], state)


def test_dummy_weights_have_the_shapes_and_about_the_size_of_real_ones():
    config, state = load(goldens.FOLDER / "llama_gqa", quantization="fp8", load_format="dummy")
    weight = state["blocks"][0]["mlp"]["gate_up"]["weight"]
    assert weight["values"][...].dtype == jnp.float8_e4m3fn
    product = np.asarray(weight["values"][...], np.float32) * np.asarray(weight["scale"][...])[..., None]
    assert product.std() == pytest.approx(0.02, rel=0.1)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(state))


def test_a_layer_reads_keys_with_the_scale_of_the_layer_that_writes_them(tmp_path):
    directory = shutil.copytree(goldens.FOLDER / "gemma4", tmp_path / "gemma4")
    raw = json.loads((directory / "config.json").read_text())
    quantization = {"quant_method": "modelopt", "kv_cache_scheme": CACHE_SCHEME}
    (directory / "config.json").write_text(json.dumps({**raw, "quantization_config": quantization}))
    weights = load_file(directory / "model.safetensors")
    weights |= {f"model.layers.{i}.self_attn.{x}_scale": np.array([2.0**-i], np.float32) for i in range(7) for x in "kv"}
    save_file(weights, directory / "model.safetensors")
    state = load(directory)[1]
    scales = [block["attention"]["kv_scale"][...].tolist() for block in state["blocks"].values()]
    assert scales == [[2.0**-layer] * 2 for layer in (0, 1, 2, 3, 2, 3, 2)]

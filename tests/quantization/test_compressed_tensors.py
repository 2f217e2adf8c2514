"""Integer weights as compressed-tensors stores them, against what the package makes of them, and the same numbers without
quantisation."""

import dataclasses
import runpy
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxllm.errors import ModelLoadError
from jaxllm.layers.build import build_model, weight_bytes
from jaxllm.layers.source import Tensor
from jaxllm.loaders import orbax
from jaxllm.loaders.load import load_checkpoint
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.mesh import make_mesh
from jaxllm.quantization.formats import read_formats
from jaxllm.quantization.formats.compressed_tensors import CompressedTensors
from jaxllm.weight_format import Options
from scripts.saving.formats import saved
from tests.helpers import goldens
from tests.helpers.quantized import assert_answers, assert_equal, assert_near, by_path, load, rounded, words, write
from tests.helpers.slow import slow_except


def described(bits=4, group=32, symmetric=True, form="pack-quantized", **changed):
    """A quantization_config."""
    strategy = "channel" if group is None else "group"
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group, "symmetric": symmetric}
    group_0 = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group_0},
        "ignore": ["lm_head"],
        **changed,
    }


def packed(bits=4, group=32, symmetric=True):
    """Returns a function that makes the tensors of a weight."""

    def quantize(name, weight):
        codes, scale, zero = rounded(weight, bits, group, symmetric)
        tensors = {
            f"{name}_packed": words(codes.reshape(weight.shape), bits),
            f"{name}_scale": scale[..., 0],
            f"{name}_shape": np.array(weight.shape),
        }
        return tensors if symmetric else {**tensors, f"{name}_zero_point": words(zero[..., 0].T, bits).T}

    return quantize


def widened(bits=4, group=32, symmetric=True):
    """Returns a function that makes the same numbers without quantisation."""

    def quantize(name, weight):
        codes, scale, zero = rounded(weight, bits, group, symmetric)
        return {name: ((codes.astype(np.float32) - zero) * scale.astype(np.float32)).reshape(weight.shape)}

    return quantize


FORMS = [(4, 32, True), (4, 32, False), (4, None, True), (4, None, False), (8, 32, True), (8, 32, False), (8, None, True)]


@pytest.mark.slow
def test_an_engine_answers_as_with_the_widened_weights(tmp_path):
    form = 4, 32, False
    packed_, plain = write(tmp_path / "packed", described(*form), packed(*form)), tmp_path / "plain"
    assert_answers(packed_, write(plain, None, widened(*form)))


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "group", "symmetric"), [(4, None, True), (8, 32, True), (8, None, False)])
def test_logits_are_those_of_the_widened_weights(tmp_path, bits, group, symmetric):
    form = (bits, group, symmetric)
    packed_, plain = write(tmp_path / "packed", described(*form), packed(*form)), tmp_path / "plain"
    assert_near(packed_, write(plain, None, widened(*form)))


@pytest.mark.parametrize(("bits", "group", "symmetric"), FORMS)
def test_weights_are_widened_while_loading_if_asked(tmp_path, bits, group, symmetric):
    form = (bits, group, symmetric)
    stored = load(write(tmp_path / "packed", described(*form), packed(*form)), dequantize=True)[1]
    assert_equal(stored, load(write(tmp_path / "plain", None, widened(*form)))[1])


@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_stay_as_stored(tmp_path, symmetric):
    quantize = packed(symmetric=symmetric)
    config, state = load(write(tmp_path, described(symmetric=symmetric), quantize))
    assert config.formats[0].computes
    down = state["blocks"][0]["mlp"]["down"]["weight"]
    assert down["codes"][...].dtype == "uint8" and down["scale"][...].dtype == "bfloat16"
    assert ("blocks.0.mlp.down.weight.zero" in by_path(state)) is not symmetric


SHARED = [("llama_gqa", 32, 2), ("llama_gqa", 32, 4), ("deepseek_v3", 8, 2)]


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.slow
def test_joining_on_the_device_gives_the_same_arrays(tmp_path, size):
    directory = write(tmp_path, described(symmetric=False), packed(symmetric=False))
    config = load_model_config(directory).for_tensor_parallel(size)
    model, mesh = build_model(config), make_mesh(size)
    assert_equal(*(load_checkpoint(config, model, directory, mesh=mesh, transform_on_device=where) for where in (False, True)))


@pytest.mark.parametrize(("golden", "group", "size"), slow_except(SHARED[:2], SHARED))
@pytest.mark.slow
def test_devices_share_weights(tmp_path, golden, group, size):
    stored = write(tmp_path / "packed", described(group=group), packed(group=group), golden=golden)
    plain = write(tmp_path / "plain", None, widened(group=group), golden=golden)
    assert_near(stored, plain, tensor_parallel_size=size)


CASES = np.load(goldens.FOLDER / "quantization" / "compressed_tensors.npz")
NAMES = sorted({name.partition("/")[0] for name in CASES})
WHOLE = (slice(None), slice(None))


class Files:
    """The tensors of one module."""

    def __init__(self, tensors):
        self.tensors, self.linears = tensors, frozenset()
        types = {"int32": "I32", "int8": "I8", "float32": "F32", "int64": "I64"}
        self.entries = {name: SimpleNamespace(dtype=types[str(each.dtype)], shape=each.shape) for name, each in tensors.items()}

    def tensor(self, name):
        return self.tensors[name]


def golden(name):
    """(the format, the files, what the package widens them to) of a case."""
    bits, group = (4 if "int4" in name else 8), {"int4_group_zeros": 16}.get(name, 32 if "group" in name else None)
    form = "int-quantized" if name == "int8_plain" else "pack-quantized"
    given = described(bits, group, "zeros" not in name, form, ignore=[])
    faults = []
    (format,) = read_formats(given, Options(None, None, on_gpu=False, dtype="float32", unquantized=()), faults)
    assert not faults
    tensors = {
        f"m.{part}": CASES[f"{name}/{part}"] for part in (key.partition("/")[2] for key in CASES if key.startswith(f"{name}/"))
    }
    return format, Files(tensors), tensors.pop("m.expected")


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_package(name):
    """Among them a row of zeros, one of tiny numbers, and 36 inputs, of which a word of 8 codes is half empty."""
    format, files, expected = golden(name)
    tensor = Tensor("m.weight", expected.shape, expected.shape)
    assert format.beside(tensor, files).keys() == files.tensors.keys() - {"m.weight_shape"}
    for stored, wanted in format.beside(tensor, files).items():
        assert wanted.shape == files.entries[stored].shape and files.entries[stored].dtype in wanted.dtypes
    np.testing.assert_array_equal(format.widened(tensor, WHOLE, files), expected)
    part = (slice(2, 9), slice(4, 30))
    np.testing.assert_array_equal(format.widened(tensor, part, files), expected[part])


@pytest.mark.parametrize("name", NAMES)
def test_parts_are_written_as_the_package_writes_them(name):
    format, files, expected = golden(name)
    scheme = format.scheme("m")
    has = ["codes", "scale", *(["zero"] if scheme.zeros else [])]
    parts = {f"m.weight:{part}": format.part(part, "m", *expected.shape, files) for part in has}
    written = saved(format, {"other": expected, **parts})
    assert written.pop("other") is expected
    assert written.keys() == files.tensors.keys()
    for stored, array in written.items():
        np.testing.assert_array_equal(array, files.tensors[stored], err_msg=stored)


def test_a_weight_of_another_shape_than_it_says_is_refused():
    format, files, expected = golden("int4_group")
    files.tensors["m.weight_shape"] = np.array([64, 12])
    with pytest.raises(ModelLoadError, match=r"m\.weight_shape is \[64, 12\], must be \[12, 64\]"):
        format.part("codes", "m", *expected.shape, files)


def changed(**weights):
    given = described()
    given["config_groups"]["group_0"]["weights"] |= weights
    return given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *((changed(num_bits=bits), f"{bits} bits of type int, .*supported: 4 and 8 bits") for bits in (2, 3, 5, 6, 7)),
        (changed(actorder="group"), "actorder of the quantised weights is 'group'"),
        (changed(group_size=31), "group_size of the quantised weights is 31, must be an even number"),
        (changed(strategy="block"), "scales per block, supported: group, channel and tensor"),
        (described(8, None, False, "int-quantized"), "asymmetric 8 bits of type int, format int-quantized"),
        (described(4, None, True, "int-quantized"), "4 bits of type int, format int-quantized"),
        (described() | {"kv_cache_scheme": {"num_bits": 4}}, "kv_cache_scheme is"),
        (described() | {"ignore": ["re:("]}, "is no regular expression"),
        (described(config_groups={"group_0": {"targets": ["Linear"], "weights": None}}), "; supported: "),
        (
            described(config_groups={"group_0": {"targets": "Linear", "weights": {"num_bits": 4, "type": "int"}}}),
            "targets is 'Linear'",
        ),
        (described() | {"ignore": ["model.layers.0.mlp.up_proj"]}, "gate_proj is int4 in groups of 32, .*up_proj is not"),
    ],
)
def test_what_cannot_be_read_is_told(tmp_path, given, message):
    with pytest.raises(ModelLoadError, match=message):
        load_model_config(write(tmp_path, given, lambda name, weight: {name: weight}))


def test_groups_that_do_not_divide_the_inputs_are_told(tmp_path):
    with pytest.raises(ModelLoadError, match=r"inputs, which must be a multiple of the group size 48"):
        load(write(tmp_path, described(group=48), lambda name, weight: {name: weight}))


def test_groups_that_do_not_divide_the_inputs_are_not_widened_either(tmp_path):
    """Of 64 inputs: groups of 40 and 24, as many as groups of 32 would be."""

    def quantize(name, weight):
        whole = np.pad(weight, ((0, 0), (0, -weight.shape[1] % 40)))
        codes, scale, _ = rounded(whole, 4, 40)
        codes = codes.reshape(whole.shape)[:, : weight.shape[1]]
        return {f"{name}_packed": words(codes, 4), f"{name}_scale": scale[..., 0]}

    with pytest.raises(ModelLoadError, match=r"64 inputs, which must be a multiple of the group size 40"):
        load(write(tmp_path, described(group=40), quantize), dequantize=True)


def test_missing_tensors_and_other_scales_are_named(tmp_path):
    def quantize(name, weight):
        tensors = packed()(name, weight)
        if "layers.1.mlp.down" in name:
            del tensors[f"{name}_packed"]
        if "layers.0.mlp.down" in name:
            tensors[f"{name}_scale"] = tensors[f"{name}_scale"].astype(np.float32)
        return tensors

    with pytest.raises(
        ModelLoadError, match=r"1 missing: .*1\.mlp\.down_proj\.weight_packed.*scale is F32 \(config.json says bfloat16"
    ):
        load(write(tmp_path, described(), quantize))


def test_modules_of_several_groups_are_stored_each_in_its_own_way(tmp_path, caplog):
    """By names, regular expressions and classes; a head and an embedding too."""
    forms = {"attention": (8, None, True), "embed": (8, 32, False), "rest": (4, 32, False)}
    targets = {"attention": ["re:.*self_attn.*"], "rest": ["Linear"], "embed": ["Embedding", "lm_head"]}
    groups = {name: described(*form)["config_groups"]["group_0"] | {"targets": targets[name]} for name, form in forms.items()}
    groups["attention"]["input_activations"] = {"num_bits": 8, "type": "int", "dynamic": True}

    def form_of(name):
        return forms["attention" if "self_attn" in name else "embed" if "embed" in name or "lm_head" in name else "rest"]

    also = ("lm_head", "embed_tokens")
    given = described(config_groups=groups, ignore=["re:.*norm$"])
    stored = write(tmp_path / "packed", given, lambda name, weight: packed(*form_of(name))(name, weight), also=also)
    plain = write(tmp_path / "plain", None, lambda name, weight: widened(*form_of(name))(name, weight), also=also)
    with caplog.at_level("INFO", logger="jaxllm"):
        state = load(stored, tensor_parallel_size=2)[1]
    assert "uint8b128" in caplog.text and "quantised activations, which stay float32" in caplog.text
    wanted = by_path(load(plain, tensor_parallel_size=2)[1])
    for name in ("head.weight", "embedding.weight"):
        np.testing.assert_array_equal(by_path(state)[name], wanted[name])
    assert_near(stored, plain)
    assert_equal(load(stored, dequantize=True)[1], load(plain)[1])


@pytest.mark.parametrize("form", ["int-quantized", "naive-quantized"])
def test_plain_int8_with_scales_of_activations(tmp_path, form):
    def quantize(name, weight):
        scale = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float32)
        more = {
            name.replace("weight", "input_scale"): np.ones(1, np.float32),
            name.replace("weight", "input_zero_point"): np.zeros(1, np.int8),
        }
        return {name: np.round(weight / scale).astype(np.int8), f"{name}_scale": scale, **more}

    def wide(name, weight):
        values, scale, *_ = quantize(name, weight).values()
        return {name: values * scale}

    stored = write(tmp_path / "int8", described(8, None, True, form), quantize)
    assert_near(stored, write(tmp_path / "plain", None, wide), tensor_parallel_size=2)
    assert load(stored)[1]["blocks"][0]["mlp"]["down"]["weight"]["codes"][...].dtype == "int8"


def test_one_scale_of_a_tensor_counts_for_all_outputs(tmp_path):
    def quantize(name, weight):
        scale = np.float32([np.abs(weight).max() / 127])
        return {name: np.round(weight / scale).astype(np.int8), f"{name}_scale": scale}

    def wide(name, weight):
        values, scale = quantize(name, weight).values()
        return {name: values * scale}

    given = described(8, None, True, "int-quantized")
    given["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"
    stored = write(tmp_path / "int8", given, quantize)
    assert_near(stored, write(tmp_path / "plain", None, wide), tensor_parallel_size=2)
    config, state = load(stored)
    goldens.save(config, state, tmp_path / "saved", stored)
    assert_equal(load(tmp_path / "saved")[1], state)


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_weights_may_be_quantised_once_more_while_loading(tmp_path, quantization):
    stored = write(tmp_path / "packed", described(), packed())
    plain = write(tmp_path / "plain", None, widened())
    assert_equal(*(load(directory, quantization=quantization)[1] for directory in (stored, plain)))


def test_devices_that_cut_a_group_have_each_its_scale(tmp_path):
    form = (4, 32, False)
    stored = write(tmp_path / "packed", described(*form), packed(*form))
    plain = write(tmp_path / "plain", None, widened(*form))
    whole, cut = (
        load(stored, tensor_parallel_size=size)[1]["blocks"][0]["attention"]["out"]["weight"]["scale"] for size in (1, 4)
    )
    assert cut[...].shape[-1] > whole[...].shape[-1]
    assert_near(stored, plain, tensor_parallel_size=4)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.slow
def test_converted_checkpoints_load_again(tmp_path, symmetric):
    form = (4, 32, symmetric)
    source = write(tmp_path / "source", described(*form), packed(*form))
    script = Path(__file__).parent.parent.parent / "scripts" / "convert_checkpoint.py"
    runpy.run_path(str(script))["convert"](source, tmp_path / "output", "float32")
    assert orbax.is_checkpoint(tmp_path / "output")
    for size in (1, 4):
        assert_equal(load(tmp_path / "output", tensor_parallel_size=size)[1], load(source, tensor_parallel_size=size)[1])
    with pytest.raises(ModelLoadError, match="holds packed weights, .*; use --no-dequantize"):
        load(tmp_path / "output", dequantize=True)


def test_saved_checkpoints_load_again(tmp_path):
    config, state = load(write(tmp_path / "source", described(4, 8, False), packed(4, 8, False), golden="deepseek_v3"))
    goldens.save(config, state, tmp_path / "saved", tmp_path / "source")
    again, loaded = load(tmp_path / "saved")
    assert dataclasses.replace(again, formats=config.formats) == config
    assert_equal(loaded, state)


def test_dummy_weights_have_the_shapes_and_about_the_size_of_real_ones(tmp_path):
    form = (4, 32, False)
    directory = write(tmp_path, described(*form), packed(*form))
    (config, state), (_, real) = (
        load(directory, load_format="dummy", tensor_parallel_size=2),
        load(directory, tensor_parallel_size=2),
    )
    shapes = [{name: array.shape for name, array in by_path(each).items()} for each in (state, real)]
    assert shapes[0] == shapes[1]
    down = by_path(state["blocks"][0]["mlp"]["down"]["weight"])
    assert down["scale"].std() == 0 and down["codes"].std() > 60
    assert weight_bytes(config) == sum(array.nbytes for array in jax.tree.leaves(load(directory)[1]))


def test_a_split_format_does_not_search_for_groups_again(monkeypatch):
    (format,) = read_formats(described(ignore=["searched_once"]), Options(None, None, False, "float32", ()), [])
    assert format.scheme("m.searched_once") is None and format.scheme("m.other") is not None
    monkeypatch.setattr(CompressedTensors, "_find_group", None)
    split = dataclasses.replace(format, size=2)
    assert split.scheme("m.searched_once") is None and split.scheme("m.other") == format.scheme("m.other")

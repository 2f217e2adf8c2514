"""Checkpoints of ModelOpt: what it wrote itself (scripts/make_float_weight_goldens.py), and tiny models against the same plain numbers."""

import json
import runpy
import time
from pathlib import Path

import numpy as np
import pytest

from jaxllm.errors import ModelLoadError
from jaxllm.models.load_config import load_model_config
from jaxllm.quantization import numbers
from jaxllm.quantization.formats import read_formats
from jaxllm.quantization.formats.fp8 import Fp8
from jaxllm.quantization.formats.fp8_blocks import Fp8Blocks
from jaxllm.quantization.formats.modelopt import SCHEMES, ModelOpt
from jaxllm.weight_format import Options
from scripts.saving.formats import saved
from tests.helpers import goldens
from tests.helpers.float_formats import fp8, fp8_per, modelopt_nvfp4, mx, mxfp8, nvfp4, widened
from tests.helpers.quantized import assert_answers, assert_equal, assert_near, by_path, load, write
from tests.helpers.slow import slow_except
from tests.helpers.stored_goldens import Golden, StoredFiles, close

GOLDEN = Golden("modelopt")
OPTIONS = Options(None, None, on_gpu=False, dtype="float32", unquantized=())
PER_BLOCK = fp8_per(128, 128, lambda scale: scale.reshape(()) if scale.size == 1 else scale[:, None, :, None])
WIDE = {
    "NVFP4": nvfp4,
    "W4A16_NVFP4": nvfp4,
    "MXFP8": lambda weight: mx(weight, 8),
    "FP8": lambda weight: fp8(weight, None, None),
    "FP8_PER_CHANNEL_PER_TOKEN": lambda weight: fp8(weight, 1, None),
    "FP8_PB_WO": lambda weight: fp8(weight, 128, 128),
}
QUANTIZE = {
    "NVFP4": modelopt_nvfp4,
    "W4A16_NVFP4": modelopt_nvfp4,
    "MXFP8": mxfp8,
    "FP8": fp8_per(None, None, lambda scale: scale.reshape(())),
    "FP8_PER_CHANNEL_PER_TOKEN": fp8_per(1, None, lambda scale: scale.reshape(-1)),
    "FP8_PB_WO": PER_BLOCK,
}
PACKED = ("NVFP4", "MXFP8")


def described(algorithm, ignored=("lm_head", "model.embed_tokens"), **more):
    """A quantization_config as ModelOpt writes it into config.json."""
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": list(ignored), **more}


def read(given):
    faults: list[str] = []
    formats = read_formats(given, OPTIONS, faults)
    assert not faults
    return formats


@pytest.mark.parametrize("where", ["quantization_config", "hf_quant_config"])
@pytest.mark.parametrize("scheme", GOLDEN.schemes)
def test_a_config_of_modelopt_is_read(scheme, where):
    given = {"quant_method": "modelopt", **GOLDEN.config(scheme)[where]}
    (format,) = read(given)
    kind = Fp8Blocks if scheme == "FP8_PB_WO" else Fp8 if scheme.startswith("FP8") else ModelOpt
    assert isinstance(format, kind)
    assert (format.kv_scales is not None) == (scheme in ("FP8", "NVFP4"))
    assert not format.covers("lm_head") and not format.covers("model.embed_tokens")
    assert format.covers("model.layers.0.mlp.gate_proj")


@pytest.mark.parametrize("module", GOLDEN.modules)
@pytest.mark.parametrize("scheme", GOLDEN.schemes)
def test_weights_are_those_that_modelopt_reads(scheme, module):
    files = GOLDEN.files(scheme, module)
    format = ModelOpt(algorithm=scheme)
    wanted = SCHEMES[scheme]
    if scheme == "FP8_PB_WO":  # the golden's inputs are no multiples of a block's
        (format,) = read(GOLDEN.config(scheme)["quantization_config"])
        np.testing.assert_array_equal(format.widened(files.weight, (slice(None),) * 2, files), files.expected)
        wanted = format.scheme_of(module, files.weight.shape[1])
        assert format.stored(module, *files.expected.shape).keys() == files.entries.keys()
        arrays = {name: format.part(name, module, *files.expected.shape, files) for name in ("codes", "scale")}
    else:
        arrays = files.arrays(format)
    wide = numbers.widen(arrays, wanted, np)
    # ModelOpt rounds the product of both scales first.
    np.testing.assert_array_max_ulp(wide, files.expected, 1 if "NVFP4" in scheme else 0)


@pytest.mark.slow
def test_an_engine_answers_as_with_the_widened_weights(tmp_path):
    stored = write(tmp_path / "stored", described("NVFP4"), QUANTIZE["NVFP4"])
    assert_answers(stored, write(tmp_path / "plain", None, widened(WIDE["NVFP4"])), tensor_parallel_size=2)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "size"), [("W4A16_NVFP4", 1), ("MXFP8", 1), ("FP8_PB_WO", 2)])
def test_logits_are_those_of_the_widened_weights(tmp_path, algorithm, size):
    stored = write(tmp_path / "stored", described(algorithm), QUANTIZE[algorithm])
    assert_near(stored, write(tmp_path / "plain", None, widened(WIDE[algorithm])), tensor_parallel_size=size)


@pytest.mark.parametrize("algorithm", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN"])
def test_fp8_weights_are_computed_as_those_of_compressed_tensors(tmp_path, algorithm):
    config, state = load(write(tmp_path / "modelopt", described(algorithm), QUANTIZE[algorithm]))
    assert config.formats[0].computes
    other = write(tmp_path / "fp8", {"quant_method": "fp8", "activation_scheme": "static"}, QUANTIZE[algorithm])
    assert_equal(state, load(other)[1])


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_scales_of_blocks_are_applied_or_become_those_of_channels(tmp_path, quantization):
    stored = write(tmp_path / "stored", described("FP8_PB_WO"), PER_BLOCK)
    plain = write(tmp_path / "plain", None, widened(WIDE["FP8_PB_WO"]))
    found = load(stored, quantization=quantization, dequantize=quantization is None)[1]
    assert_equal(found, load(plain, quantization=quantization)[1])


@pytest.mark.parametrize("algorithm", PACKED)
@pytest.mark.parametrize("size", slow_except([2], [2, 4]))
@pytest.mark.slow
def test_devices_share_weights(tmp_path, algorithm, size):
    stored = write(tmp_path / "stored", described(algorithm), QUANTIZE[algorithm])
    plain = write(tmp_path / "plain", None, widened(WIDE[algorithm]))
    assert_near(stored, plain, tensor_parallel_size=size)


def test_modules_of_one_product_have_their_own_factors(tmp_path):
    _, state = load(write(tmp_path, described("NVFP4"), modelopt_nvfp4))
    found = by_path(state)
    assert len(np.unique(found["blocks.0.mlp.gate_up.weight.factor"])) == 2
    assert len(np.unique(found["blocks.0.attention.qkv.weight.factor"])) == 3


@pytest.mark.slow
def test_experts_are_widened_in_products(tmp_path):
    golden = "mixtral"
    experts = ("w1", "w2", "w3")
    ignored = ["lm_head", "*.gate"]
    stored = write(tmp_path / "stored", described("NVFP4", ignored), modelopt_nvfp4, golden=golden, also=experts)
    plain = write(tmp_path / "plain", None, widened(nvfp4), golden=golden, also=experts)
    config, state = load(stored)
    assert any("mlp.gate_up.codes" in name for name in by_path(state)), by_path(state).keys()
    assert_near(stored, plain)
    assert_near(stored, plain, tensor_parallel_size=2)


def test_layers_in_different_algorithms(tmp_path):
    def algorithm_of(name):
        if "self_attn" in name:
            return "FP8" if "layers.0" in name else "FP8_PER_CHANNEL_PER_TOKEN"
        return None if "layers.1" in name else "NVFP4" if "down" in name else "MXFP8"

    layers: dict[str, dict[str, str]] = {}

    def quantize(name, weight):
        if (algorithm := algorithm_of(name)) is None:
            return {name: weight}
        layers[name.removesuffix(".weight")] = {"quant_algo": algorithm}
        return QUANTIZE[algorithm](name, weight)

    def plain(name, weight):
        return widened(WIDE.get(algorithm_of(name), lambda weight: (weight,)))(name, weight)

    given = described("MIXED_PRECISION", quantized_layers=layers)
    write(tmp_path / "stored", given, quantize)  # fills `layers`
    stored = write(tmp_path / "stored", given, quantize)
    config, state = load(stored)
    assert {"blocks.0.attention.out.weight.codes", "blocks.1.mlp.down.weight"} <= by_path(state).keys()
    assert_near(stored, write(tmp_path / "plain", None, plain))
    goldens.save(config, state, tmp_path / "saved", stored)
    assert_equal(load(tmp_path / "saved")[1], state)


@pytest.mark.parametrize(("outputs", "inputs"), [(200, 256), (128, 128)])
def test_blocks_beside_other_algorithms_have_scales_for_each_output(outputs, inputs):
    weight = np.random.default_rng(0).standard_normal((outputs, inputs)).astype(np.float32)
    tensors = PER_BLOCK("weight", weight)
    files = StoredFiles(
        "m", {"weight.e4m3": tensors["weight"].view(np.uint8), "weight_scale": tensors["weight_scale"], "expected": weight}
    )
    format = ModelOpt(layers=(("m", "FP8_PB_WO"),))
    arrays = files.arrays(format)
    np.testing.assert_array_equal(numbers.widen(arrays, SCHEMES["FP8_PB_WO"], np), fp8(weight, 128, 128)[-1])
    written = saved(format, {f"m.weight:{part}": array for part, array in arrays.items()})
    np.testing.assert_array_equal(written["m.weight_scale"], tensors["weight_scale"])


def test_an_algorithm_of_a_module_holds_for_those_below_it():
    layers = {
        "model.layers.0.mlp.experts": {"quant_algo": "W4A16_NVFP4"},
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
    }
    (format,) = read(described("MIXED_PRECISION", quantized_layers=layers))
    assert format.scheme("model.layers.0.mlp.experts.7.up_proj") == SCHEMES["NVFP4"]
    assert format.scheme("model.layers.0.self_attn.q_proj") == SCHEMES["FP8"]
    assert format.scheme("model.layers.0.self_attn.k_proj") is None


def test_wildcards_of_modules_that_are_not_quantised():
    (format,) = read(
        described(
            "NVFP4",
            ["lm_head", "model.layers.1.self_attn*", "*.mlp.gate", "re:.*[.]y$", "model.layers.2.mlp", "model.layers.?.x"],
        )
    )
    plain = (
        "lm_head",
        "model.layers.1.self_attn.q_proj",
        "model.layers.0.mlp.gate",
        "model.layers.2.mlp.up_proj",
        "model.layers.7.x",
        "model.layers.7.y",
    )
    assert not any(map(format.covers, plain))
    quantised = ("model.layers.11.self_attn.q_proj", "model.layers.0.mlp.gate_proj", "model.layers.2.mlp2", "model.layers.70.x")
    assert all(map(format.covers, quantised))


def test_thousands_of_experts_are_found_in_little_time():
    names = [f"model.layers.{i}.mlp.experts.{j}.{part}_proj" for i in range(60) for j in range(128) for part in ("up", "down")]
    ignored = [f"model.layers.{i}.self_attn*" for i in range(60)]
    layers = {name: {"quant_algo": "NVFP4"} for name in names}
    (format,) = read(described("MIXED_PRECISION", ignored, quantized_layers=layers))
    start = time.process_time()
    assert all(map(format.covers, names))
    assert time.process_time() - start < 5


def test_hf_quant_config_counts_where_config_json_says_nothing(tmp_path):
    directory = write(tmp_path, None, modelopt_nvfp4)
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (directory / "hf_quant_config.json").write_text(json.dumps(beside))
    config, state = load(directory)
    assert "blocks.0.mlp.down.weight.codes" in by_path(state)
    assert_near(directory, write(tmp_path / "plain", None, widened(nvfp4)))


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
def test_scales_of_an_fp8_cache_are_read(tmp_path, algorithm):
    more = {
        "model.layers.0.self_attn.k_proj.k_scale": np.float32(0.5),
        "model.layers.0.self_attn.v_proj.v_scale": np.float32(0.25),
    }
    cache = {"dynamic": False, "num_bits": 8, "type": "float"}
    directory = write(tmp_path, described(algorithm, kv_cache_scheme=cache), QUANTIZE[algorithm], more=more)
    config, state = load(directory)
    assert config.kv_cache_dtype == "float8_e4m3fn"
    np.testing.assert_array_equal(state["blocks"][0]["attention"]["kv_scale"][...], [0.5, 0.25])


def test_another_cache_stays_in_the_models_type(tmp_path):
    (format,) = read({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}})
    assert format.kv_scales is None and "the checkpoint's KV cache (NVFP4) stays bfloat16" in format.told("bfloat16")


def test_a_cache_alone_may_be_fp8(tmp_path):
    beside = {"quant_method": "modelopt", "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    config, _ = load(write(tmp_path, beside, lambda name, weight: {name: weight}))
    assert config.kv_cache_dtype == "float8_e4m3fn" and not config.formats[0].told("float32")


@pytest.mark.parametrize("algorithm", PACKED)
def test_weights_are_widened_while_loading_if_asked(tmp_path, algorithm):
    stored = write(tmp_path / "stored", described(algorithm), QUANTIZE[algorithm])
    plain = write(tmp_path / "plain", None, widened(WIDE[algorithm]))
    assert_equal(load(stored, dequantize=True)[1], load(plain)[1])


def test_a_head_is_widened_while_loading(tmp_path):
    stored = write(tmp_path / "stored", described("NVFP4", []), modelopt_nvfp4, also=("lm_head",))
    plain = write(tmp_path / "plain", None, widened(nvfp4), also=("lm_head",))
    close(by_path(load(stored)[1])["head.weight"], by_path(load(plain)[1])["head.weight"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (described("NVFP4_AWQ"), "ModelOpt's quant_algo 'NVFP4_AWQ'; supported: NVFP4, W4A16_NVFP4, MXFP8, FP8"),
        (described(None), "quant_algo 'NONE'; supported"),
        (described("NVFP4", group_size=32), "group_size of ModelOpt's NVFP4 is 32, must be 16"),
        (described("MIXED_PRECISION", quantized_layers=["x"]), "must say the quant_algo of each module"),
        (described("MIXED_PRECISION", quantized_layers={"x": {"quant_algo": "W4A16_AWQ"}}), "'W4A16_AWQ'; supported"),
        (described("NVFP4", [1]), "ignore is .1., must be a list of names"),
        (
            described("NVFP4", ["model.layers.0.mlp.up_proj"]),
            "gate_proj is e2m1 in groups of 16, model.layers.0.mlp.up_proj is not",
        ),
    ],
)
def test_a_bad_config_is_told(tmp_path, given, message):
    with pytest.raises(ModelLoadError, match=message):
        load_model_config(write(tmp_path, given, modelopt_nvfp4))


def changed(name, change):
    """`modelopt_nvfp4` with another tensor of this name, or without it (None)."""

    def quantize(weight_name, weight):
        tensors = modelopt_nvfp4(weight_name, weight)
        if name in tensors:
            tensors[name] = change(tensors[name])
        return {key: value for key, value in tensors.items() if value is not None}

    return quantize


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("weight_scale", lambda scale: None, r"1 missing: model\.layers\.1\.mlp\.down_proj\.weight_scale"),
        ("weight_scale_2", lambda scale: None, r"1 missing: model\.layers\.1\.mlp\.down_proj\.weight_scale_2"),
        ("weight_scale", lambda scale: scale[:, :3], r"weight_scale"),
        (
            "weight_scale",
            lambda scale: np.full_like(scale, np.nan),
            r"down_proj\.weight_scale has 384 scales that are no numbers",
        ),
        ("weight_scale_2", lambda scale: np.float32(np.inf), r"down_proj\.weight_scale_2 is inf, must be"),
        ("weight", lambda codes: codes.astype(np.float32), r"down_proj\.weight is F32"),
    ],
)
def test_a_bad_tensor_is_told(tmp_path, name, change, message):
    directory = write(tmp_path, described("NVFP4"), changed(f"model.layers.1.mlp.down_proj.{name}", change))
    with pytest.raises(ModelLoadError, match=message):
        load(directory)


@pytest.mark.parametrize("head", [(), ("lm_head",)])
def test_scales_may_have_dimensions_of_one(tmp_path, head):
    algorithms = {"o_proj": "FP8", **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "FP8_PER_CHANNEL_PER_TOKEN")}
    layers: dict[str, dict[str, str]] = {}

    def stored(change):
        def quantize(name, weight):
            module = name.removesuffix(".weight")
            algorithm = algorithms.get(module.split(".")[-1], "NVFP4")
            layers[module] = {"quant_algo": algorithm}
            tensors = QUANTIZE[algorithm](name, weight)
            return {key: value if key == name else change(np.asarray(value)) for key, value in tensors.items()}

        given = described("MIXED_PRECISION", (), quantized_layers=layers)
        for _ in range(2):  # the first fills `layers`
            directory = write(tmp_path / change.__name__, given, quantize, also=head)
        return load(directory)[1]

    def as_usual(scale):
        return scale

    def with_more(scale):
        return scale[..., None]

    assert_equal(stored(with_more), stored(as_usual))


@pytest.mark.parametrize("algorithm", PACKED)
def test_saved_weights_load_again(tmp_path, algorithm):
    source = write(tmp_path / "source", described(algorithm), QUANTIZE[algorithm])
    config, state = load(source)
    goldens.save(config, state, tmp_path / "saved", source)
    assert_equal(load(tmp_path / "saved")[1], state)


@pytest.mark.parametrize("dequantize", [None, True])
def test_converted_checkpoints_load_again(tmp_path, dequantize):
    source = write(tmp_path / "source", None, modelopt_nvfp4)
    beside = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (source / "hf_quant_config.json").write_text(json.dumps(beside))
    script = Path(__file__).parent.parent.parent / "scripts" / "convert_checkpoint.py"
    runpy.run_path(str(script))["convert"](source, tmp_path / "output", "float32", None, dequantize)
    config, state = load(tmp_path / "output")
    assert [type(format) for format in config.formats] == ([] if dequantize else [ModelOpt])
    assert_equal(state, load(source, dequantize=dequantize)[1])


def test_dummy_weights_have_about_the_size_of_real_ones(tmp_path):
    stored = write(tmp_path, described("NVFP4"), modelopt_nvfp4)
    _, state = load(stored, load_format="dummy")
    weight = {name: np.asarray(array[...]) for name, array in state["blocks"][0]["mlp"]["gate_up"]["weight"].items()}
    assert numbers.widen(weight, SCHEMES["NVFP4"], np).std() == pytest.approx(0.02, rel=0.1)

"""Weights in floats of 4 and 8 bits as compressed-tensors stores them: what it wrote itself (scripts/make_float_weight_goldens.py), and
tiny models against the same plain numbers."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ModelLoadError
from jaxllm.models.load_config import load_model_config
from jaxllm.quantization import numbers, packed
from jaxllm.quantization.formats import read_formats
from jaxllm.quantization.formats.compressed_tensors import CompressedTensors
from jaxllm.quantization.formats.fp8 import Fp8
from jaxllm.quantization.numbers import NVFP4, Scheme
from jaxllm.weight_format import Options
from tests.helpers import goldens
from tests.helpers.float_formats import E4M3, compressed_mxfp4, compressed_nvfp4, fp8, fp8_per, mx, mxfp8, nvfp4, widened
from tests.helpers.quantized import assert_answers, assert_equal, assert_near, by_path, load, write
from tests.helpers.slow import slow_except
from tests.helpers.stored_goldens import Golden

GOLDEN = Golden("compressed_tensors_float")
OPTIONS = Options(None, None, on_gpu=False, dtype="float32", unquantized=())
W4, W8 = {"num_bits": 4, "type": "float", "symmetric": True}, {"num_bits": 8, "type": "float", "symmetric": True}
WEIGHTS = {
    "nvfp4": ({**W4, "strategy": "tensor_group", "group_size": 16}, "nvfp4-pack-quantized"),
    "mxfp4": ({**W4, "strategy": "group", "group_size": 32}, "mxfp4-pack-quantized"),
    "mxfp8": ({**W8, "strategy": "group", "group_size": 32}, "mxfp8-quantized"),
    "fp8 per tensor": ({**W8, "strategy": "tensor"}, "float-quantized"),
    "fp8 per channel": ({**W8, "strategy": "channel"}, "float-quantized"),
    "fp8 per group": ({**W8, "strategy": "group", "group_size": 16}, "float-quantized"),
    "fp8 per block": ({**W8, "strategy": "block", "block_structure": [32, 32]}, "float-quantized"),
}
QUANTIZE = {
    "nvfp4": compressed_nvfp4,
    "mxfp4": compressed_mxfp4,
    "mxfp8": mxfp8,
    "fp8 per tensor": fp8_per(None, None, lambda scale: scale.reshape(1)),
    "fp8 per channel": fp8_per(1, None),
    "fp8 per group": fp8_per(1, 16),
    "fp8 per block": fp8_per(32, 32),
}
WIDE = {
    "nvfp4": nvfp4,
    "mxfp4": lambda weight: mx(weight, 4),
    "mxfp8": lambda weight: mx(weight, 8),
    "fp8 per tensor": lambda weight: fp8(weight, None, None),
    "fp8 per channel": lambda weight: fp8(weight, 1, None),
    "fp8 per group": lambda weight: fp8(weight, 1, 16),
    "fp8 per block": lambda weight: fp8(weight, 32, 32),
}


def group(kind, targets=("Linear",), activations=None):
    weights, form = WEIGHTS[kind]
    return {"targets": list(targets), "weights": weights, "input_activations": activations, "format": form}


def described(*groups, ignored=("lm_head",)):
    config_groups = {f"group_{i}": each for i, each in enumerate(groups)}
    form = groups[0]["format"] if len(groups) == 1 else "mixed-precision"
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": config_groups, "ignore": list(ignored)}


@pytest.mark.parametrize("module", GOLDEN.modules)
@pytest.mark.parametrize("scheme", GOLDEN.schemes)
def test_weights_are_those_that_compressed_tensors_reads(scheme, module):
    faults: list[str] = []
    (format,) = read_formats(GOLDEN.config(scheme)["quantization_config"], OPTIONS, faults)
    files = GOLDEN.files(scheme, module)
    assert isinstance(format, CompressedTensors) and not faults
    arrays, how = files.arrays(format), format.scheme(module)
    wide = numbers.widen(arrays, how, np)
    # Compressed-tensors divides the scale by the divisor of the whole weight first.
    np.testing.assert_array_max_ulp(wide, files.expected, 2 if scheme == "NVFP4" else 0)
    np.testing.assert_array_equal(packed.widen(arrays, how, "float32"), wide)


@pytest.mark.slow
def test_an_engine_answers_as_with_the_widened_weights(tmp_path):
    plain = write(tmp_path / "plain", None, widened(WIDE["nvfp4"]))
    assert_answers(write(tmp_path / "stored", described(group("nvfp4")), QUANTIZE["nvfp4"]), plain)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size"), [(kind, 1 + i % 2) for i, kind in enumerate(WEIGHTS) if i])
def test_logits_are_those_of_the_widened_weights(tmp_path, kind, size):
    stored = write(tmp_path / "stored", described(group(kind)), QUANTIZE[kind])
    assert_near(stored, write(tmp_path / "plain", None, widened(WIDE[kind])), tensor_parallel_size=size)


@pytest.mark.parametrize("kind", list(WEIGHTS))
def test_weights_stay_as_stored_or_are_widened_if_asked(tmp_path, kind):
    stored = write(tmp_path / "stored", described(group(kind)), QUANTIZE[kind])
    plain = write(tmp_path / "plain", None, widened(WIDE[kind]))
    _, state = load(stored)
    down = state["blocks"][0]["mlp"]["down"]["weight"]
    assert down["codes"][...].dtype == ("float8_e4m3fn" if "8" in kind else "uint8")
    assert_equal(load(stored, dequantize=True)[1], load(plain)[1])


@pytest.mark.parametrize(
    ("kind", "size"),
    [("nvfp4", 2), ("mxfp4", 2), ("fp8 per channel", 2), pytest.param("mxfp4", 4, marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_devices_share_weights(tmp_path, kind, size):
    """Groups of 32 of the mlp's 96 inputs are cut."""
    stored = write(tmp_path / "stored", described(group(kind)), QUANTIZE[kind])
    assert_near(stored, write(tmp_path / "plain", None, widened(WIDE[kind])), tensor_parallel_size=size)


@pytest.mark.parametrize("activations", [W4, {**W8, "strategy": "token", "dynamic": True}])
def test_activations_stay_in_the_models_type_and_that_is_told(tmp_path, activations, caplog):
    with caplog.at_level("INFO", logger="jaxllm"):
        config, _ = load(write(tmp_path, described(group("nvfp4", activations=activations)), compressed_nvfp4))
    assert sum("made for quantised activations, which stay float32" in message for message in caplog.messages) == 1
    assert config.formats[0].computes


def test_modules_of_one_product_have_their_own_factors(tmp_path):
    found = by_path(load(write(tmp_path, described(group("nvfp4")), compressed_nvfp4))[1])
    assert len(np.unique(found["blocks.0.mlp.gate_up.weight.factor"])) == 2
    assert len(np.unique(found["blocks.0.attention.qkv.weight.factor"])) == 3


@pytest.mark.parametrize("kind", slow_except([], ["nvfp4", "mxfp4"]))
def test_experts(tmp_path, kind):
    stored = write(
        tmp_path / "stored", described(group(kind), ignored=["lm_head", "re:.*gate$"]), QUANTIZE[kind], golden="qwen3_moe"
    )
    plain = write(tmp_path / "plain", None, widened(WIDE[kind]), golden="qwen3_moe")
    assert any("mlp.gate_up.codes" in name for name in by_path(load(stored)[1]))
    assert_near(stored, plain, tensor_parallel_size=2)


@pytest.mark.parametrize("other", ["nvfp4", "mxfp4", "fp8 per block"])
@pytest.mark.slow
def test_groups_of_which_one_is_fp8(tmp_path, other):
    dynamic = {**W8, "strategy": "token", "dynamic": True}
    given = described(group("fp8 per channel", ["re:.*self_attn.*"], dynamic), group(other))

    def kind_of(name):
        return "fp8 per channel" if "self_attn" in name else other

    stored = write(tmp_path / "stored", given, lambda name, weight: QUANTIZE[kind_of(name)](name, weight))
    plain = write(tmp_path / "plain", None, lambda name, weight: widened(WIDE[kind_of(name)])(name, weight))
    config, state = load(stored)
    goldens.save(config, state, tmp_path / "saved", stored)
    assert_equal(load(tmp_path / "saved")[1], state)
    assert all(f"blocks.1.{part}.weight.codes" in by_path(state) for part in ("attention.out", "mlp.down"))
    assert_near(stored, plain)


def test_fp8_of_some_modules_is_computed_in_fp8(tmp_path):
    dynamic = {**W8, "strategy": "token", "dynamic": True}

    def quantize(name, weight):
        return QUANTIZE["fp8 per channel"](name, weight) if "mlp" in name else {name: weight}

    config, state = load(write(tmp_path, described(group("fp8 per channel", ["re:.*mlp.*"], dynamic)), quantize))
    assert isinstance(config.formats[0], Fp8) and config.formats[0].computes
    assert {"blocks.0.mlp.down.weight.values", "blocks.0.attention.out.weight"} <= by_path(state).keys()


@pytest.mark.parametrize("head", ["fp8 per block", "fp8 per channel", "fp8 per tensor"])
@pytest.mark.parametrize(
    ("method", "name"), [("fp8", "weight_scale_inv"), ("fp8", "weight_scale"), ("compressed-tensors", "weight_scale")]
)
def test_heads_in_fp8_beside_layers_with_blocks(tmp_path, method, name, head):
    layers = described(group("fp8 per block", activations={**W8, "strategy": "group", "dynamic": True}))
    layers = layers if method == "compressed-tensors" else {"quant_method": "fp8", "weight_block_size": [32, 32]}

    def quantize(weight_name, weight):
        kind, suffix = (head, name) if weight_name == "lm_head.weight" else ("fp8 per block", "weight_scale")
        if method == "fp8" and weight_name != "lm_head.weight":
            suffix = "weight_scale_inv"
        tensors = QUANTIZE[kind](weight_name, weight)
        return {key.replace("weight_scale", suffix): value for key, value in tensors.items()}

    def plain(weight_name, weight):
        return widened(WIDE[head if weight_name == "lm_head.weight" else "fp8 per block"])(weight_name, weight)

    stored = write(tmp_path / "stored", layers, quantize, also=("lm_head",))
    plain = write(tmp_path / "plain", None, plain, also=("lm_head",))
    assert_equal(load(stored, dequantize=True)[1], load(plain)[1])


@pytest.mark.parametrize("exponent", [0, 1, 126, 127, 254])
def test_all_exponents_but_the_last(exponent):
    arrays = {"codes": np.full((1, 16), 0x21, np.uint8), "scale": np.full((1, 1), exponent, np.uint8)}
    wide = numbers.widen(arrays, Scheme("e2m1", 32, scale_type="uint8"), np)
    expected = np.tile(np.ldexp(np.array([0.5, 1.0]), exponent - 127), 16)
    np.testing.assert_array_equal(wide[0].astype(np.float64), expected)


def test_all_codes_and_scales():
    """Every number of 4 bits by every scale that is a number, the low half of a byte first."""
    bytes_ = np.arange(256, dtype=np.uint8)
    scales = bytes_.view(E4M3)
    scales = scales[np.isfinite(scales.astype(np.float32))]
    codes = np.tile(bytes_[: 16 * 16 : 2].reshape(1, -1), (len(scales), 1))[:, :8]
    arrays = {"codes": codes, "scale": scales[:, None], "factor": np.full(len(scales), 0.125, np.float32)}
    table = np.array(numbers.E2M1)
    values = np.stack([table[codes & 15], table[codes >> 4]], -1).reshape(len(scales), 16)
    np.testing.assert_array_equal(numbers.widen(arrays, NVFP4, np), values * scales[:, None].astype(np.float64) * 0.125)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            described(group("nvfp4") | {"format": "pack-quantized"}),
            "4 bits of type float, format pack-quantized, scales per tensor_gr",
        ),
        (
            described(group("mxfp4") | {"weights": {**W4, "group_size": 16}}),
            "group_size .* is 16, must be 32 in mxfp4-pack-quantized",
        ),
        (described(group("nvfp4") | {"weights": WEIGHTS["mxfp8"][0]}), "8 bits of type float, format nvfp4-pack-quantized"),
        (
            described(group("fp8 per group") | {"weights": {**W8, "strategy": "group"}}),
            "group_size .* is None, must be a positive",
        ),
        (
            described(group("fp8 per tensor") | {"weights": {**W8, "strategy": "token"}}),
            "format float-quantized, scales per token",
        ),
        (
            described(group("fp8 per channel") | {"weights": {**W8, "strategy": "channel", "symmetric": False}}),
            "asymmetric 8 bits",
        ),
        (
            described(group("fp8 per channel", ["model.layers.0.mlp.up_proj"])),
            "layers.0.mlp.gate_proj is not, .*up_proj is e4m3",
        ),
    ],
)
def test_a_bad_config_is_told(tmp_path, given, message):
    with pytest.raises(ModelLoadError, match=message):
        load_model_config(write(tmp_path, given, compressed_nvfp4))


@pytest.mark.parametrize(
    ("kind", "name", "change", "message"),
    [
        ("nvfp4", "weight_global_scale", np.zeros_like, r"down_proj\.weight_global_scale is 0\.0, must be a positive number"),
        (
            "nvfp4",
            "weight_scale",
            lambda scale: np.full_like(scale, np.nan),
            r"down_proj\.weight_scale has 384 scales that are no",
        ),
        (
            "mxfp4",
            "weight_scale",
            lambda scale: np.where(scale == scale[0, 0], 255, scale).astype(np.uint8),
            "scales that are no",
        ),
        ("mxfp4", "weight_scale", lambda scale: scale[:, :2], r"down_proj\.weight_scale is \[64, 2\], must be \[64, 3\]"),
        ("mxfp4", "weight_packed", lambda codes: codes.astype(np.int32), r"down_proj\.weight_packed is I32"),
        ("fp8 per channel", "weight_scale", lambda scale: None, r"1 missing: model\.layers\.1\.mlp\.down_proj\.weight_scale"),
    ],
)
def test_a_bad_tensor_is_told(tmp_path, kind, name, change, message):
    def quantize(weight_name, weight):
        tensors = QUANTIZE[kind](weight_name, weight)
        if (bad := f"model.layers.1.mlp.down_proj.{name}") in tensors:
            tensors[bad] = change(tensors[bad])
        return {key: value for key, value in tensors.items() if value is not None}

    with pytest.raises(ModelLoadError, match=message):
        load(write(tmp_path, described(group(kind)), quantize))


def test_codes_without_their_scale_are_not_read_as_weights(tmp_path):
    def quantize(name, weight):
        tensors = QUANTIZE["fp8 per channel"](name, weight)
        tensors.pop("model.layers.1.mlp.down_proj.weight_scale", None)
        return tensors

    with pytest.raises(ModelLoadError, match=r"1 missing: model\.layers\.1\.mlp\.down_proj\.weight_scale"):
        load(write(tmp_path, described(group("fp8 per channel")), quantize), dequantize=True)


def test_dummy_weights_are_numbers():
    """Random values beyond the largest number of e4m3 become that one."""
    draw = SimpleNamespace(normal=lambda: jnp.array([-5.0, 0.0, 1.0, 5.0]))
    codes = CompressedTensors(groups=(), weight_scheme=Scheme("e4m3")).dummy("codes", draw, 0.02)
    np.testing.assert_array_equal(np.asarray(codes.astype(E4M3), np.float32), [-448, 0, 96, 448])

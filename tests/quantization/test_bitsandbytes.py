"""Weights as bitsandbytes stores them: its goldens, and whole models against the same numbers without quantisation."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from jaxllm.errors import ModelLoadError
from jaxllm.models.load_config import load_model_config
from jaxllm.quantization.formats.bitsandbytes import BitsAndBytes
from jaxllm.quantization.numbers import NUMBERS
from jaxllm.weight_format import Options
from tests.helpers import packed_goldens
from tests.helpers.quantized import assert_answers, assert_equal, assert_near, load, write

OPTIONS = Options(None, None, on_gpu=False, dtype="float32", unquantized=())
ODD = "down_proj"
"""Has 96 inputs: no blocks of 64."""


def described(number="nf4", nested=False, **changed):
    """A quantization_config."""
    given = {"quant_method": "bitsandbytes", "load_in_4bit": number != "int8", "load_in_8bit": number == "int8"}
    given |= {"bnb_4bit_quant_type": number, "bnb_4bit_use_double_quant": nested, "bnb_4bit_quant_storage": "uint8"}
    return {**given, "llm_int8_skip_modules": ["lm_head", ODD], **changed}


def rounded(weight, number):
    """(codes, absmax, values) of a weight, by block of 64."""
    table, values = np.array(NUMBERS[number].table, np.float32), weight.reshape(-1, 64)
    absmax = np.abs(values).max(-1, keepdims=True)
    codes = np.abs((values / absmax)[..., None] - table).argmin(-1).astype(np.uint8)
    return codes, absmax[:, 0], table[codes] * absmax


def packed(number="nf4"):
    """Returns a function that makes the tensors of a weight."""

    def quantize(name, weight):
        if ODD in name:
            return {name: weight}
        if number == "int8":
            scale = np.abs(weight).max(-1)
            codes = np.round(weight / scale[:, None] * 127).astype(np.int8)
            module = name.removesuffix(".weight")
            return {name: codes, f"{module}.SCB": scale, f"{module}.weight_format": np.array(0, np.uint8)}
        codes, absmax, _ = rounded(weight, number)
        state = {"quant_type": number, "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
        return {
            name: (codes.ravel()[::2] << 4 | codes.ravel()[1::2])[:, None],
            f"{name}.absmax": absmax,
            f"{name}.quant_map": np.array(NUMBERS[number].table, np.float32),
            f"{name}.quant_state.bitsandbytes__{number}": np.frombuffer(json.dumps(state).encode(), np.uint8),
        }

    return quantize


def widened(number="nf4"):
    """Returns a function that makes the same numbers without quantisation."""

    def quantize(name, weight):
        if ODD in name:
            return {name: weight}
        if number == "int8":
            scale = np.abs(weight).max(-1, keepdims=True)
            return {name: np.round(weight / scale * 127) * (scale * np.float32(1 / 127))}
        return {name: rounded(weight, number)[2].reshape(weight.shape)}

    return quantize


def read(*args):
    faults = []
    format = BitsAndBytes.read(described(*args), OPTIONS, faults)
    assert not faults
    return format


@pytest.mark.parametrize(
    ("case", "nested", "shape"), [("nf4", False, (8, 128)), ("fp4", False, (8, 128)), ("nf4_nested", True, (36, 512))]
)
def test_weights_of_4_bits_are_those_of_bitsandbytes(case, nested, shape):
    packed_goldens.assert_exact(read(case[:3], nested), packed_goldens.read("bitsandbytes", case), *shape)


def test_weights_of_8_bits_are_those_of_bitsandbytes():
    """But for the last bit: it scales in two steps."""
    tensors = packed_goldens.read("bitsandbytes", "int8")
    values = tensors.pop("values")
    wide = packed_goldens.widen(read("int8"), tensors, 16, 64)
    np.testing.assert_allclose(np.concatenate([wide[:4], wide[-4:]]), values, rtol=2.5e-7)


@pytest.mark.slow
def test_an_engine_answers_as_with_the_widened_weights(tmp_path):
    plain = write(tmp_path / "plain", None, widened("nf4"))
    assert_answers(write(tmp_path / "packed", described("nf4"), packed("nf4")), plain, tensor_parallel_size=2)


@pytest.mark.parametrize("number", ["nf4", "fp4", "int8"])
def test_weights_are_widened_while_loading_if_asked(tmp_path, number):
    stored = load(write(tmp_path / "packed", described(number), packed(number)), dequantize=True)[1]
    assert_equal(stored, load(write(tmp_path / "plain", None, widened(number)))[1])


@pytest.mark.parametrize("number", ["nf4", "int8"])
def test_devices_share_weights(tmp_path, number):
    stored = write(tmp_path / "packed", described(number), packed(number))
    assert_near(stored, write(tmp_path / "plain", None, widened(number)), tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("skipped", "module", "is_plain"),
    [
        ("lm_head", "lm_head", True),
        ("visual", "model.visual.blocks.0.attn.qkv", True),
        ("model.layers.1.mlp", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("model.layers.*.mlp", "model.layers.7.mlp.up_proj", True),
        ("mlp.gate", "model.layers.7.mlp.gate_proj", False),
        ("gate_proj", "model.layers.7.mlp.gate_proj", True),
    ],
)
def test_names_are_skipped_as_transformers_does(skipped, module, is_plain):
    format = BitsAndBytes.read(described(llm_int8_skip_modules=[skipped]), OPTIONS, [])
    assert (format.scheme(module) is None) == is_plain


def test_converted_checkpoints_load_again(tmp_path):
    source = write(tmp_path / "source", described("nf4"), packed("nf4"))
    script = Path(__file__).parent.parent.parent / "scripts" / "convert_checkpoint.py"
    runpy.run_path(str(script))["convert"](source, tmp_path / "output", "float32")
    for size in (1, 2):
        assert_equal(load(tmp_path / "output", tensor_parallel_size=size)[1], load(source, tensor_parallel_size=size)[1])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"load_in_8bit": True}, "has both of load_in_4bit and load_in_8bit"),
        ({"load_in_4bit": False}, "has neither of"),
        ({"bnb_4bit_quant_type": "nf3"}, "'nf3', must be nf4 or fp4"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "'bfloat16', must be uint8"),
        ({"llm_int8_skip_modules": ["("]}, "no regular expression"),
        ({"llm_int8_skip_modules": ["up_proj"]}, "gate_proj is nf4 in groups of 64, .*up_proj is not"),
    ],
)
def test_what_is_not_supported_is_told(tmp_path, changed, message):
    with pytest.raises(ModelLoadError, match=message):
        load_model_config(write(tmp_path, described(**changed), packed()))


def test_blocks_of_several_outputs_are_told(tmp_path):
    directory = write(tmp_path, described(llm_int8_skip_modules=["lm_head"]), packed())
    with pytest.raises(ModelLoadError, match="down_proj has 96 inputs, which must be a multiple of the group size 64"):
        load(directory)
    with pytest.raises(ModelLoadError, match="several outputs"):
        packed_goldens.widen(read(), {**packed_goldens.read("bitsandbytes", "nf4")}, 32, 32)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        (".absmax", lambda a: None, r"1 missing: model\.layers\.0\.self_attn\.q_proj\.weight\.absmax"),
        (".absmax", lambda a: a[:3], r"absmax is \[3\]"),
        (".quant_map", lambda m: m[::-1], "quant_map is not the table of nf4"),
        (".quant_state.bitsandbytes__nf4", lambda s: None, "quant_state.bitsandbytes__nf4 is missing"),
        (".quant_state.bitsandbytes__nf4", lambda s: s[:9], "cannot be read"),
        (
            ".quant_state.bitsandbytes__nf4",
            lambda s: np.frombuffer(s.tobytes().replace(b'"blocksize": 64', b'"blocksize": 32'), np.uint8),
            "'blocksize': 32.*must say",
        ),
        ("", lambda w: w.T, r"q_proj\.weight is \[1, 2048\]"),
    ],
)
def test_tensors_that_do_not_fit_are_told(tmp_path, part, change, message):
    def quantize(name, weight):
        tensors = packed()(name, weight)
        changed = {key: change(v) if key == f"{packed_goldens.MODULE}.weight{part}" else v for key, v in tensors.items()}
        return {key: np.ascontiguousarray(value) for key, value in changed.items() if value is not None}

    with pytest.raises(ModelLoadError, match=message):
        load(write(tmp_path, described(), quantize))


def test_other_orders_of_int8_are_told(tmp_path):
    def quantize(name, weight):
        tensors = packed("int8")(name, weight)
        return {key: np.array(1, np.uint8) if "weight_format" in key else value for key, value in tensors.items()}

    with pytest.raises(ModelLoadError, match="weight_format is not 0"):
        load(write(tmp_path, described("int8"), quantize))

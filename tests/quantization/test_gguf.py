"""Weights of GGUF files as stored, against the package gguf, which llama.cpp's converter uses too, and against widened ones."""

import json

import numpy as np
import pytest
from flax import nnx

from jaxllm.errors import ConfigError, ModelLoadError
from jaxllm.gguf_files.blocks import BLOCKS
from jaxllm.hub import resolve_model
from jaxllm.layers.build import Widened, build_model
from jaxllm.layers.linear import Linear, PackedWeight
from jaxllm.layers.parameters import parameters, weights
from jaxllm.models.load_config import load_model_config
from jaxllm.quantization import numbers
from jaxllm.quantization.formats.gguf import scheme_of_blocks
from jaxllm.quantization.lanes import Laned
from jaxllm.quantization.numbers import Scheme
from tests.helpers import goldens, quantized
from tests.helpers.slow import slow_except
from tests.loaders import test_gguf as files

gguf = pytest.importorskip("gguf")

LAYER = {
    "self_attn.q_proj.weight": (256, 256),
    "self_attn.k_proj.weight": (64, 256),
    "self_attn.v_proj.weight": (64, 256),
    "self_attn.o_proj.weight": (256, 256),
    "mlp.gate_proj.weight": (512, 256),
    "mlp.up_proj.weight": (512, 256),
    "mlp.down_proj.weight": (256, 512),
    "input_layernorm.weight": (256,),
    "post_attention_layernorm.weight": (256,),
}
INPUTS = 512


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of scales that are no numbers
@pytest.mark.parametrize("kind", BLOCKS)
def test_parts_are_what_the_package_reads(monkeypatch, kind):
    """Random bytes, zeros and subnormal scales among them; several threads."""
    monkeypatch.setattr("jaxllm.gguf_files.blocks._BYTES_AT_ONCE", 4096)
    number_format = gguf.GGMLQuantizationType[kind]
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[number_format]
    stored = np.random.default_rng(0).integers(0, 256, (40, INPUTS // block_values * block_bytes), np.uint8)
    stored[0] = 0
    stored[1, :block_bytes] = 1
    if kind == "MXFP4":
        stored[:, ::block_bytes] %= 255  # which is NaN
    blocks = BLOCKS[kind]
    scheme = scheme_of_blocks(blocks)
    names = ("codes", "scale", "minimum") if scheme.minimums else ("codes", "scale")
    found = numbers.widen({name: blocks.part(name, stored) for name in names}, scheme, np)
    np.testing.assert_array_equal(found, gguf.quants.dequantize(stored, number_format).reshape(40, INPUTS))


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a Llama whose matrices have these types in turn, in the order q, k, v, o, gate, up, down of each layer."""
    monkeypatch.setenv("JAXLLM_CACHE_DIR", str(tmp_path / "cache"))

    def write(*types, tokens=("Q8_0", 40)):
        random = np.random.default_rng(0)
        shapes = {"model.embed_tokens.weight": (tokens[1], 256), "model.norm.weight": (256,)}
        for i in range(2):
            for name, shape in LAYER.items():
                shapes[f"model.layers.{i}.{name}"] = shape
        # Blocks of K types are of small numbers without sign, which norms keep in range.
        tensors = {name: random.normal(0, 0.05, shape) + (len(shape) == 1) for name, shape in shapes.items()}
        raw = {**files.WIDE, "num_hidden_layers": 2}
        files.write(tmp_path / "model.gguf", "llama", raw | {"vocab_size": tokens[1]}, tensors, (tokens[0], *types * 2))
        return resolve_model(str(tmp_path / "model.gguf"))

    return write


def schemes(directory):
    """The schemes of the model's products, by their last module; None: plain numbers."""
    linears = [
        module
        for _, module in nnx.iter_modules(build_model(load_model_config(directory, dequantize=False)))
        if isinstance(module, Linear)
    ]
    return {
        linear.modules[-1].name.split(".")[-1]: linear.weight.format.weight_scheme
        if isinstance(linear.weight, PackedWeight)
        else None
        for linear in linears
    }


def test_types_of_a_product(write):
    """Equal ones stay as they are; others become 8 bits in the smallest group, or plain numbers if one of them has to."""
    directory = write("Q4_K", "Q4_K", "Q6_K", "Q4_0", "Q4_1", "F16", "Q5_K")
    found = schemes(directory)
    assert found["v_proj"] == Scheme("int8", 16, minimums=True)
    assert found["o_proj"] == Scheme("int4", 32, scale_type="float16")
    assert found["up_proj"] is None
    assert found["down_proj"] == Scheme("int8", 32, minimums=True)
    assert_equal_logits(directory)


@pytest.mark.parametrize("kind", slow_except(["Q4_K"], ["Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "MXFP4"]))
def test_logits(write, kind):
    """With offsets and without; the values of all kinds: above, and tests/gguf_files/test_unpack.py."""
    assert_equal_logits(write(*(kind,) * 7))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_tensor_parallelism(write, size):
    """Heads of keys are copied to four devices, and inputs of o and down are split."""
    assert_equal_logits(write("Q4_K", "Q4_K", "Q6_K", "Q4_0", "Q4_1", "Q4_1", "Q8_0"), size)


def assert_equal_logits(directory, size=1):
    """As stored and widened, but for the order of sums."""
    as_stored = quantized.load(directory, tensor_parallel_size=size, dequantize=False)
    found = goldens.logits(*as_stored, quantized.PROMPT)
    wanted = goldens.logits(*quantized.load(directory), quantized.PROMPT)
    np.testing.assert_allclose(found[:, : wanted.shape[1]], wanted, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("kind", "vocab_size"), slow_except([("Q6_K", 48)], [("Q6_K", 48), ("Q8_0", 48), ("MXFP4", 48), ("Q8_0", 40)])
)
def test_lanes(write, kind, vocab_size):
    """Layers and the tied embedding, but for numbers from a table and 40 tokens, which are no whole vectors."""
    directory = write("Q4_K", "Q4_K", "Q6_K", "Q4_0", "Q4_1", "Q4_1", "Q8_0", tokens=(kind, vocab_size))
    config, state = quantized.load(directory, dequantize=False, in_lanes=True)
    laned = {weight.path[-2] for weight in weights(state) if isinstance(getattr(weight.format, "layout", None), Laned)}
    assert laned == {"qkv", "out", "gate_up", "down", *(["embedding"] if vocab_size == 48 and kind != "MXFP4" else [])}
    for prompt in (quantized.PROMPT, quantized.PROMPT * 3):  # few rows, and many
        wanted = goldens.logits(*quantized.load(directory), prompt)
        np.testing.assert_allclose(goldens.logits(config, state, prompt), wanted, atol=1e-4 * np.abs(wanted).max())
    _, random = quantized.load(directory, dequantize=False, in_lanes=True, load_format="dummy")
    shapes, wanted = ({path: variable.shape for path, variable in parameters(each)} for each in (random, state))
    assert shapes == wanted


def test_a_plan_tells_layers_that_are_widened_from_the_head(write):
    """Numbers from a table stay in the order of the file, in which a CPU widens them."""
    in_order, of_table = (
        load_model_config(write(*(kind,) * 7, tokens=(tokens, 48)), dequantize=False).for_tensor_parallel(1).in_lanes()
        for kind, tokens in (("Q4_0", "MXFP4"), ("MXFP4", "Q8_0"))
    )
    assert Widened.of(build_model(in_order)) == (False, False, True, False)
    assert Widened.of(build_model(of_table)) == (True, False, False, True)


@pytest.mark.parametrize("size", [1, 2])
def test_an_engine_answers_as_with_widened_weights(write, size):
    """Two devices split the tied embedding too, which is as stored."""
    directory = write("Q4_1", "Q4_1", "Q4_1", "Q4_0", "Q4_K", "Q4_K", "Q6_K")
    quantized.assert_answers(directory, directory, dequantize=False, tensor_parallel_size=size)


def test_options(write, tmp_path):
    directory = write(*("Q4_0",) * 7)
    [as_stored] = load_model_config(directory, dequantize=False).formats
    assert type(as_stored).__name__ == "Gguf"
    assert load_model_config(directory).formats == load_model_config(directory, dequantize=True).formats == ()
    [fp8] = load_model_config(directory, quantization="fp8").formats
    assert type(fp8).__name__ == "Fp8"
    (tmp_path / "plain").mkdir()
    with pytest.raises(ConfigError, match="dequantize is False, but .* has no packed weights"):
        load_model_config(write(*("F16",) * 7), dequantize=False)
    config = json.loads((directory / "config.json").read_text())
    for types in (["Q4_0"], "Q4_0"):
        config["quantization_config"]["types"] = types
        (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelLoadError, match="types of the GGUF weights are .*Q4_0.*, must be an object"):
            load_model_config(tmp_path / "plain")
    del config["quantization_config"]["types"]
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="types of the GGUF weights are None, must be an object"):
        load_model_config(tmp_path / "plain")

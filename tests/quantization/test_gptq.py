"""Weights as GPTQ's programs store them: goldens of gptqmodel, and whole models against the same numbers without quantisation."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from jaxllm.errors import ModelLoadError
from jaxllm.models.load_config import load_model_config, read_config_json
from jaxllm.options.quantization import QUANTIZATION_FILES
from jaxllm.quantization.formats.awq import Awq
from jaxllm.quantization.formats.compressed_tensors import CompressedTensors
from jaxllm.quantization.formats.gptq import Gptq
from jaxllm.text.model_files import text_files
from jaxllm.weight_format import Options
from tests.helpers import packed_goldens, stand_in_hub
from tests.helpers.packed_goldens import MODULE
from tests.helpers.quantized import assert_answers, assert_equal, assert_near, by_path, load, rounded, words, write
from tests.helpers.slow import slow_except

OPTIONS = Options(None, None, on_gpu=False, dtype="float32", unquantized=())


def described(bits=4, group=32, symmetric=True, version=1, **changed):
    """A quantization_config."""
    form = "gptq" if version == 1 else "gptq_v2"
    given = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": False}
    return {**given, "checkpoint_format": form, **changed}


def packed(bits=4, group=32, symmetric=True, version=1):
    """Returns a function that makes the tensors of a weight."""

    def quantize(name, weight):
        codes, scale, zero = rounded(weight, bits, None if group == -1 else group, symmetric, "float16")
        module, inputs = name.removesuffix(".weight"), weight.shape[1]
        stored_zero = words(zero[..., 0].T, bits).view(np.uint32) - (
            words(np.ones((1, 8), np.uint8), bits).view(np.uint32)[0, 0] * (version == 1)
        )
        return {
            f"{module}.qweight": words(codes.reshape(weight.shape), bits).T,
            f"{module}.qzeros": stored_zero.view(np.int32),
            f"{module}.scales": scale[..., 0].T,
            f"{module}.g_idx": (np.arange(inputs) // (inputs if group == -1 else group)).astype(np.int32),
        }

    return quantize


def widened(bits=4, group=32, symmetric=True):
    """Returns a function that makes the same numbers without quantisation."""

    def quantize(name, weight):
        codes, scale, zero = rounded(weight, bits, None if group == -1 else group, symmetric, "float16")
        return {name: ((codes.astype(np.float32) - zero) * scale.astype(np.float32)).reshape(weight.shape)}

    return quantize


def read(given):
    faults = []
    format = Gptq.read(given, OPTIONS, faults)
    assert not faults
    return format


@pytest.mark.parametrize(
    ("case", "form"),
    [
        ("sym4_g32_v1", (4, 32, True, 1)),
        ("asym4_g32_v1", (4, 32, False, 1)),
        ("sym4_g-1_v2", (4, -1, True, 2)),
        ("asym4_g-1_v2", (4, -1, False, 2)),
        ("sym8_g32_v1", (8, 32, True, 1)),
        ("asym8_g32_v1", (8, 32, False, 1)),
    ],
)
def test_weights_are_those_of_gptqmodel(case, form):
    packed_goldens.assert_exact(read(described(*form)), packed_goldens.read("gptq", case), 32, 64)


FORMS = [(4, 32, True, 1), (4, 32, False, 1), (4, -1, True, 2), (4, -1, False, 2), (8, 32, True, 1), (8, 32, False, 1)]


@pytest.mark.slow
def test_an_engine_answers_as_with_the_widened_weights(tmp_path):
    form = 4, 32, True, 1
    plain = write(tmp_path / "plain", None, widened(*form[:3]))
    assert_answers(write(tmp_path / "packed", described(*form), packed(*form)), plain, tensor_parallel_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("form", [(4, -1, False, 2), (8, 32, False, 1)])
def test_logits_are_those_of_the_widened_weights(tmp_path, form):
    packed_, plain = write(tmp_path / "packed", described(*form), packed(*form)), tmp_path / "plain"
    assert_near(packed_, write(plain, None, widened(*form[:3])))


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_widened_while_loading_if_asked(tmp_path, form):
    stored = load(write(tmp_path / "packed", described(*form), packed(*form)), dequantize=True)[1]
    assert_equal(stored, load(write(tmp_path / "plain", None, widened(*form[:3])))[1])


MODELS = [
    ("llama_gqa", 32, 2),
    ("llama_gqa", -1, 4),
    ("deepseek_v3", 8, 2),
    ("qwen3_moe", 32, 2),
]


@pytest.mark.parametrize(("golden", "group", "size"), slow_except(MODELS[:1], MODELS))
def test_devices_and_experts(tmp_path, golden, group, size):
    stored = write(tmp_path / "packed", described(4, group, False), packed(4, group, False), golden=golden)
    plain = write(tmp_path / "plain", None, widened(4, group, False), golden=golden)
    assert_near(stored, plain, tensor_parallel_size=size)


def test_a_quantised_head_is_widened(tmp_path):
    stored = write(tmp_path / "packed", described(lm_head=True), packed(), also=("lm_head",))
    plain = write(tmp_path / "plain", None, widened(), also=("lm_head",))
    np.testing.assert_array_equal(by_path(load(stored)[1])["head.weight"], by_path(load(plain)[1])["head.weight"])


def test_rules_say_how_modules_are_stored(tmp_path):
    rules = {"-:.*\\.1\\.mlp": {}, "+:.*o_proj": {"bits": 8, "group_size": -1}, ".*down_proj": {"sym": False}}

    def form_of(name):
        if "o_proj" in name:
            return (8, -1, True)
        return (4, 32, "down_proj" not in name)

    def quantize(make):
        return lambda name, weight: {name: weight} if ".1.mlp" in name else make(*form_of(name))(name, weight)

    stored = write(tmp_path / "packed", described(dynamic=rules), quantize(packed))
    plain = write(tmp_path / "plain", None, quantize(widened))
    assert_equal(load(stored, dequantize=True)[1], load(plain)[1])
    names = by_path(load(stored)[1])
    assert "blocks.1.mlp.down.weight" in names and "blocks.0.mlp.down.weight.zero" in names
    assert names["blocks.0.attention.out.weight.scale"].shape[-1] == 1


def test_a_list_says_which_modules_are_quantised(tmp_path):
    given = described(
        modules_in_block_to_quantize=[["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["mlp.down_proj"]]
    )

    def quantize(make):
        listed = ("q_proj", "k_proj", "v_proj", "down_proj")
        return lambda name, weight: make()(name, weight) if name.split(".")[-2] in listed else {name: weight}

    stored = write(tmp_path / "packed", given, quantize(packed))
    assert_equal(load(stored, dequantize=True)[1], load(write(tmp_path / "plain", None, quantize(widened)))[1])
    names = by_path(load(stored)[1])
    assert {"blocks.0.mlp.gate_up.weight", "blocks.0.mlp.down.weight.codes"} <= names.keys()


def test_biases_that_a_model_lacks_must_be_zero(tmp_path):
    name = "model.layers.0.self_attn.q_proj.bias"
    found = load(write(tmp_path / "zero", described(), packed(), more={name: np.zeros(64, np.float16)}))
    assert_equal(found[1], load(write(tmp_path / "none", described(), packed()))[1])
    stored = write(tmp_path / "one", described(), packed(), more={name: np.eye(64, dtype=np.float16)[0]})
    with pytest.raises(ModelLoadError, match=rf"1 unused: {name}"):
        load(stored)


def test_a_stored_zero_of_a_whole_word_wraps():
    """Version 1 takes one from the word: a zero borrows from the next."""
    zero = np.array([[0, 0, 15, 1, 0, 8, 0, 0]], np.uint8)
    stored = (words(zero, 4).view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
    np.testing.assert_array_equal(read(described(symmetric=False)).zeros(stored, 4), zero)


def test_converted_checkpoints_load_again(tmp_path):
    source = write(tmp_path / "source", described(4, 32, False), packed(4, 32, False))
    script = Path(__file__).parent.parent.parent / "scripts" / "convert_checkpoint.py"
    runpy.run_path(str(script))["convert"](source, tmp_path / "output", "float32")
    for size in (1, 2):
        assert_equal(load(tmp_path / "output", tensor_parallel_size=size)[1], load(source, tensor_parallel_size=size)[1])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bits": 3}, "3 bits, must have 4 or 8"),
        ({"bits": None}, "None bits"),
        ({"group_size": 33}, "group_size of the quantised weights is 33, must be an even number"),
        ({"group_size": 0}, "is 0, must be an even number"),
        ({"checkpoint_format": "marlin"}, "'marlin', must be gptq or gptq_v2"),
        ({"is_marlin_format": True}, "'marlin', must be"),
        ({"checkpoint_format": {}, "format": ["gptq"]}, "must be gptq or gptq_v2"),
        ({"dynamic": [".*"]}, "must be an object of objects by pattern"),
        ({"dynamic": {"-:(": {}}}, "no regular expression"),
        ({"dynamic": {"+:.*q_proj": {"bits": 2}}}, "2 bits, must have 4 or 8"),
        ({"dynamic": {"-:.*up_proj": {}}}, "gate_proj is int4 in groups of 32, model.layers.0.mlp.up_proj is not"),
        ({"modules_in_block_to_quantize": 3}, "modules_in_block_to_quantize is 3"),
    ],
)
def test_what_is_not_supported_is_told(tmp_path, changed, message):
    with pytest.raises(ModelLoadError, match=message):
        load_model_config(write(tmp_path, described(**changed), packed()))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("g_idx", lambda g: g[::-1], r"q_proj\.g_idx says that the inputs of a group are not neighbours .*desc_act false"),
        ("qzeros", lambda z: z * 0, 'qzeros has 1, symmetric weights have 8 throughout; say "sym": false'),
        ("scales", lambda s: None, r"1 missing: model\.layers\.0\.self_attn\.q_proj\.scales"),
        ("scales", lambda s: s[:1], r"q_proj\.scales is \[1, 64\]"),
        ("qweight", lambda w: w.view(np.float32), r"q_proj\.qweight is F32"),
        ("scales", lambda s: s.astype(np.float32), r"q_proj\.scales is F32"),
    ],
)
def test_tensors_that_do_not_fit_are_told(tmp_path, name, change, message):
    def quantize(weight_name, weight):
        tensors = packed()(weight_name, weight)
        changed = {key: change(value) if key == f"{MODULE}.{name}" else value for key, value in tensors.items()}
        return {key: np.ascontiguousarray(value) for key, value in changed.items() if value is not None}

    with pytest.raises(ModelLoadError, match=message):
        load(write(tmp_path, described(), quantize))


def test_groups_that_do_not_fit_the_inputs_are_told(tmp_path):
    with pytest.raises(ModelLoadError, match="has 96 inputs, which must be a multiple of the group size 64"):
        load(write(tmp_path, described(group=64), lambda name, weight: {name: weight}))


@pytest.mark.parametrize("place", ["text_config", "compression_config", "quantize_config.json", "quant_config.json"])
def test_older_places_of_the_description_count_where_config_json_has_none(tmp_path, place):
    given = described()
    quantize, expected = packed(), Gptq
    if place == "compression_config":
        weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
        given = {"format": "float-quantized", "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
        expected = CompressedTensors
    elif place == "quant_config.json":
        given, expected = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}, Awq
    elif place == "quantize_config.json":
        del given["quant_method"]
    directory = write(tmp_path, None, quantize)
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    if place == "text_config":
        raw["text_config"] = {"quantization_config": given}
    elif place == "compression_config":
        raw[place] = given
    else:
        (directory / place).write_text(json.dumps(given))
    path.write_text(json.dumps(raw))
    (format,) = load_model_config(directory).formats
    assert isinstance(format, expected)
    assert format.scheme("model.layers.0.mlp.down_proj").group == (None if place == "compression_config" else 32)
    read = read_config_json(directory)
    assert "compression_config" not in read
    assert "quantization_config" not in read.get("text_config", {})
    path.write_text(json.dumps(raw | {"quantization_config": described(group=16)}))
    (format,) = load_model_config(directory).formats
    assert format.scheme("model.layers.0.mlp.down_proj").group == 16, "config.json itself counts first"


@pytest.mark.parametrize("file", QUANTIZATION_FILES)
def test_the_description_comes_from_the_hub_before_the_weights(monkeypatch, tmp_path, file):
    repository = write(tmp_path / "repository", None, packed())
    (repository / file).write_text("{}")
    hub = stand_in_hub.install(monkeypatch, repository, tmp_path / "cache")
    assert (text_files("owner/name") / file).is_file()
    assert not hub.fetched_weights

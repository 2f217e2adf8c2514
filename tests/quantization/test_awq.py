"""Weights as AWQ's programs store them: goldens of gptqmodel, and whole models against the same numbers without quantisation."""

import numpy as np
import pytest

from jaxllm.errors import ModelLoadError
from jaxllm.models.load_config import load_model_config
from jaxllm.quantization.formats.awq import Awq
from jaxllm.weight_format import Options
from tests.helpers import packed_goldens
from tests.helpers.quantized import assert_answers, assert_equal, assert_near, by_path, load, rounded, words, write
from tests.helpers.slow import slow_except

OPTIONS = Options(None, None, on_gpu=False, dtype="float32", unquantized=())
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def described(group=32, **changed):
    """A quantization_config."""
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm", **changed}


def packed(group=32):
    """Returns a function that makes the tensors of a weight."""

    def in_order(codes):
        return words(codes.reshape(len(codes), -1, 8)[..., ORDER].reshape(codes.shape), 4)

    def quantize(name, weight):
        codes, scale, zero = rounded(weight, 4, None if group == -1 else group, False, "float16")
        module = name.removesuffix(".weight")
        return {
            f"{module}.qweight": in_order(codes.reshape(weight.shape).T),
            f"{module}.qzeros": in_order(zero[..., 0].T),
            f"{module}.scales": scale[..., 0].T,
        }

    return quantize


def widened(group=32):
    """Returns a function that makes the same numbers without quantisation."""

    def quantize(name, weight):
        codes, scale, zero = rounded(weight, 4, None if group == -1 else group, False, "float16")
        return {name: ((codes.astype(np.float32) - zero) * scale.astype(np.float32)).reshape(weight.shape)}

    return quantize


@pytest.mark.parametrize("group", [32, -1])
def test_weights_are_those_of_the_writer(group):
    faults = []
    format = Awq.read(described(group), OPTIONS, faults)
    assert not faults
    packed_goldens.assert_exact(format, packed_goldens.read("awq", f"g{group}"), 32, 64)


@pytest.mark.slow
def test_an_engine_answers_as_with_the_widened_weights(tmp_path):
    plain = write(tmp_path / "plain", None, widened())
    assert_answers(write(tmp_path / "packed", described(), packed()), plain, tensor_parallel_size=2)


@pytest.mark.parametrize("group", [32, -1])
def test_weights_are_widened_while_loading_if_asked(tmp_path, group):
    stored = load(write(tmp_path / "packed", described(group), packed(group)), dequantize=True)[1]
    assert_equal(stored, load(write(tmp_path / "plain", None, widened(group)))[1])


MODELS = [("llama_gqa", 2), ("qwen3_moe", 2)]


@pytest.mark.parametrize(("golden", "size"), slow_except(MODELS[:1], MODELS))
def test_devices_and_experts(tmp_path, golden, size):
    stored = write(tmp_path / "packed", described(), packed(), golden=golden)
    assert_near(stored, write(tmp_path / "plain", None, widened(), golden=golden), tensor_parallel_size=size)


def test_parts_of_names_say_which_modules_are_plain(tmp_path):
    given = described(modules_to_not_convert=["layers.0.mlp", "o_pro"])

    def quantize(make):
        return lambda name, weight: {name: weight} if "layers.0.mlp" in name or "o_proj" in name else make()(name, weight)

    stored = write(tmp_path / "packed", given, quantize(packed))
    assert_equal(load(stored, dequantize=True)[1], load(write(tmp_path / "plain", None, quantize(widened)))[1])
    assert {"blocks.0.mlp.down.weight", "blocks.1.mlp.down.weight.codes"} <= by_path(load(stored)[1]).keys()


def test_names_of_older_programs_are_read(tmp_path):
    given = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": False, "version": "GEMM"}
    stored = load(write(tmp_path / "packed", given, packed()), dequantize=True)[1]
    assert_equal(stored, load(write(tmp_path / "plain", None, widened()))[1])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bits": 8}, "8 bits, must have 4"),
        ({"version": "gemv"}, "version of the AWQ weights is 'gemv', must be gemm"),
        ({"version": None, "format": "llm-awq"}, "'llm-awq', must be gemm"),
        ({"version": None, "checkpoint_format": "gemv_fast"}, "'gemv_fast', must be gemm"),
        ({"group_size": 7}, "group_size of the quantised weights is 7, must be an even number"),
        ({"modules_to_not_convert": "lm_head"}, "must be a list of names"),
        ({"modules_to_not_convert": ["up_proj"]}, "gate_proj is int4 .*up_proj is not"),
    ],
)
def test_what_is_not_supported_is_told(tmp_path, changed, message):
    with pytest.raises(ModelLoadError, match=message):
        load_model_config(write(tmp_path, described(**changed), packed()))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("scales", lambda s: None, r"1 missing: model\.layers\.0\.self_attn\.q_proj\.scales"),
        ("qweight", lambda w: w.T, r"q_proj\.qweight is \[8, 64\]"),
        ("qzeros", lambda z: z[:1], r"q_proj\.qzeros is \[1, 8\]"),
    ],
)
def test_tensors_that_do_not_fit_are_told(tmp_path, name, change, message):
    def quantize(weight_name, weight):
        tensors = packed()(weight_name, weight)
        changed = {key: change(v) if key == f"{packed_goldens.MODULE}.{name}" else v for key, v in tensors.items()}
        return {key: np.ascontiguousarray(value) for key, value in changed.items() if value is not None}

    with pytest.raises(ModelLoadError, match=message):
        load(write(tmp_path, described(), quantize))

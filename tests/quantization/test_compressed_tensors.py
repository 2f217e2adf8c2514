"""Integer weights as compressed-tensors stores them, against the same numbers without quantisation."""

import ml_dtypes
import numpy as np
import pytest

from tests.helpers.quantized import answer, assert_equal, assert_near, by_path, load, write
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


def words(codes, bits):
    """int32 [N, ceil(K · bits / 32)] of codes [N, K], the first in the lowest bits."""
    per_word = 32 // bits
    padded = np.pad(codes.astype(np.uint32), ((0, 0), (0, -codes.shape[1] % per_word)))
    shifted = padded.reshape(len(codes), -1, per_word) << np.arange(0, 32, bits, dtype=np.uint32)
    return shifted.sum(-1, dtype=np.uint32).view(np.int32)


def rounded(weight, bits=4, group=32, symmetric=True):
    """(codes, scale, zero) of a weight, by group."""
    values = weight.reshape(len(weight), -1, group or weight.shape[1])
    most = 2**bits - 1
    if symmetric:
        scale, zero = np.abs(values).max(-1, keepdims=True) / (most / 2), np.full((*values.shape[:2], 1), 2.0 ** (bits - 1))
    else:
        low, high = np.minimum(values.min(-1, keepdims=True), 0), np.maximum(values.max(-1, keepdims=True), 0)
        scale = (high - low) / most
        zero = np.round(-low / scale)
    scale = scale.astype(ml_dtypes.bfloat16)
    codes = np.clip(np.round(values / scale.astype(np.float32)) + zero, 0, most)
    return codes.astype(np.uint8), scale, zero.astype(np.uint8)


def packed(bits=4, group=32, symmetric=True):
    """What makes the tensors of a weight."""

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
    """What makes the same numbers without quantisation."""

    def quantize(name, weight):
        codes, scale, zero = rounded(weight, bits, group, symmetric)
        return {name: ((codes.astype(np.float32) - zero) * scale.astype(np.float32)).reshape(weight.shape)}

    return quantize


FORMS = [(4, 32, True), (4, 32, False), (4, None, True), (4, None, False), (8, 32, True), (8, 32, False), (8, None, True)]


@pytest.mark.parametrize(("bits", "group", "symmetric"), slow_except(FORMS[1:2], FORMS))
def test_an_engine_answers_as_with_the_widened_weights(tmp_path, bits, group, symmetric):
    form = (bits, group, symmetric)
    tokens, logprobs = answer(write(tmp_path / "packed", described(*form), packed(*form)))
    wanted_tokens, wanted = answer(write(tmp_path / "plain", None, widened(*form)))
    assert tokens == wanted_tokens
    np.testing.assert_allclose(logprobs, wanted, atol=1e-4)


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


@pytest.mark.parametrize(("golden", "group", "size"), [("llama_gqa", 32, 2), ("llama_gqa", 32, 4), ("deepseek_v3", 8, 2)])
def test_devices_share_weights(tmp_path, golden, group, size):
    stored = write(tmp_path / "packed", described(group=group), packed(group=group), golden=golden)
    plain = write(tmp_path / "plain", None, widened(group=group), golden=golden)
    assert_near(stored, plain, tensor_parallel_size=size)

"""Experts that stay in 8 or 4 bits: without a gate (Nemotron 3), which have no kernel, and all of a mixture in one tensor (Mistral 4)."""

import functools
import json
import logging
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxllm.engine import prepare
from jaxllm.errors import ModelLoadError
from jaxllm.layers.build import Widened, build_model
from jaxllm.layers.parameters import parameters, weights
from jaxllm.loaders import safetensors
from jaxllm.models.load_config import load_model_config
from jaxllm.quantization import numbers
from jaxllm.quantization.packed import AS_STORED
from scripts.saving import write_safetensors
from tests.helpers import goldens
from tests.helpers.quantized import PROMPT, answer, assert_answers, assert_equal, load, rounded, words

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
PER_TENSOR |= {"modules_to_not_convert": ["self_attn", "shared_experts", "lm_head"]}
PER_BLOCK = {**PER_TENSOR, "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None}
MODELOPT["exclude_modules"] = [f"*{name}_proj" for name in ("in", "out", "latent", *"qkvo")]
MODELOPT["exclude_modules"] += ["*layers.1.*", "*shared_experts*", "lm_head"]
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8, "symmetric": True},
        }
    },
    "ignore": ["lm_head"],
}
MISTRAL_4 = {
    "architectures": ["Mistral4ForCausalLM"],
    "model_type": "mistral4",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "dtype": "float32",
}


def write(directory, config, tensors, quantization=None):
    directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(directory / "model.safetensors", tensors)
    described = config if quantization is None else {**config, "quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(described))
    return directory


@functools.cache
def mistral_4():
    """Tensors by name, with values of the size of trained ones."""
    random, found = np.random.default_rng(3), {}
    for weight in weights(build_model(config_of(MISTRAL_4))):
        for tensor in weight.parts[""].source.tensors:
            deviation = 1 if len(tensor.shape) == 1 else tensor.shape[-1] ** -0.5
            found[tensor.name] = (random.standard_normal(tensor.shape) * deviation).astype(np.float32)
    return found


def config_of(values):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(values))
        return load_model_config(folder).for_tensor_parallel(1)


def blocks_of(weight, rows, columns):
    """(values, scales [E, N / rows, K / columns], the weight that they are of) of experts [E, N, K], the last blocks perhaps cut."""
    num_experts, outputs, inputs = weight.shape
    row, column = np.arange(outputs) // rows, np.arange(inputs) // columns
    scale = np.zeros((num_experts, row[-1] + 1, column[-1] + 1), np.float32)
    np.maximum.at(scale, np.ix_(range(num_experts), row, column), np.abs(weight) / 448)
    of_value = scale[:, row][:, :, column]
    values = (weight / of_value).astype(FP8)
    return values, scale, values.astype(np.float32) * of_value


def fused(tmp_path, quantization, rows=None, columns=None, halves=False):
    """A Mistral 4 with fp8 experts, and one with the same numbers in float32."""
    stored, plain = dict(mistral_4()), dict(mistral_4())
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj")) and ".experts." in name]:
        outputs, inputs = stored[name].shape[1:]
        of_output = (outputs // 2 if halves and "gate_up" in name else outputs) if rows is None else rows
        stored[name], stored[f"{name}_scale_inv"], plain[name] = blocks_of(plain[name], of_output, columns or inputs)
        stored[f"{name}_activation_scale"] = np.ones(len(plain[name]), np.float32)
    return write(tmp_path / "stored", MISTRAL_4, stored, quantization), write(tmp_path / "plain", MISTRAL_4, plain)


def nemotron(tmp_path, quantization, quantize, quantizes):
    """The golden with modules of which `quantize(name, weight)` gives tensors and the weight that they are of, and one with the same
    numbers in float32."""
    source = safetensors.Checkpoint(goldens.FOLDER / "nemotron_h")
    stored, plain = {}, {}
    for name in source.entries:
        tensor = np.asarray(source.tensor(name), np.float32)
        is_linear = name.endswith("proj.weight") and quantizes(name)
        found, plain[name] = quantize(name, tensor) if is_linear else ({name: tensor}, tensor)
        stored |= found
    config = json.loads((goldens.FOLDER / "nemotron_h" / "config.json").read_text())
    return write(tmp_path / "stored", config, stored, quantization), write(tmp_path / "plain", config, plain)


def in_fp8(name, weight):
    values, scale, wide = blocks_of(weight[None], *weight.shape)
    return {
        name: values[0],
        f"{name}_scale": scale.reshape(()),
        name.replace("weight", "input_scale"): scale.reshape(()),
    }, wide[0]


def in_int4(name, weight):
    codes, scale, _ = rounded(weight, group=8, scale_type=ml_dtypes.bfloat16)
    wide = (codes.astype(np.float32) - 8) * scale.astype(np.float32)
    packed = {"packed": words(codes.reshape(weight.shape), 4), "scale": scale[..., 0], "shape": np.array(weight.shape)}
    return {f"{name}_{part}": array for part, array in packed.items()}, wide.reshape(weight.shape)


def experts_of(directory, size=1, **options):
    """The weights of experts in float32 by path, of the codes that stand in the model, or as they are; and whether they are codes."""
    config, state = load(directory, tensor_parallel_size=size, **options)
    arrays = {path: np.asarray(variable[...]) for path, variable in parameters(state)}
    found, are_stored = {}, set()
    for weight in weights(build_model(config)):
        parts = {part: arrays[weight.path_of(part)] for part in weight.parts}
        if all(spec.axes[0] == "experts" and len(spec.shape) > 2 for spec in weight.parts.values()):
            are_stored.add("codes" in parts)
            wide = numbers.widen(parts, weight.format.weight_scheme, np) if "codes" in parts else parts[""]
            found[weight.path] = np.asarray(wide, np.float32)
    return found, are_stored


def assert_stored(stored, plain):
    wanted, _ = experts_of(plain)
    for options, are_stored in (({}, {True}), ({"size": 2}, {True}), ({"dequantize": True}, {False})):
        found, are = experts_of(stored, **options)
        assert are == are_stored and found.keys() == wanted.keys() and found
        for path, array in found.items():
            np.testing.assert_allclose(array.reshape(wanted[path].shape), wanted[path], rtol=1e-6, err_msg=str(path))


@pytest.mark.parametrize(
    ("quantization", "options"),
    [(PER_TENSOR, {}), (PER_TENSOR, {"halves": True}), (PER_BLOCK, {"rows": 32, "columns": 32}), (PER_TENSOR, {"rows": 1})],
)
@pytest.mark.slow
def test_experts_of_one_tensor_stay_in_fp8(tmp_path, quantization, options):
    assert_stored(*fused(tmp_path, quantization, **options))


@pytest.mark.parametrize(
    ("quantization", "quantize", "quantizes"),
    [(INT4, in_int4, lambda name: True), (MODELOPT, in_fp8, lambda name: ".experts." in name)],
)
def test_experts_without_a_gate_stay_in_few_bits(tmp_path, quantization, quantize, quantizes):
    assert_stored(*nemotron(tmp_path, quantization, quantize, quantizes))


def test_experts_without_a_gate_are_never_in_tiles_and_widened_one_at_a_time(tmp_path, caplog):
    stored, _ = nemotron(tmp_path, INT4, in_int4, lambda name: True)
    config = load_model_config(stored).for_tensor_parallel(1).in_tiles()
    model = build_model(config)
    experts = [weight.format for weight in weights(model) if any("experts" in spec.axes for spec in weight.parts.values())]
    assert [format.layout for format in experts if format.widens_each] == [AS_STORED, AS_STORED] and not Widened.of(
        model
    ).experts
    with caplog.at_level(logging.INFO, "jaxllm"):
        prepare.tell_of_widened_weights([model], "bfloat16")
    assert any("a step widens each that a token chooses" in text for text in caplog.messages)
    rounded = load_model_config(goldens.FOLDER / "nemotron_h", quantization="int8").for_tensor_parallel(1)
    assert not any(weight.format.widens_each for weight in weights(build_model(rounded)))


def without_scales(tensors):
    return {name: array for name, array in tensors.items() if not name.endswith("gate_up_proj_scale_inv")}


def changed_scales(change):
    return lambda tensors: {n: change(a) if n.endswith("gate_up_proj_scale_inv") else a for n, a in tensors.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_scales, "1 missing: model.layers.0.mlp.experts.gate_up_proj_scale_inv"),
        (
            changed_scales(lambda scale: scale[:, :, 0].repeat(5, 1)),
            r"gate_up_proj_scale_inv is \[4, 5\], must be \[4, 96, 1\]",
        ),
        (changed_scales(lambda scale: scale * np.nan), "4 scales of model.layers.0.mlp.experts.gate_up_proj are no numbers"),
    ],
)
def test_scales_that_cannot_be_used_are_refused(tmp_path, change, message):
    stored, _ = fused(tmp_path, PER_TENSOR)
    file = safetensors.Checkpoint(stored)
    tensors = {name: np.array(file.tensor(name)) for name in file.entries}
    with pytest.raises(ModelLoadError, match=message):
        load(write(tmp_path / "changed", MISTRAL_4, change(tensors), PER_TENSOR))


def test_groups_that_do_not_divide_inputs_are_refused(tmp_path):
    config = json.loads((goldens.FOLDER / "nemotron_h" / "config.json").read_text())
    odd = json.loads(json.dumps(INT4))
    odd["config_groups"]["group_0"]["weights"]["group_size"] = 16
    write(tmp_path, config, {}, odd)
    with pytest.raises(
        ModelLoadError, match="experts.0.down_proj has 24 inputs, which must be a multiple of the group size 16"
    ):
        build_model(load_model_config(tmp_path).for_tensor_parallel(1))


def test_a_saved_checkpoint_has_the_same_experts(tmp_path):
    stored, _ = fused(tmp_path, PER_TENSOR)
    config, state = load(stored)
    goldens.save(config, state, tmp_path / "saved", stored)
    assert_equal(load(tmp_path / "saved")[1], state)
    assert safetensors.Checkpoint(tmp_path / "saved").entries["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 96, 64)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """By name, a checkpoint with experts in few bits and one with the same numbers in float32."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "mistral": fused(folder / "mistral", PER_TENSOR),
        "nemotron": nemotron(folder / "nemotron", INT4, in_int4, lambda name: True),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mistral", {"tensor_parallel_size": 2}),
        ("mistral", {"attention_implementation": "triton", "num_tokens": 1}),  # in tiles
        ("nemotron", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ],
)
def test_logits_of_an_engine_are_those_of_the_widened_weights(models, name, options):
    stored, plain = models[name]
    assert_answers(stored, plain, **options)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "nemotron"])
def test_engines_answer_as_transformers_with_the_widened_weights(models, name):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    stored, plain = models[name]
    tokens, logprobs = answer(stored)
    kind = transformers.Mistral4ForCausalLM if name == "mistral" else transformers.AutoModelForCausalLM
    reference = kind.from_pretrained(plain, dtype=torch.float32)
    with torch.no_grad():
        wanted = torch.log_softmax(reference(torch.tensor([PROMPT + tokens])).logits[0], -1).numpy()
    assert tokens == wanted[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    np.testing.assert_allclose(logprobs, wanted[np.arange(len(wanted) - 1), [*PROMPT, *tokens][1:]], atol=1e-4)

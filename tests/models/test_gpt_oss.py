"""gpt-oss: a checkpoint in both of its forms, made here, through an engine and by attention without a cache.

tests/models/test_families.py compares the family with transformers.
"""

import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.config import EngineConfig
from jaxllm.engine import kernel_check
from jaxllm.engine.prepare import Prepared
from jaxllm.errors import ModelLoadError
from jaxllm.layers.build import build_model, weight_bytes
from jaxllm.loaders import safetensors
from jaxllm.loaders.load import load_weights
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.mesh import make_mesh
from jaxllm.quantization.mxfp4 import widen
from jaxllm.start_times import StartTimes
from tests.helpers import goldens

D, F, E, LAYERS = 64, 96, 4, 2
CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 96,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": E,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 4096,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 128,
        "truncate": False,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
}
FLOATS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
PROMPTS = [[5, 1, 80, 33, 7, 7, 2, 61, 14, 9, 90, 42, 3, 3, 18, 77, 25], [50, 51, 52], [9]]


def tensors_of() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Those that are never quantised, and the weights of experts in both forms."""
    rng = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 0.2) -> np.ndarray:
        return (scale * rng.normal(size=shape)).astype(ml_dtypes.bfloat16)

    def packed(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Blocks and scales of a matrix [E, rows, columns], and what they stand for, value by value."""
        blocks = rng.integers(0, 256, (E, rows, columns // 32, 16), dtype=np.uint8)
        scales = rng.integers(120, 126, (E, rows, columns // 32), dtype=np.uint8)
        values = np.empty((E, rows, columns))
        for i, (e, r, b, at) in enumerate(np.ndindex(*blocks.shape)):
            byte, scale = int(blocks.flat[i]), 2.0 ** (int(scales[e, r, b]) - 127)
            values[e, r, 32 * b + 2 * at] = FLOATS[byte % 16] * scale
            values[e, r, 32 * b + 2 * at + 1] = FLOATS[byte // 16] * scale
        return blocks, scales, values.swapaxes(1, 2).astype(ml_dtypes.bfloat16)

    common = {
        "model.embed_tokens.weight": normal(96, D, scale=1),
        "lm_head.weight": normal(96, D),
        "model.norm.weight": normal(D),
    }
    four_bits, plain = {}, {}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        for part, outputs, inputs in (("q", D, D), ("k", D // 2, D), ("v", D // 2, D), ("o", D, D)):
            common[f"{name}.self_attn.{part}_proj.weight"] = normal(outputs, inputs)
            common[f"{name}.self_attn.{part}_proj.bias"] = normal(outputs)
        common[f"{name}.self_attn.sinks"] = normal(4, scale=2)
        common[f"{name}.input_layernorm.weight"] = normal(D) + 1
        common[f"{name}.post_attention_layernorm.weight"] = normal(D) + 1
        common[f"{name}.mlp.router.weight"], common[f"{name}.mlp.router.bias"] = normal(E, D), normal(E)
        for part, outputs, inputs in (("gate_up_proj", 2 * F, D), ("down_proj", D, F)):
            weight = f"{name}.mlp.experts.{part}"
            common[f"{weight}_bias"] = normal(E, outputs)
            four_bits[f"{weight}_blocks"], four_bits[f"{weight}_scales"], plain[weight] = packed(outputs, inputs)
    return common, plain, four_bits


def write(directory: Path, tensors: dict[str, np.ndarray], **config: object) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG | config))
    safetensors.write(directory / "model.safetensors", tensors)
    return directory


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    common, plain, four_bits = tensors_of()
    folder = tmp_path_factory.mktemp("gpt_oss")
    return {
        "bfloat16": write(folder / "plain", common | plain),
        "mxfp4": write(folder / "mxfp4", common | four_bits, quantization_config=MXFP4),
    }


@pytest.mark.parametrize("size", [1, 2])
def test_experts_in_four_bits_are_what_they_stand_for(folders: dict[str, Path], size: int) -> None:
    """Of two devices each holds 48 of an expert's 96 values: one and a half blocks."""
    found = [goldens.load(folders[form], tensor_parallel_size=size) for form in ("bfloat16", "mxfp4")]
    (config, plain), (_, unpacked) = found
    assert weight_bytes(found[1][0]) == weight_bytes(config)
    for expected, got in zip(jax.tree.leaves(plain), jax.tree.leaves(unpacked), strict=True):
        assert got.dtype == expected.dtype and got.sharding == expected.sharding
        np.testing.assert_array_equal(got, expected)


def test_whole_experts_of_a_device_in_four_bits(folders: dict[str, Path]) -> None:
    states = []
    for form in ("bfloat16", "mxfp4"):
        config = load_model_config(folders[form], expert_parallel=True).for_tensor_parallel(2)
        states.append(load_weights(config, build_model(config), folders[form], load_format="auto", mesh=make_mesh(2)))
    for expected, got in zip(*map(jax.tree.leaves, states), strict=True):
        assert got.sharding == expected.sharding
        np.testing.assert_array_equal(got, expected)


def test_scales_are_exact_at_both_ends() -> None:
    blocks, scales = np.full((2, 16), 0x1F, np.uint8), np.array([1, 250], np.uint8)
    got = np.asarray(jax.jit(widen, static_argnums=2)(blocks, scales, "float32")).reshape(2, 16, 2)
    np.testing.assert_array_equal(got[1], np.tile([-6 * 2.0**123, 0.5 * 2.0**123], (16, 1)))
    np.testing.assert_array_equal(got[0, 0, 0], np.float32(-6 * 2.0**-126))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 18, "block_size": 8},  # chunks and preemption
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    ],
    ids=["one device", "a small pool", "two devices", "two devices, whole experts"],
)
def test_an_engine_gives_the_tokens_of_attention_without_a_cache(folders: dict[str, Path], options: dict) -> None:
    config, state = goldens.load(folders["bfloat16"])
    llm = LLM(
        str(folders["mxfp4"]),
        skip_tokenizer_init=True,
        max_model_len=96,
        max_num_seqs=4,
        decode_buckets=(4,),
        **options,
    )
    answers = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS], SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    )
    core: Any = llm.llm_engine.core
    assert (core.stats().num_preemptions > 0) == ("num_gpu_blocks_override" in options)
    again = llm.generate([{"prompt_token_ids": PROMPTS[0]}], SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    llm.shutdown()
    assert again[0].outputs[0].token_ids == answers[0].outputs[0].token_ids
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = list(answer.outputs[0].token_ids)
        logits_TV = goldens.logits(config, state, prompt + tokens, pad_to=96)[len(prompt) - 1 : -1]
        chosen = np.take_along_axis(logits_TV, np.array(tokens)[:, None], axis=1)[:, 0]
        np.testing.assert_allclose(chosen, logits_TV.max(axis=1), atol=1e-4)
        assert len(set(tokens)) > 8


def test_kernels_are_checked_with_sinks_and_biases(folders: dict[str, Path]) -> None:
    config = EngineConfig.from_options(model=str(folders["mxfp4"]), skip_tokenizer_init=True, max_model_len=96)
    prepared = Prepared.of(config, folders["mxfp4"], (), StartTimes())
    shapes = kernel_check.shapes_of(prepared.config, prepared.model_config, prepared.plan)
    [attention], [experts] = shapes["paged_attention"], shapes["grouped_matmul"]
    assert [(layer.window, layer.has_sinks) for layer in attention.layers] == [(8, True), (None, True)]
    assert experts.has_biases and experts.activation == "swiglu_clamped"


def test_what_mxfp4_cannot_be_is_refused(folders: dict[str, Path]) -> None:
    four_bits = {"quantization_config": MXFP4}
    with pytest.raises(ModelLoadError, match="quant_method 'mxfp4', supported for experts as gpt-oss has them"):
        load_model_config(goldens.FOLDER / "qwen3", overrides=four_bits)
    with pytest.raises(ModelLoadError, match="intermediate_size is 48, must be a multiple of 32"):
        load_model_config(folders["mxfp4"], overrides={"intermediate_size": 48})
    with pytest.raises(ModelLoadError, match="swiglu_limit is 5.0, supported: 7.0"):
        load_model_config(folders["mxfp4"], overrides={"swiglu_limit": 5.0})
    ignoring = {**MXFP4, "modules_to_not_convert": ["model.layers.*.mlp.experts"]}
    config = load_model_config(folders["mxfp4"], overrides={"quantization_config": ignoring})
    with pytest.raises(ModelLoadError, match="4 missing: model.layers.0.mlp.experts.down_proj, "):
        load_weights(config, build_model(config), folders["mxfp4"], load_format="auto", mesh=make_mesh(1))

"""gpt-oss: a checkpoint in both of its forms, made here, through an engine and by attention without a cache.

tests/models/test_families.py compares the family with transformers.
"""

import dataclasses
import json
import runpy
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxllm import LLM, SamplingParams
from jaxllm.config import EngineConfig
from jaxllm.engine import kernel_choice, kernel_shapes
from jaxllm.engine.kernel_choice import wants_tiles
from jaxllm.engine.prepare import Prepared
from jaxllm.errors import ConfigError, JaxLLMError, ModelLoadError
from jaxllm.layers.build import build_model, num_parameters, weight_bytes
from jaxllm.loaders.load import load_weights
from jaxllm.model_config import ModelConfig
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.mesh import make_mesh
from jaxllm.quantization.formats.mxfp4 import Mxfp4
from jaxllm.quantization.mxfp4 import widen
from jaxllm.start_times import StartTimes
from pallas_kernels.checking import grouped_matmul
from scripts.saving import write_safetensors
from tests.helpers import engines, goldens
from tests.helpers.slow import slow_except

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
D, F, E, LAYERS = 64, 192, 4, 2
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
    """Tensors that are never quantised, and the weights of experts in both forms."""
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
    write_safetensors(directory / "model.safetensors", tensors)
    return directory


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    common, plain, four_bits = tensors_of()
    folder = tmp_path_factory.mktemp("gpt_oss")
    return {
        "bfloat16": write(folder / "plain", common | plain),
        "mxfp4": write(folder / "mxfp4", common | four_bits, quantization_config=MXFP4),
    }


def load(directory: Path, size: int, **options: Any) -> tuple[ModelConfig, nnx.State]:
    """A checkpoint in float32 on the first devices."""
    config = load_model_config(directory, **options).for_tensor_parallel(size)
    return config, load_weights(config, build_model(config), directory, load_format="auto", mesh=make_mesh(size))


@pytest.mark.slow
def test_widened_experts_are_what_their_four_bits_stand_for(folders: dict[str, Path]) -> None:
    """Each of four devices holds 48 of an expert's 192 values: one and a half blocks."""
    found = [goldens.load(folders[form], tensor_parallel_size=4) for form in ("bfloat16", "mxfp4")]
    (config, plain), (_, unpacked) = found
    assert weight_bytes(found[1][0]) == weight_bytes(config)
    for expected, got in zip(jax.tree.leaves(plain), jax.tree.leaves(unpacked), strict=True):
        assert got.dtype == expected.dtype and got.sharding == expected.sharding
        np.testing.assert_array_equal(got, expected)


def test_whole_experts_of_a_device_are_widened(folders: dict[str, Path]) -> None:
    states = [load(folders[form], 2, expert_parallel=True)[1] for form in ("bfloat16", "mxfp4")]
    for expected, got in zip(*map(jax.tree.leaves, states), strict=True):
        assert got.sharding == expected.sharding
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("size", "expert_parallel"),
    slow_except([(2, False)], [(1, False), (2, False), (4, True)]),
    ids=["one device", "by width", "whole experts"],
)
@pytest.mark.slow
def test_experts_that_stay_in_four_bits_are_what_these_stand_for(
    folders: dict[str, Path], size: int, expert_parallel: bool
) -> None:
    config, plain = load(folders["bfloat16"], size, expert_parallel=expert_parallel)
    packed_config, packed = load(folders["mxfp4"], size, expert_parallel=expert_parallel, dequantize=False)
    num_values = LAYERS * E * 3 * D * F
    assert num_parameters(packed_config) == num_parameters(config)
    assert weight_bytes(config) - weight_bytes(packed_config) == num_values * 4 - num_values * 17 // 32
    model, packed_model = (nnx.merge(nnx.graphdef(build_model(c)), s) for c, s in ((config, plain), (packed_config, packed)))
    for block, packed_block in zip(model.blocks, packed_model.blocks, strict=True):
        for name in ("gate_up", "down"):
            expected, weight = getattr(block.mlp, name)[...], getattr(packed_block.mlp, name)
            np.testing.assert_array_equal(weight[...].astype(expected.dtype), expected)
            for stored in (weight.words[...], weight.exponents[...]):
                assert stored.addressable_shards[0].data.size * size == stored.size


def load_in_tiles(directory: Path, size: int, load_format: str = "auto", **options: Any) -> tuple[ModelConfig, nnx.State]:
    config = load_model_config(directory, dequantize=False, **options).for_tensor_parallel(size).in_tiles()
    return config, load_weights(config, build_model(config), directory, load_format=load_format, mesh=make_mesh(size))


@pytest.mark.parametrize(
    ("size", "expert_parallel"),
    slow_except([(2, False)], [(1, False), (2, False), (4, True)]),
    ids=["one device", "by width", "whole experts"],
)
@pytest.mark.slow
def test_experts_in_tiles_are_what_their_four_bits_stand_for(
    folders: dict[str, Path], size: int, expert_parallel: bool
) -> None:
    """Devices that split an expert's 192 values pad their 96 to 128."""
    config, plain = load(folders["bfloat16"], size, expert_parallel=expert_parallel)
    tiled_config, tiled = load_in_tiles(folders["mxfp4"], size, expert_parallel=expert_parallel)
    assert num_parameters(tiled_config) == num_parameters(config) and not tiled_config.has_packed_experts
    model, tiled_model = (nnx.merge(nnx.graphdef(build_model(c)), s) for c, s in ((config, plain), (tiled_config, tiled)))
    num_parts = 1 if expert_parallel else size
    for block, tiled_block in zip(model.blocks, tiled_model.blocks, strict=True):
        for name in ("gate_up", "down"):
            expected, weight = np.asarray(getattr(block.mlp, name)[...]), getattr(tiled_block.mlp, name)
            parts = np.split(np.asarray(weight[...].astype("float32")), num_parts, axis=2)
            own = [part[:, :, : F // num_parts] for part in parts]
            np.testing.assert_array_equal(np.concatenate(own, axis=2), expected)
            assert sum(map(np.count_nonzero, parts)) == np.count_nonzero(expected), "zeros pad it"
            assert all(part[...].addressable_shards[0].data.size * size == part.size for part in (weight.words, weight.scale))


@pytest.mark.slow
def test_a_device_with_one_block_has_tiles_too(folders: dict[str, Path]) -> None:
    """Of 64 values each of two devices has one block of scales, which would be a factor of all outputs."""
    narrow = {"intermediate_size": 64}
    found = [
        nnx.merge(nnx.graphdef(build_model(config)), state).blocks[0].mlp.down
        for config, state in (
            load_in_tiles(folders["mxfp4"], 2, "dummy", overrides=narrow),
            _dummy(load_model_config(folders["mxfp4"], dequantize=False, overrides=narrow).for_tensor_parallel(2), folders),
        )
    ]
    tiled, stored = (np.asarray(weight[...].astype("float32")) for weight in found)
    np.testing.assert_array_equal(np.concatenate([tiled[..., :32], tiled[..., 64:96]], -1), stored)


def _dummy(config: ModelConfig, folders: dict[str, Path]) -> tuple[ModelConfig, nnx.State]:
    return config, load_weights(config, build_model(config), folders["mxfp4"], load_format="dummy", mesh=make_mesh(2))


def test_experts_are_in_tiles_by_default(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where their kernels were verified; elsewhere Triton computes with the 4 bits as they are stored."""
    config = load_model_config(folders["mxfp4"], dtype="bfloat16", on_gpu=True)
    monkeypatch.setattr("pallas_kernels._compat.has_mosaic", lambda: True)
    for is_verified in (False, True):
        monkeypatch.setattr(kernel_choice, "was_verified", lambda _, op, answer=is_verified: answer or op != "grouped_matmul")
        for is_here in (True, False):
            wants = [wants_tiles(w, config, on_gpu=True, is_checked=True, is_here=is_here) for w in ("auto", "mosaic", "xla")]
            assert wants == [is_verified or not is_here, True, False]
    tiles = kernel_shapes.product_shapes([build_model(config.for_tensor_parallel(2).in_tiles())], "bfloat16")
    packed = grouped_matmul.Stored("e2m1", 32)
    assert tiles.linears == () and [stored for _, stored in tiles.experts] == [(packed, packed)]
    assert tiles.expert_types == ("packed e2m1",)


@pytest.mark.slow
def test_experts_in_four_bits_are_converted_as_they_were_read(folders: dict[str, Path], tmp_path: Path) -> None:
    state = load(folders["mxfp4"], 1, dequantize=False)[1]
    convert = runpy.run_path(str(SCRIPTS / "convert_checkpoint.py"))["convert"]
    convert(folders["mxfp4"], tmp_path / "orbax", "float32", dequantize=False)
    again = load(tmp_path / "orbax", 2, dequantize=False)[1]
    in_tiles = [
        load_in_tiles(directory, 2, form)[1] for directory, form in ((folders["mxfp4"], "auto"), (tmp_path / "orbax", "orbax"))
    ]
    for pair in ((state, again), in_tiles):
        for expected, got in zip(*map(jax.tree.leaves, pair), strict=True):
            np.testing.assert_array_equal(got, expected)
    with pytest.raises(ModelLoadError, match="holds experts in 4 bits; use --no-dequantize"):
        load(tmp_path / "orbax", 1)
    with pytest.raises(JaxLLMError, match="one kind of quantisation"):
        convert(folders["mxfp4"], tmp_path / "fp8", "float32", "fp8", dequantize=False)
    # It makes what an engine reads by default.
    convert(folders["mxfp4"], tmp_path / "default", "float32")
    for expected, got in zip(
        *map(jax.tree.leaves, (load(d, 1)[1] for d in (folders["mxfp4"], tmp_path / "default"))), strict=True
    ):
        np.testing.assert_array_equal(got, expected)


def test_experts_stay_in_four_bits_where_a_kernel_computes_from_them(folders: dict[str, Path]) -> None:
    def is_packed(**options: Any) -> bool:
        return load_model_config(folders["mxfp4"], **options).has_packed_experts

    assert is_packed(on_gpu=True, dtype="bfloat16") and is_packed(dequantize=False)
    assert not is_packed(on_gpu=True, dtype="float32") and not is_packed() and not is_packed(on_gpu=True, dequantize=True)
    with pytest.raises(ConfigError, match=r"has no packed weights in 4 or 8 bits; leave --no-dequantize out"):
        load_model_config(folders["bfloat16"], dequantize=False)
    # 48 values of a device are one and a half blocks.
    assert not load_model_config(folders["mxfp4"], dequantize=False).for_tensor_parallel(4).has_packed_experts


@pytest.mark.slow
def test_dummy_experts_have_four_bits_too(folders: dict[str, Path]) -> None:
    config = load_model_config(folders["mxfp4"], dequantize=False).for_tensor_parallel(2)
    state = load_weights(config, build_model(config), folders["mxfp4"], load_format="dummy", mesh=make_mesh(2))
    model = nnx.merge(nnx.graphdef(build_model(config)), state)
    assert 0.02 < float(model.blocks[0].mlp.down[...].astype("float32").std()) < 0.026


def test_a_scale_beyond_what_kernels_compute_with_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    common, _, four_bits = tensors_of()
    four_bits["model.layers.1.mlp.experts.down_proj_scales"][3, 5, 1] = 192
    directory = write(tmp_path / "large", common | four_bits, quantization_config=MXFP4)
    with pytest.raises(ModelLoadError, match=r"layers.1.mlp.experts.down_proj_scales has a scale of 2\^65, .*use --dequantize"):
        load(directory, 1, dequantize=False)
    load(directory, 1)


def test_scales_are_exact_at_both_ends() -> None:
    blocks, scales = np.full((2, 16), 0x1F, np.uint8), np.array([1, 250], np.uint8)
    got = np.asarray(jax.jit(widen, static_argnums=2)(blocks, scales, "float32")).reshape(2, 16, 2)
    np.testing.assert_array_equal(got[1], np.tile([-6 * 2.0**123, 0.5 * 2.0**123], (16, 1)))
    np.testing.assert_array_equal(got[0, 0, 0], np.float32(-6 * 2.0**-126))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {
            "dequantize": False,
            "max_num_batched_tokens": 16,
            "token_buckets": (16,),
            "num_gpu_blocks_override": 19,
            "block_size": 8,
        },  # chunks and preemption
        {"dequantize": False, "tensor_parallel_size": 2},
        {"dequantize": False, "attention_implementation": "triton", "tensor_parallel_size": 2},
        {
            "dequantize": False,
            "tensor_parallel_size": 2,
            "enable_expert_parallel": True,
            "enable_eplb": True,
            "eplb_config": {"num_redundant_experts": 2, "step_interval": 8},
        },
    ],
    ids=["a small pool", "two devices", "tiles on two devices", "two devices, whole experts that move"],
)
def test_an_engine_gives_the_tokens_of_attention_without_a_cache(folders: dict[str, Path], options: dict) -> None:
    config, state = goldens.load(folders["bfloat16"])
    llm = LLM(str(folders["mxfp4"]), **{**engines.SMALL, **options})
    answers = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS], SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    )
    core: Any = llm.llm_engine.core
    assert (core.stats().num_preemptions > 0) == ("num_gpu_blocks_override" in options)
    for level in (1, 2) if "attention_implementation" in options else ():
        llm.sleep(level)
        llm.wake_up()
    again = llm.generate([{"prompt_token_ids": PROMPTS[0]}], SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    assert core.model_config.has_tiles == ("attention_implementation" in options)
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
    shapes = kernel_shapes.shapes_of(prepared.config, prepared.model_config, prepared.plan)
    [attention], [experts] = shapes["paged_attention"], shapes["grouped_matmul"]
    assert [(layer.window, layer.has_sinks) for layer in attention.layers] == [(8, True), (None, True)]
    assert experts.has_biases and experts.activation == "swiglu_clamped" and not experts.is_packed
    packed = dataclasses.replace(prepared.model_config, formats=(Mxfp4(computes=True),))
    [experts] = kernel_shapes.shapes_of(prepared.config, packed, prepared.plan)["grouped_matmul"]
    assert experts.is_packed


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

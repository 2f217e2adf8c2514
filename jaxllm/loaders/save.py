"""Writes a model as a Hugging Face checkpoint that transformers, and everything that reads its format, can load."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm.loaders import safetensors
from jaxllm.loaders.layout import parameters, source_of
from jaxllm.model_config import ModelConfig
from pallas_kernels.grouped_matmul.mxfp4 import unpack


def save_safetensors(
    config: ModelConfig, state: nnx.State, directory: Path, described: Mapping[str, Any], *, dtype: str | None = None
) -> None:
    """Write config.json and model.safetensors. `dtype` is that of the file, but for fp8 weights; default: `config.dtype`.

    `config` must be for one device (`ModelConfig.as_stored`), as the state's arrays must be. `described` is the config.json that it
    was read from.
    """
    assert config == config.as_stored(), "save the weights as trained on one device"
    stored_dtype = jnp.dtype(dtype or config.dtype)
    tensors: dict[str, np.ndarray] = {}
    for path, variable in parameters(state):
        array = np.asarray(jax.device_get(stored_bytes(variable[...]) if path[-1] == "words" else variable[...]))
        if path[-1] not in ("values", "scale", "kv_scale", "words", "exponents"):
            array = array.astype(stored_dtype)
        source_of(variable).write(array, tensors)
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_config_json(config, described, str(stored_dtype)), indent=2)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")
    partial = directory / "model.safetensors.partial"
    safetensors.write(partial, dict(sorted(tensors.items())))
    partial.replace(directory / "model.safetensors")


def stored_bytes(words: jax.Array) -> jax.Array:
    """Uint8 [..., K / 2]: 4-bit values as checkpoints hold them."""
    return unpack(words).reshape(*words.shape[:-1], -1)


def _config_json(config: ModelConfig, described: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    written = {**described, "torch_dtype": dtype, "dtype": dtype, "eos_token_id": list(config.eos_token_ids) or None}
    if not config.generates:
        written["architectures"] = [config.architecture.replace("ForCausalLM", "Model")]
    if not config.packed_experts:
        written.pop("quantization_config", None)
    if config.quantization is not None:
        written["quantization_config"] = quantization_json(config)
    return written


def quantization_json(config: ModelConfig) -> dict[str, Any]:
    """The quantization_config of fp8 weights as they are saved: compressed-tensors with a scale per output channel."""
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    linear = {
        "targets": ["Linear"],
        "weights": {**number, "strategy": "channel", "dynamic": False},
        "input_activations": {**number, "strategy": "token", "dynamic": True},
    }
    plain = [name for modules in config.linears() if not config.is_quantized(modules) for name in modules]
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": linear},
        "ignore": [config.names.head, *plain],
        "kv_cache_scheme": {**number, "strategy": "tensor", "dynamic": False} if config.has_kv_scales else None,
    }

"""Writes a model as a Hugging Face checkpoint that transformers, and everything that reads its format, can load."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm.loaders import safetensors
from jaxllm.loaders.layout import parameters
from jaxllm.loaders.names import source_of
from jaxllm.model_config import FAMILIES, ModelConfig
from jaxllm.quantization_config import LINEAR_MODULES


def save_safetensors(config: ModelConfig, state: nnx.State, directory: Path, *, dtype: str | None = None) -> None:
    """Write config.json and model.safetensors. `dtype` is that of the file, but for fp8 weights; default: `config.dtype`.

    `config` must be for one device (`ModelConfig.as_stored`), as the state's arrays must be.
    """
    assert config == config.as_stored(), "save the weights as trained on one device"
    stored_dtype = jnp.dtype(dtype or config.dtype)
    tensors: dict[str, np.ndarray] = {}
    for path, variable in parameters(state):
        array = np.asarray(jax.device_get(variable[...]))
        if path[-1] not in ("values", "scale", "kv_scale"):
            array = array.astype(stored_dtype)
        tensors.update(source_of(path, config).split(array))
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config_json(config, str(stored_dtype)), indent=2)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")
    partial = directory / "model.safetensors.partial"
    safetensors.write(partial, dict(sorted(tensors.items())))
    partial.replace(directory / "model.safetensors")


def config_json(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The config.json that `load_model_config` reads as `config`; older and newer versions of transformers understand it."""
    rope = config.rope
    before_scaling = rope.original_max_position if rope.kind in ("linear", "dynamic") else config.max_position
    written = {
        "architectures": [config.architecture if config.generates else config.architecture.replace("ForCausalLM", "Model")],
        "model_type": FAMILIES[config.architecture].model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": before_scaling,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rope.theta,
        "rope_scaling": _rope_scaling(config),
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "torch_dtype": dtype,
    }
    if config.architecture == "LlamaForCausalLM":
        written |= {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    elif config.architecture == "Qwen3ForCausalLM":
        written |= {"attention_bias": config.attention_bias}
    if config.architecture != "LlamaForCausalLM":
        written["sliding_window"] = config.sliding_window
    if config.sliding_window_layers is not None:
        written["use_sliding_window"] = True
        written["layer_types"] = ["sliding_attention" if on else "full_attention" for on in config.sliding_window_layers]
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
    plain = [
        name
        for layer in range(config.num_layers)
        for part, names in LINEAR_MODULES.items()
        if not config.is_quantized(layer, part)
        for name in (f"model.layers.{layer}.{module}" for module in names)
    ]
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": linear},
        "ignore": ["lm_head", *plain],
        "kv_cache_scheme": {**number, "strategy": "tensor", "dynamic": False} if config.has_kv_scales else None,
    }


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    rope = config.rope
    if rope.kind == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("yarn", "llama3"):
        scaling["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        names = ("beta_fast", "beta_slow", "truncate", "attention_factor")
        scaling |= {name: getattr(rope, name) for name in names}
    return scaling

"""Writes models: as Hugging Face checkpoints that transformers, and everything that reads their format, can load; for orbax."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jaxllm.errors import JaxLLMError
from jaxllm.layers.build import build_model
from jaxllm.layers.parameters import parameters, source_of, weights
from jaxllm.loaders import orbax
from jaxllm.model_config import ModelConfig
from jaxllm.weight_format import PLAIN
from scripts.saving.formats import saved, saved_config
from scripts.saving.sources import write

CACHE_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
"""Compressed-tensors' description of an fp8 KV cache with scales."""


def save_safetensors(
    config: ModelConfig,
    state: nnx.State,
    directory: Path,
    described: Mapping[str, Any],
    *,
    dtype: str | None = None,
    tower: nnx.State | None = None,
) -> None:
    """Write config.json and model.safetensors. `dtype` is that of plain weights in the file; default: `config.dtype`.

    `config` must be for one device (`ModelConfig.as_stored`), as the state's arrays must be, without experts in 4 bits. `described` is
    the config.json that it was read from. tower: of the encoder of images, if the model has one.
    """
    assert config == config.as_stored() and not config.has_packed_experts, "save the weights as trained on one device"
    stored_dtype = jnp.dtype(dtype or config.dtype)
    tensors: dict[str, np.ndarray] = {}
    for _, variable in itertools.chain(parameters(state), parameters(tower) if tower is not None else ()):
        array = np.asarray(variable[...])
        is_plain = variable.get_metadata("format") == PLAIN
        write(source_of(variable), array.astype(stored_dtype) if is_plain else array, tensors)
    for format in config.formats:
        tensors = saved(format, tensors)
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_config_json(config, described, str(stored_dtype)), indent=2)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")
    partial = directory / "model.safetensors.partial"
    write_safetensors(partial, tensors)
    partial.replace(directory / "model.safetensors")


def write_safetensors(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write tensors by name."""
    contiguous = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    save_file(contiguous, file, {"format": "pt"})


def save_orbax(config: ModelConfig, state: nnx.State, directory: Path, folder: str = orbax.WEIGHTS) -> None:
    """Write the weights into a model directory as `jaxllm.loaders.orbax` restores them.

    `config` is the one that the state's model was built with; it must be for one device (`ModelConfig.as_stored`). folder: of these
    weights.
    """
    import orbax.checkpoint as ocp

    assert config == config.as_stored(), "save the weights as loaded for one device"
    arrays = {orbax.name_of(path): variable[...] for path, variable in parameters(state)}
    directory.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((directory / folder).absolute(), arrays, force=True)


def _config_json(config: ModelConfig, described: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    written = {**described, "torch_dtype": dtype, "dtype": dtype, "eos_token_id": list(config.eos_token_ids) or None}
    if not config.generates:
        written["architectures"] = [config.architecture.replace("ForCausalLM", "Model")]
    return with_formats(written, config)


def with_formats(described: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """A config.json with the quantization_config of weights as this config has them. Raises JaxLLMError if it takes several."""
    key, written = "quantization_config", dict(described)
    all_weights = weights(build_model(config.as_stored()))
    modules = {
        tensor.name.partition(".weight")[0]: weight.format
        for weight in all_weights
        for spec in weight.parts.values()
        for tensor in spec.source.tensors
    }
    configs = (saved_config(format, described.get(key), config, modules) for format in config.formats)
    found = [each for each in configs if each is not None]
    if len(found) > 1:
        raise JaxLLMError("a config.json describes one kind of quantisation; leave --quantization or --no-dequantize out")
    if config.kv_format is not None:
        # What ModelOpt writes where nothing else is quantised; formats of weights take it too.
        with_cache = {"quant_method": "modelopt", "kv_cache_scheme": CACHE_SCHEME}
        found = [with_cache | {name: value for name, value in (found[0] if found else {}).items() if value is not None}]
    if found:
        written[key] = found[0]
    else:
        written.pop(key, None)
    return written

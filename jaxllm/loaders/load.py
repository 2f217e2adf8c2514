"""Fills an abstract model with weights, from whichever source, each placed on its devices as soon as it is read."""

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.loaders import orbax
from jaxllm.loaders.dummy import dummy_weights
from jaxllm.loaders.layout import (
    Axes,
    ParamPath,
    Progress,
    axes_of,
    expand,
    expand_on_devices,
    on_cpu,
    parameters,
    raise_on_misfit,
    state_of,
    stored_sharding,
)
from jaxllm.loaders.names import HARMLESS, Source, source_of
from jaxllm.loaders.quantized import (
    BESIDE_WEIGHTS,
    block_scales,
    describe,
    is_quantized_here,
    kv_scale,
    scale_of_outputs,
    without_blocks,
)
from jaxllm.loaders.safetensors import DTYPES, Checkpoint
from jaxllm.log import logger
from jaxllm.model_config import ModelConfig
from jaxllm.models.decoder import CausalLM
from jaxllm.parallel.axes import sharding
from jaxllm.quantization.fp8 import quantize


def load_weights(
    config: ModelConfig,
    model: CausalLM,
    directory: Path,
    *,
    load_format: str,
    mesh: Mesh,
    seed: int = 0,
    progress: Progress | None = None,
) -> nnx.State:
    """The model's state with every array in its type (`config.dtype` or fp8) on its devices. `config` is the one that `model`
    was built with.

    load_format: auto (orbax if the directory has such a checkpoint, else safetensors), safetensors, orbax or dummy.
    Raises ModelLoadError; missing, unused and misshapen weights come in one.
    """
    if load_format == "auto":
        load_format = "orbax" if orbax.is_checkpoint(directory) else "safetensors"
    if load_format == "dummy":
        return dummy_weights(config, model, mesh, seed=seed, progress=progress)
    if load_format == "orbax":
        return orbax.restore(config, model, directory, mesh, progress=progress)
    return load_safetensors(config, model, directory, mesh=mesh, progress=progress)


def load_safetensors(
    config: ModelConfig,
    model: CausalLM,
    directory: Path,
    *,
    mesh: Mesh,
    progress: Progress | None = None,
    transform_on_device: bool | None = None,
) -> nnx.State:
    """Load a Hugging Face checkpoint. The host holds one parameter at a time; each device reads the slices that it keeps.

    Transposing and casting is done on the devices unless they are the host (`transform_on_device` says otherwise).
    """
    checkpoint = Checkpoint(directory)
    if "embed_tokens.weight" in checkpoint.entries:  # saved as a bare decoder, as embedding models are
        checkpoint.entries = {f"model.{name}": entry for name, entry in checkpoint.entries.items()}
    sources = {path: source_of(path, config) for path, _ in parameters(model)}
    _check(checkpoint, sources, config)
    if config.stored_fp8 is not None:
        logger.info("%s", describe(config.stored_fp8, config))
    if transform_on_device is None:
        transform_on_device = not on_cpu(mesh)
    read_stored = _read_by_device if transform_on_device else _read_by_host
    sizes = {path: sum(_num_bytes(checkpoint, t.name) for t in source.tensors) for path, source in sources.items()}
    total, done = sum(sizes.values()), 0
    variables = dict(parameters(model))
    arrays: dict[ParamPath, Array] = {}
    for path, variable in variables.items():
        source, axes, dtype = sources[path], axes_of(variable), jnp.dtype(variable.dtype)
        tensor = _tensor_reader(checkpoint, path, source, config)
        if path[-1] == "kv_scale":
            arrays[path] = jax.device_put(kv_scale(checkpoint, int(path[1])), sharding(mesh, axes))
        elif not is_quantized_here(path, config):
            arrays[path] = read_stored(tensor, source, axes, variable.shape, dtype, mesh)
        elif path[-1] == "values":
            scale_path = (*path[:-1], "scale")
            stored = _read(tensor, source, axes, mesh)
            quantize = _quantizer(axes, variable.shape, axes_of(variables[scale_path]), variables[scale_path].shape, mesh)
            # One weight at a time is in memory both ways.
            arrays[path], arrays[scale_path] = jax.block_until_ready(quantize(stored))
        done += sizes[path]
        if progress is not None:
            progress(done, total)
    return state_of(model, arrays)


def _num_bytes(checkpoint: Checkpoint, name: str) -> int:
    return checkpoint.entries[name].num_bytes if name in checkpoint.entries else 0


def _tensor_reader(checkpoint: Checkpoint, path: ParamPath, source: Source, config: ModelConfig) -> Callable[[str], np.ndarray]:
    """How a parameter's tensors are read by name: as they are, or without the checkpoint's quantisation."""
    if path[-1] == "scale":
        shapes = {tensor.name: tensor.shape for tensor in source.tensors}
        return lambda name: scale_of_outputs(checkpoint.tensor(name), shapes[name])
    scales = {tensor.name: scale for tensor, scale, _ in block_scales(path, source, config)}
    if not scales:
        return checkpoint.tensor
    assert config.stored_fp8 is not None and config.stored_fp8.block_shape is not None
    block_shape = config.stored_fp8.block_shape
    return lambda name: without_blocks(checkpoint.tensor(name), checkpoint.tensor(scales[name]), block_shape)


def _check(checkpoint: Checkpoint, sources: Mapping[ParamPath, Source], config: ModelConfig) -> None:
    """Compare names, shapes and types of checkpoint and model. Raises ModelLoadError with every difference."""
    entries = checkpoint.entries
    found = {name: entry.shape for name, entry in entries.items()}
    wanted: dict[str, tuple[int, ...]] = {}
    for path, source in sources.items():
        if path[-1] == "kv_scale" or (path[-1] == "scale" and is_quantized_here(path, config)):
            continue
        wanted |= {tensor.name: tensor.shape for tensor in source.tensors}
        wanted |= {name: shape for _, name, shape in block_scales(path, source, config)}
        if path[-1] == "scale":  # of a whole tensor or of each output
            for t in source.tensors:
                if t.name in found and math.prod(found[t.name]) in (1, math.prod(t.shape)):
                    found[t.name] = t.shape
    # A tied checkpoint may store the head all the same, and a model that only makes vectors needs none.
    needs_no_head = config.tie_word_embeddings or not config.generates
    ignored = [name for name in entries if HARMLESS.search(name) or (needs_no_head and name == "lm_head.weight")]
    if config.stored_fp8 is not None:
        ignored += [name for name in entries if BESIDE_WEIGHTS.search(name)]
    unreadable = [
        f"{name} is {entries[name].dtype}" for name in wanted if name in entries and entries[name].dtype not in DTYPES
    ]
    raise_on_misfit(checkpoint.directory, config, wanted, found, ignored=ignored, unreadable=unreadable)


def _read_by_host(
    tensor: Callable[[str], np.ndarray], source: Source, axes: Axes, shape: tuple[int, ...], dtype: np.dtype, mesh: Mesh
) -> Array:
    stored = source.read(tensor, (slice(None),) * len(source.shape))
    array = expand(np, stored.transpose(source.permutation).astype(dtype), axes, shape)
    return jax.device_put(array, sharding(mesh, axes))


def _read_by_device(
    tensor: Callable[[str], np.ndarray], source: Source, axes: Axes, shape: tuple[int, ...], dtype: np.dtype, mesh: Mesh
) -> Array:
    array = expand_on_devices(_read(tensor, source, axes, mesh), axes, shape, mesh, source.permutation, dtype)
    # Transfers run behind; without waiting, host copies of many parameters would be alive at once.
    return jax.block_until_ready(array)


def _read(tensor: Callable[[str], np.ndarray], source: Source, axes: Axes, mesh: Mesh) -> Array:
    """The concatenation of a source, in the type of the file; each device gets about what it will keep."""
    stored_shape = tuple(source.shape[i] for i in source.permutation)
    spec = stored_sharding(mesh, axes, stored_shape).spec
    by_host_dimension = dict(zip(source.permutation, spec, strict=True))
    host_sharding = NamedSharding(mesh, PartitionSpec(*(by_host_dimension[i] for i in range(len(spec)))))
    read = functools.partial(source.read, tensor)
    return jax.make_array_from_callback(source.shape, host_sharding, read)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=256)
def _quantizer(
    axes: Axes, shape: tuple[int, ...], scale_axes: Axes, scale_shape: tuple[int, ...], mesh: Mesh
) -> Callable[[Array], tuple[Array, Array]]:
    """Output-major weights of the stored shape to fp8 values and scale. One program per distinct shape."""

    def quantize_and_expand(stored: Array) -> tuple[Array, Array]:
        values, scale = quantize(stored, len(axes) - len(scale_axes))
        return expand(jnp, values, axes, shape), expand(jnp, scale, scale_axes, scale_shape)

    return jax.jit(quantize_and_expand, out_shardings=(sharding(mesh, axes), sharding(mesh, scale_axes)))

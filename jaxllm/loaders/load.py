"""Fills an abstract model with weights, from whichever source, each placed on its devices as soon as it is read."""

import functools
from collections.abc import Iterable
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
from jaxllm.loaders.safetensors import DTYPES, Checkpoint
from jaxllm.model_config import ModelConfig
from jaxllm.models.decoder import CausalLM
from jaxllm.parallel.axes import sharding


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
    """The model's state with every array in `config.dtype` on its devices. `config` is the one that `model` was built with.

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
    sources = {path: source_of(path, config) for path, _ in parameters(model)}
    _check(checkpoint, sources.values(), config)
    if transform_on_device is None:
        transform_on_device = not on_cpu(mesh)
    place = _place_by_device if transform_on_device else _place_by_host
    total = sum(checkpoint.entries[t.name].num_bytes for source in sources.values() for t in source.tensors)
    done = 0
    arrays: dict[ParamPath, Array] = {}
    for path, variable in parameters(model):
        source = sources[path]
        arrays[path] = place(checkpoint, source, axes_of(variable), variable.shape, jnp.dtype(variable.dtype), mesh)
        done += sum(checkpoint.entries[t.name].num_bytes for t in source.tensors)
        if progress is not None:
            progress(done, total)
    return state_of(model, arrays)


def _check(checkpoint: Checkpoint, sources: Iterable[Source], config: ModelConfig) -> None:
    """Compare names, shapes and types of checkpoint and model. Raises ModelLoadError with every difference."""
    wanted = {t.name: t.shape for source in sources for t in source.tensors}
    entries = checkpoint.entries
    # A tied checkpoint may store the head all the same.
    ignored = [name for name in entries if HARMLESS.search(name) or (config.tie_word_embeddings and name == "lm_head.weight")]
    unreadable = [
        f"{name} is {entries[name].dtype}" for name in wanted if name in entries and entries[name].dtype not in DTYPES
    ]
    found = {name: entry.shape for name, entry in entries.items()}
    raise_on_misfit(checkpoint.directory, config, wanted, found, ignored=ignored, unreadable=unreadable)


def _place_by_host(
    checkpoint: Checkpoint, source: Source, axes: Axes, shape: tuple[int, ...], dtype: np.dtype, mesh: Mesh
) -> Array:
    stored = source.read(checkpoint.tensor, (slice(None),) * len(source.shape))
    array = expand(np, stored.transpose(source.permutation).astype(dtype), axes, shape)
    return jax.device_put(array, sharding(mesh, axes))


def _place_by_device(
    checkpoint: Checkpoint, source: Source, axes: Axes, shape: tuple[int, ...], dtype: np.dtype, mesh: Mesh
) -> Array:
    stored_shape = tuple(source.shape[i] for i in source.permutation)
    spec = stored_sharding(mesh, axes, stored_shape).spec
    by_host_dimension = dict(zip(source.permutation, spec, strict=True))
    host_sharding = NamedSharding(mesh, PartitionSpec(*(by_host_dimension[i] for i in range(len(spec)))))
    read = functools.partial(source.read, checkpoint.tensor)
    stored = jax.make_array_from_callback(source.shape, host_sharding, read)  # type: ignore[arg-type]
    array = expand_on_devices(stored, axes, shape, mesh, source.permutation, dtype)
    # Transfers run behind; without waiting, host copies of many parameters would be alive at once.
    return jax.block_until_ready(array)

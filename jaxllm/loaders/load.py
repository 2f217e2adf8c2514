"""Fills an abstract model with weights, from whichever source, each placed on its devices as soon as it is read."""

import functools
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.layers.build import build_model
from jaxllm.layers.decoder import CausalLM
from jaxllm.layers.source import AnySource, Index, Mxfp4, Source, Stacked, Tensor
from jaxllm.loaders import orbax
from jaxllm.loaders.checkpoint import BYTES, DTYPES, Checkpoint
from jaxllm.loaders.dummy import dummy_weights
from jaxllm.loaders.formats import has_checkpoint, open_checkpoint
from jaxllm.loaders.layout import (
    Axes,
    ParamPath,
    Progress,
    axes_of,
    delete,
    expand,
    on_cpu,
    parameters,
    raise_on_misfit,
    source_of,
    state_of,
)
from jaxllm.loaders.mxfp4 import packed_words, raise_on_large_exponents, read_mxfp4
from jaxllm.loaders.quantized import (
    BESIDE_WEIGHTS,
    block_scales,
    describe,
    is_quantized_here,
    kv_scale,
    scale_of_outputs,
    without_blocks,
)
from jaxllm.log import logger
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.across_hosts import put
from jaxllm.parallel.axes import MESH_AXES, sharding
from jaxllm.quantization.fp8 import quantize

HARMLESS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|masked_bias|attn\.bias)$")
"""Buffers that old versions of transformers saved beside the weights."""

Reader = Callable[[Tensor, Index], np.ndarray]
"""Reads a part of a tensor of the checkpoint, as its view with copies and padding."""


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

    load_format: orbax, dummy, a format of `formats.FORMATS`, or auto: orbax if the directory has such a checkpoint, else the first
    of FORMATS that it has.
    Raises ModelLoadError; missing, unused and misshapen weights come in one.
    """
    if load_format == "dummy":
        return dummy_weights(config, model, mesh, seed=seed, progress=progress)
    if load_format == "orbax" or (load_format == "auto" and orbax.is_checkpoint(directory)):
        return orbax.restore(config, model, directory, mesh, progress=progress)
    whole = build_model(config) if isinstance(model, CausalLM) and model.is_stage else None
    return load_checkpoint(config, model, directory, load_format=load_format, mesh=mesh, progress=progress, whole=whole)


def load_checkpoint(
    config: ModelConfig,
    model: nnx.Module,
    directory: Path,
    *,
    mesh: Mesh,
    load_format: str = "auto",
    progress: Progress | None = None,
    transform_on_device: bool | None = None,
    whole: nnx.Module | None = None,
) -> nnx.State:
    """Load a Hugging Face checkpoint. Each device gets the slices that it keeps and no others; the host holds one tensor at a time.

    Transposing, casting and fusing is done on the devices unless they are the host (`transform_on_device` says otherwise).
    whole: the model that the checkpoint is of, if `model` is one stage of it: the tensors of the other stages are not read.
    """
    checkpoint = _open(directory, load_format, config)
    sources = {path: source_of(variable) for path, variable in parameters(model)}
    _check(checkpoint, sources if whole is None else {path: source_of(v) for path, v in parameters(whole)}, config)
    if config.stored_fp8 is not None:
        logger.info("%s", describe(config.stored_fp8, config))
    if config.stored_mxfp4 is not None and not config.packed_experts:
        logger.info("the checkpoint's 4-bit weights of experts (MXFP4) become %s", config.dtype)
    if transform_on_device is None:
        transform_on_device = not on_cpu(mesh)
    read_stored = _read_by_device if transform_on_device else _read_by_host
    sizes = {path: sum(_num_bytes(checkpoint, t.name) for t in source.tensors) for path, source in sources.items()}
    total, done = sum(sizes.values()), 0
    variables = dict(parameters(model))
    arrays: dict[ParamPath, Array] = {}
    try:
        for path, variable in variables.items():
            source, axes, dtype = sources[path], axes_of(variable), jnp.dtype(variable.dtype)
            read = _tensor_reader(checkpoint, path, source, config)
            if isinstance(source, Stacked):
                arrays[path] = _read_stacked(read, source, axes, variable.shape, dtype, mesh)
            elif path[-1] == "words":
                assert isinstance(source, Source)
                arrays[path] = packed_words(_place(read, source, axes, mesh), source.permutation, sharding(mesh, axes))
            elif isinstance(source, Mxfp4):
                arrays[path] = read_mxfp4(read, source, axes, variable.shape, dtype, mesh)
            elif path[-1] == "kv_scale":
                arrays[path] = put(kv_scale(checkpoint, source), sharding(mesh, axes))
            elif not is_quantized_here(path, config):
                arrays[path] = read_stored(read, source, axes, variable.shape, dtype, mesh)
            elif path[-1] == "values":
                scale_path = (*path[:-1], "scale")
                parts = _place(read, source.placed(axes, variable.shape), axes, mesh)
                quantize = _quantizer(source.axis, axes, len(axes_of(variables[scale_path])), mesh)
                # One weight at a time is in memory both ways.
                arrays[path], arrays[scale_path] = jax.block_until_ready(quantize(parts))
                del parts
            if path[-1] == "exponents":
                raise_on_large_exponents(arrays[path], source)
            done += sizes[path]
            if progress is not None:
                progress(done, total)
    except BaseException:
        delete(arrays)
        raise
    return state_of(model, arrays)


def check_weights(config: ModelConfig, directory: Path, *, load_format: str = "auto") -> None:
    """Raise ModelLoadError if the files of a directory are not this model's weights, or hold them in a form that cannot be read.

    Only the headers of files are read. A directory without weights is not held against it: they may be elsewhere.
    """
    if load_format in ("dummy", "orbax") or orbax.is_checkpoint(directory) or not has_checkpoint(directory):
        return
    sources = {path: source_of(variable) for path, variable in parameters(build_model(config))}
    _check(_open(directory, load_format, config), sources, config)


def loading_bytes(config: ModelConfig, model: CausalLM, num_devices: int) -> int:
    """Peak host memory in bytes while `load_checkpoint` loads onto this many GPUs, without the file cache: the slices of
    one tensor in transfer to the devices.

    Estimated without a checkpoint: its types are those of the config.
    """
    largest = 0
    for path, variable in parameters(model):
        source, axes = source_of(variable), axes_of(variable)
        if path[-1] in ("scale", "kv_scale"):
            continue
        if not isinstance(source, Source):
            is_split = any(MESH_AXES[axis] for axis in axes)
            if isinstance(source, Stacked):
                num_bytes = math.prod(variable.shape) * jnp.dtype(variable.dtype).itemsize
            else:
                num_bytes = sum(math.prod(tensor.shape) for tensor in source.tensors)
            largest = max(largest, 2 * num_bytes // (num_devices if is_split else 1))
            continue
        has_blocks = bool(list(block_scales(path, source, config)))
        is_stored_fp8 = path[-1] == "values" and config.stored_fp8 is not None
        is_stored_byte = is_stored_fp8 or path[-1] in ("words", "exponents")
        itemsize = 4 if has_blocks else 1 if is_stored_byte else jnp.dtype(config.dtype).itemsize
        source = source if path[-1] == "words" else source.placed(axes, variable.shape)
        split = _split_dimension(source, axes)
        for tensor in source.tensors:
            num_bytes = math.prod(tensor.placed_shape) * itemsize
            if has_blocks or (num_devices > 1 and split is not None and math.prod(tensor.placed_shape[:split]) > 1):
                num_bytes = 2 * num_bytes // (num_devices if split is not None else 1)  # copied, then sent, device by device
            largest = max(largest, num_bytes)
    return largest


def _open(directory: Path, load_format: str, config: ModelConfig) -> Checkpoint:
    checkpoint = open_checkpoint(directory, load_format, config.dtype)
    prefix, _, bare = config.names.embedding.partition(".")
    if f"{bare}.weight" in checkpoint.entries:  # saved as a bare decoder, as embedding models are
        checkpoint.entries = {f"{prefix}.{name}": entry for name, entry in checkpoint.entries.items()}
    return checkpoint


def _num_bytes(checkpoint: Checkpoint, name: str) -> int:
    return checkpoint.entries[name].num_bytes if name in checkpoint.entries else 0


def _tensor_reader(checkpoint: Checkpoint, path: ParamPath, source: AnySource, config: ModelConfig) -> Reader:
    """How parts of a parameter's tensors are read: as they are, or without the checkpoint's quantisation."""
    if path[-1] == "scale":
        return lambda tensor, index: tensor.read(scale_of_outputs(checkpoint.tensor(tensor.name), tensor.shape), index)
    scales = {tensor.name: scale for tensor, scale, _ in block_scales(path, source, config)}
    if not scales:
        return lambda tensor, index: tensor.read(checkpoint.tensor(tensor.name), index)
    assert config.stored_fp8 is not None and config.stored_fp8.block_shape is not None
    block_shape = config.stored_fp8.block_shape
    return lambda tensor, index: without_blocks(
        tensor, checkpoint.tensor(tensor.name), checkpoint.tensor(scales[tensor.name]), block_shape, index
    )


def _check(checkpoint: Checkpoint, sources: Mapping[ParamPath, AnySource], config: ModelConfig) -> None:
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
    ignored = [name for name in entries if HARMLESS.search(name) or (needs_no_head and name == f"{config.names.head}.weight")]
    ignored += [name for name in entries if name.startswith(config.names.ignored)]
    spare = tuple(f"{config.layer_name(config.num_layers + i)}." for i in range(config.num_spare_layers))
    ignored += [name for name in entries if name.startswith(spare)]
    if config.stored_fp8 is not None:
        ignored += [name for name in entries if BESIDE_WEIGHTS.search(name)]
    packed = {
        tensor.name
        for path, source in sources.items()
        if isinstance(source, Mxfp4) or path[-1] in ("words", "exponents")
        for tensor in source.tensors
    }
    unreadable = [
        f"{name} is {entries[name].dtype}"
        for name in wanted
        if name in entries and entries[name].dtype not in ((BYTES,) if name in packed else DTYPES)
    ]
    raise_on_misfit(checkpoint.directory, config, wanted, found, ignored=ignored, unreadable=unreadable)


def _read_by_host(read: Reader, source: Source, axes: Axes, shape: tuple[int, ...], dtype: np.dtype, mesh: Mesh) -> Array:
    array = source.read(read).transpose(source.permutation)
    # What is a view of the file is copied, as arrays on a CPU may be this very memory.
    array = array.astype(dtype, order="C", copy=not array.flags.writeable)
    return put(expand(np, array, axes, shape), sharding(mesh, axes))


def _read_by_device(read: Reader, source: Source, axes: Axes, shape: tuple[int, ...], dtype: np.dtype, mesh: Mesh) -> Array:
    parts = _place(read, source.placed(axes, shape), axes, mesh)
    # Without waiting, what was sent of many parameters would be alive at once, there and here.
    return jax.block_until_ready(_fuser(source.axis, source.permutation, dtype, sharding(mesh, axes))(parts))


def _read_stacked(read: Reader, source: Stacked, axes: Axes, shape: tuple[int, ...], dtype: np.dtype, mesh: Mesh) -> Array:
    """Each device gets the experts, or their parts, that it keeps: the host holds one device's at a time."""
    place = sharding(mesh, axes)
    slices = []
    for device, index in place.addressable_devices_indices_map(shape).items():
        assert index is not None
        slices.append(jax.block_until_ready(jax.device_put(source.read(read, index, dtype), device)))
    return jax.make_array_from_single_device_arrays(shape, place, slices)


def _place(read: Reader, source: Source, axes: Axes, mesh: Mesh) -> tuple[Array, ...]:
    """The tensors of a source, each in the type of the file and split as the parameter is."""
    spec: list[Any] = [None] * len(axes)
    if (split := _split_dimension(source, axes)) is not None:
        spec[split] = sharding(mesh, axes).spec[source.permutation.index(split)]
    return tuple(_place_tensor(read, tensor, NamedSharding(mesh, PartitionSpec(*spec))) for tensor in source.tensors)


def _split_dimension(source: Source, axes: Axes) -> int | None:
    """The dimension of the tensors that is split over devices."""
    return next((dimension for dimension, axis in zip(source.permutation, axes, strict=True) if MESH_AXES[axis]), None)


def _place_tensor(read: Reader, tensor: Tensor, place: NamedSharding) -> Array:
    """A tensor on the devices, each of which is sent its slice alone. Nothing of it is on the host afterwards."""
    if place.is_fully_replicated:
        return jax.block_until_ready(put(read(tensor, (slice(None),) * len(tensor.view)), place))
    slices = []
    for device, index in place.addressable_devices_indices_map(tensor.placed_shape).items():
        assert index is not None
        part = read(tensor, index)
        # What is contiguous in the file is sent from there, to all devices at once. A copy is gone before the next is made.
        is_copy = part.flags.writeable or not part.flags.c_contiguous
        slices.append(jax.device_put(np.ascontiguousarray(part), device))
        if is_copy:
            jax.block_until_ready(slices[-1])
        del part
    return jax.block_until_ready(jax.make_array_from_single_device_arrays(tensor.placed_shape, place, slices))


@functools.lru_cache(maxsize=256)
def _fuser(
    axis: int, permutation: tuple[int, ...], dtype: np.dtype, place: NamedSharding
) -> Callable[[tuple[Array, ...]], Array]:
    """The tensors of a source to its parameter. One program per distinct shape, not per parameter."""

    def fuse(parts: tuple[Array, ...]) -> Array:
        # Apart, because one kernel for both reads what it transposes piece by piece.
        fused = lax.optimization_barrier(jnp.concatenate(parts, axis)) if len(parts) > 1 else parts[0]
        return fused.transpose(permutation).astype(dtype)

    return jax.jit(fuse, out_shardings=place)


@functools.lru_cache(maxsize=256)
def _quantizer(axis: int, axes: Axes, num_scale_axes: int, mesh: Mesh) -> Callable[[tuple[Array, ...]], tuple[Array, Array]]:
    """The tensors of a source to fp8 values, output-major, and scale. One program per distinct shape."""

    def quantize_fused(parts: tuple[Array, ...]) -> tuple[Array, Array]:
        # Copied heads get the scales of the first.
        return quantize(jnp.concatenate(parts, axis), len(axes) - num_scale_axes)

    return jax.jit(quantize_fused, out_shardings=(sharding(mesh, axes), sharding(mesh, axes[:num_scale_axes])))

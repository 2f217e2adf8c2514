"""Fills an abstract model with weights, from whichever source, each placed on its devices as soon as it is read."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jaxllm.layers.build import build_audio_encoder, build_model, build_tower
from jaxllm.layers.decoder import CausalLM
from jaxllm.layers.parameters import ParamPath, state_of, weights
from jaxllm.loaders import orbax
from jaxllm.loaders.checkpoint import DTYPES, Checkpoint
from jaxllm.loaders.dummy import dummy_weights
from jaxllm.loaders.formats import has_checkpoint, open_checkpoint
from jaxllm.loaders.layout import Progress, raise_on_misfit
from jaxllm.loaders.reader import Files, Reader
from jaxllm.loaders.tensor_names import as_named_here, others_told
from jaxllm.log import logger
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Audio, VisionEncoder
from jaxllm.parallel.arrays import delete
from jaxllm.parallel.mesh import on_cpu
from jaxllm.weight_format import Expected

HARMLESS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|masked_bias|attn\.bias)$")
"""Buffers that old versions of transformers saved with the weights."""


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
    encoder: VisionEncoder | Audio | None = None,
) -> nnx.State:
    """Load a Hugging Face checkpoint. Each device gets the slices that it keeps and no others; the host holds one tensor at a time.

    Transposing, casting and fusing is done on the devices unless they are the host (`transform_on_device` says otherwise).
    whole: the model that the checkpoint is of, if `model` is one stage of it: the tensors of the other stages are not read.
    encoder: the encoder of images or audio that `model` is, beside whose tensors the checkpoint has others; None: it has none.
    """
    checkpoint = _open(directory, load_format, config, encoder)
    reader = Reader(
        config, checkpoint, mesh, transform_on_device=not on_cpu(mesh) if transform_on_device is None else transform_on_device
    )
    expected = _expected(model, reader)
    _check(
        reader,
        checkpoint.directory,
        config,
        expected if whole is None else _expected(whole, reader),
        is_part=encoder is not None,
    )
    for told in filter(None, (format.told(config.dtype) for format in config.formats)):
        logger.info("%s", told)
    if isinstance(model, CausalLM) and (told := others_told(config, checkpoint.entries)):
        logger.info("%s: %s", directory, told)
    sizes = [sum(reader.entries[name].num_bytes for name in tensors) for tensors in expected]
    total, done = sum(sizes), 0
    arrays: dict[ParamPath, Array] = {}
    stored: dict[str, Array] = {}
    try:
        for weight, size in zip(weights(model), sizes, strict=True):
            stored = {}
            for part, array in weight.format.load(reader, weight.stored_parts):
                stored[part] = array
            arrays |= weight.laid_out(stored, mesh)
            done += size
            if progress is not None:
                progress(done, total)
    except BaseException:
        delete((arrays, stored))
        raise
    return state_of(model, arrays)


def check_weights(config: ModelConfig, directory: Path, *, load_format: str = "auto") -> None:
    """Raise ModelLoadError if the files of a directory are not this model's weights, or hold them in a form that cannot be read.

    Only the headers of files are read. A directory without weights is not held against it: they may be elsewhere.
    """
    if load_format in ("dummy", "orbax") or orbax.is_checkpoint(directory) or not has_checkpoint(directory):
        return
    models: list[tuple[Callable[[ModelConfig], nnx.Module], VisionEncoder | Audio | None]] = [(build_model, None)]
    if config.vision is not None and config.vision.encoder is not None:
        models.append((build_tower, config.vision.encoder))
    if config.audio is not None:
        models.append((build_audio_encoder, config.audio))
    for build, encoder in models:
        files = Files(config, _open(directory, load_format, config, encoder))
        _check(files, directory, config, _expected(build(config), files), is_part=encoder is not None)


def _open(directory: Path, load_format: str, config: ModelConfig, encoder: VisionEncoder | Audio | None = None) -> Checkpoint:
    """The tensors of a text model, or those of an encoder alone, by the names that the model has for them."""
    checkpoint = open_checkpoint(directory, load_format, config.dtype)
    checkpoint.entries = as_named_here(config, checkpoint.entries)
    if encoder is not None:
        named = ((encoder.name_of(name), entry) for name, entry in checkpoint.entries.items())
        checkpoint.entries = {name: entry for name, entry in named if name is not None}
    return checkpoint


def _expected(model: nnx.Module, files: Files) -> list[dict[str, Expected]]:
    """The tensors that each weight is read from."""
    return [weight.format.expected(weight.stored_parts, files) for weight in weights(model)]


def _check(
    files: Files, directory: Path, config: ModelConfig, expected: Sequence[Mapping[str, Expected]], *, is_part: bool = False
) -> None:
    """Compare names, shapes and types of checkpoint and model. is_part: the model is a vision encoder or the like, and `files`
    have no other tensors. Raises ModelLoadError with every difference."""
    entries, wanted = files.entries, {name: tensor for tensors in expected for name, tensor in tensors.items()}
    # A tied checkpoint may store the head all the same, and a model that only makes vectors needs none.
    needs_no_head = config.tie_word_embeddings or not config.generates
    ignored = [
        name for name in entries if HARMLESS.search(name) or (needs_no_head and name.startswith(f"{config.names.head}."))
    ]
    if not is_part:
        ignored += [name for name in entries if name.startswith(config.names.ignored) or config.names.is_other(name)]
    spare = tuple(f"{config.layer_name(config.num_layers + i)}." for i in range(config.num_spare_layers))
    ignored += [name for name in entries if name.startswith(spare)]
    ignored += [name for name in entries if any(re.search(format.unused, name) for format in config.formats)]
    others = (name for name in entries if name not in wanted)
    zeros = (name for name in others if any(re.search(format.unused_zeros, name) for format in config.formats))
    ignored += [name for name in zeros if not files.tensor(name).any()]
    unreadable = [
        f"{name} is {entries[name].dtype}{tensor.otherwise and f' ({tensor.otherwise})'}"
        for name, tensor in wanted.items()
        if name in entries and entries[name].dtype not in (tensor.dtypes or DTYPES)
    ]
    shapes = {name: tensor.shape for name, tensor in wanted.items()}
    found = {name: entry.shape for name, entry in entries.items()}
    raise_on_misfit(directory, config, shapes, found, ignored=ignored, unreadable=unreadable)

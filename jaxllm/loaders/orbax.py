"""JAX-native checkpoints of converted models: restored straight into sharded arrays, without renaming or transposing."""

import json
import math
from dataclasses import replace
from pathlib import Path

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxllm.errors import ModelLoadError
from jaxllm.files import read_json
from jaxllm.layers.build import build_model
from jaxllm.layers.decoder import CausalLM
from jaxllm.layers.parameters import axes_of, parameters, state_of
from jaxllm.layers.vision import VisionTower
from jaxllm.loaders.layout import Progress, expand, raise_on_misfit, stored_sharding
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.arrays import convert
from jaxllm.parallel.axes import sharding

WEIGHTS = "weights.orbax"
TABLE = f"{WEIGHTS}.json"
ENCODER = "encoder.orbax"
"""The encoder of images, beside the weights of the text model."""
_FORMAT = 1


def is_checkpoint(directory: Path) -> bool:
    """Whether `save` wrote into this directory."""
    return (directory / TABLE).is_file()


def has_encoder(directory: Path) -> bool:
    """Whether `save` wrote an encoder of images into this directory."""
    return (directory / f"{ENCODER}.json").is_file()


def save(config: ModelConfig, state: nnx.State, directory: Path, tower: nnx.State | None = None) -> None:
    """Write the weights into a model directory, in the stored shapes, so that every mesh size can restore them.

    `config` is the one that the state's model was built with; it must be for one device (`ModelConfig.as_stored`). tower: that of the
    encoder of images.
    """
    assert config == config.as_stored(), "save the weights as loaded for one device"
    if tower is not None:
        _save(config, tower, directory, ENCODER)
    # Last, so that an interrupted save does not look like a checkpoint.
    _save(config, state, directory, WEIGHTS)


def _save(config: ModelConfig, state: nnx.State, directory: Path, part: str) -> None:
    import orbax.checkpoint as ocp

    arrays = {_name(path): variable[...] for path, variable in parameters(state)}
    directory.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((directory / part).absolute(), arrays, force=True)
    table = {name: {"shape": list(array.shape), "dtype": str(array.dtype)} for name, array in arrays.items()}
    text = json.dumps({"format": _FORMAT, "architecture": config.architecture, "parameters": table}, indent=1)
    (directory / f"{part}.json").write_text(text + "\n", encoding="utf-8")


def restore(
    config: ModelConfig, model: CausalLM, directory: Path, mesh: Mesh, *, progress: Progress | None = None
) -> nnx.State:
    """The state of the model in `config.dtype`, or fp8 weights as they were converted, each device reading its shard. Of a stage of a
    pipeline, the other stages' weights are not read.

    Raises ModelLoadError with every misfit.
    """
    found = _shapes(directory, WEIGHTS)
    # A head that is not needed is read and dropped.
    as_stored = replace(config.as_stored(), generates=config.generates or any(name.startswith("head.") for name in found))
    stored = {_name(path): variable for path, variable in parameters(build_model(as_stored))}
    if reason := next(filter(None, (format.unrestorable(found) for format in config.formats)), ""):
        raise ModelLoadError(f"{directory} {reason}")
    return _restore(config, model, directory, WEIGHTS, stored, mesh, progress)


def restore_tower(
    config: ModelConfig, tower: VisionTower, directory: Path, mesh: Mesh, *, progress: Progress | None = None
) -> nnx.State:
    """The state of the encoder of images, as `restore`."""
    stored = {_name(path): variable for path, variable in parameters(tower)}
    return _restore(config, tower, directory, ENCODER, stored, mesh, progress)


def _restore(
    config: ModelConfig,
    model: nnx.Module,
    directory: Path,
    part: str,
    stored: dict[str, nnx.Variable],
    mesh: Mesh,
    progress: Progress | None,
) -> nnx.State:
    """stored: the parameters in their stored shapes, by name."""
    import orbax.checkpoint as ocp

    shapes = {name: tuple(variable.shape) for name, variable in stored.items()}
    raise_on_misfit(directory, config, shapes, _shapes(directory, part))
    wanted = {
        name: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=stored_sharding(mesh, axes_of(v), v.shape))
        for name, v in stored.items()
    }
    # Arrays are read concurrently; without this limit orbax would hold up to 96 GB of them on the host.
    largest_gb = math.ceil(max(math.prod(v.shape) for v in wanted.values()) * 4 / 1e9)  # in the checkpoint float32, perhaps
    options = {}
    if isinstance(model, CausalLM) and model.is_stage:
        options["partial_restore"] = True
        wanted = {name: wanted[name] for name in (_name(path) for path, _ in parameters(model))}
    arguments = ocp.args.PyTreeRestore(wanted, ocp.checkpoint_utils.construct_restore_args(wanted), **options)
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(restore_concurrent_gb=largest_gb + 1)) as checkpointer:
            arrays = checkpointer.restore((directory / part).absolute(), args=arguments)
    except Exception as error:  # orbax and tensorstore document no exception types
        raise ModelLoadError(f"{directory / part} is truncated or corrupt; convert it again ({error})") from error
    if progress is not None:  # all arrays are read at once
        total = sum(array.nbytes for array in arrays.values())
        progress(total, total)
    placed = {}
    for path, variable in parameters(model):
        array, axes, shape = arrays.pop(_name(path)), axes_of(variable), tuple(variable.shape)
        if array.shape != shape:
            array = convert(expand, sharding(mesh, axes), array, axes=axes, shape=shape)
        placed[path] = array
    return state_of(model, placed)


def _shapes(directory: Path, part: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays that `save` wrote, by name."""
    path = directory / f"{part}.json"
    if not path.is_file():
        raise ModelLoadError(f"{directory} has no {path.name}: it is not an orbax checkpoint of this project")
    table = read_json(path, error=ModelLoadError)
    try:
        found = {name: tuple(fields["shape"]) for name, fields in table["parameters"].items()}
        known = table["format"] == _FORMAT
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path} is corrupt ({error!r}); convert the model again") from error
    if not known:
        raise ModelLoadError(f"{path} has format {table['format']}, this version reads {_FORMAT}; convert the model again")
    return found


def _name(path: tuple[str | int, ...]) -> str:
    return ".".join(map(str, path))

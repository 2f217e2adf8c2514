"""JAX-native checkpoints of converted models: restored straight into sharded arrays, without renaming or transposing.

`scripts/convert_checkpoint.py` writes them, in the shapes for one device, so that every mesh size can restore them.
"""

import math
from dataclasses import replace
from pathlib import Path

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxllm.errors import ModelLoadError
from jaxllm.layers.build import build_model
from jaxllm.layers.decoder import CausalLM
from jaxllm.layers.parameters import ParamPath, axes_of, parameters, state_of, weights
from jaxllm.loaders.layout import Progress, expand, raise_on_misfit, stored_sharding
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.arrays import convert
from jaxllm.parallel.axes import sharding

WEIGHTS = "weights.orbax"
"""The folder of the weights in a model directory."""
ENCODER = "encoder.orbax"
"""That of an encoder of images."""


def is_checkpoint(directory: Path) -> bool:
    """Whether a model directory has one."""
    return (directory / WEIGHTS).is_dir()  # orbax gives it this name once it is whole


def has_encoder(directory: Path) -> bool:
    """Whether it has an encoder of images or audio too."""
    return (directory / ENCODER).is_dir()


def restore(
    config: ModelConfig,
    model: nnx.Module,
    directory: Path,
    mesh: Mesh,
    *,
    part: str = WEIGHTS,
    progress: Progress | None = None,
) -> nnx.State:
    """The state of the model, or with `part=ENCODER` of its encoder, each device reading its shard: in `config.dtype`, or fp8 weights as
    they were converted. Of a stage of a pipeline, the other stages' weights are not read.

    Raises ModelLoadError with every misfit.
    """
    import orbax.checkpoint as ocp

    found, stored = _shapes(directory, part), model
    if part == WEIGHTS:
        # A head that is not needed is read and dropped.
        needs_head = config.generates or any(name.startswith("head.") for name in found)
        stored = build_model(replace(config.as_stored(), generates=needs_head))
        if reason := next(filter(None, (format.unrestorable(found) for format in config.formats)), ""):
            raise ModelLoadError(f"{directory} {reason}")
    wanted = {
        name_of(path): jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=stored_sharding(mesh, axes_of(v), v.shape))
        for path, v in parameters(stored)
    }
    raise_on_misfit(directory, config, {name: v.shape for name, v in wanted.items()}, found)
    # Arrays are read concurrently; without this limit orbax would hold up to 96 GB of them on the host.
    largest_gb = math.ceil(max(math.prod(v.shape) for v in wanted.values()) * 4 / 1e9)  # in the checkpoint float32, perhaps
    options = {}
    if isinstance(model, CausalLM) and model.is_stage:
        options["partial_restore"] = True
        own = (name_of(weight.path_of(part)) for weight in weights(model) for part in weight.stored_parts)
        wanted = {name: wanted[name] for name in own}
    arguments = ocp.args.PyTreeRestore(wanted, ocp.checkpoint_utils.construct_restore_args(wanted), **options)
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(restore_concurrent_gb=largest_gb + 1)) as checkpointer:
            arrays = checkpointer.restore((directory / part).absolute(), args=arguments)
    except Exception as error:  # orbax and tensorstore document no exception types
        raise ModelLoadError(f"{directory / part} is truncated or corrupt; convert it again ({error})") from error
    if progress is not None:  # all arrays are read at once
        total = sum(array.nbytes for array in arrays.values())
        progress(total, total)
    placed: dict[ParamPath, jax.Array] = {}
    for weight in weights(model):
        parts = {}
        for part, spec in weight.stored_parts.items():
            array, shape = arrays.pop(name_of(weight.path_of(part))), tuple(spec.shape)
            if array.shape != shape:
                array = convert(expand, sharding(mesh, spec.axes), array, axes=spec.axes, shape=shape)
            parts[part] = array
        placed |= weight.laid_out(parts, mesh)
    return state_of(model, placed)


def _shapes(directory: Path, part: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays, by name."""
    import orbax.checkpoint as ocp

    if not (directory / part).is_dir():
        raise ModelLoadError(f"{directory} has no {part}: it is not an orbax checkpoint of this project")
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            arrays = checkpointer.metadata((directory / part).absolute()).item_metadata.tree
        return {name: tuple(array.shape) for name, array in arrays.items()}
    except Exception as error:  # orbax documents no exception types
        raise ModelLoadError(f"{directory / part} is truncated or corrupt; convert it again ({error!r})") from error


def name_of(path: ParamPath) -> str:
    """The name of a parameter's array."""
    return ".".join(map(str, path))

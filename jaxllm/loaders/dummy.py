"""Random weights: of the right shapes for measuring speed, or as the start of a training."""

import functools
import math
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding

from jaxllm.layers.build import build_model
from jaxllm.layers.decoder import CausalLM
from jaxllm.layers.linear import Init
from jaxllm.loaders.layout import Axes, ParamPath, Progress, axes_of, expand, parameters, state_of
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.axes import MESH_AXES, sharding
from jaxllm.quantization.fp8 import narrow

STANDARD_DEVIATION = 0.02
_FP8_DEVIATION = 100.0
_EXPONENT = 120
"""Of the scales of 4-bit weights, whose values have a deviation of 2.9: 2^-7."""


def dummy_weights(
    config: ModelConfig,
    model: nnx.Module,
    mesh: Mesh,
    *,
    seed: int,
    progress: Progress | None = None,
    build: Callable[[ModelConfig], nnx.Module] = build_model,
) -> nnx.State:
    """Norm weights 1, biases 0, all others normal with deviation 0.02, made on the devices; the same for every mesh size.

    Fp8 weights too: a scale for all outputs, and values with a deviation of 100. 4-bit weights have a deviation of 0.023.

    build: makes `model` of its config. One program per distinct shape, so a model of 32 equal layers costs about ten compilations.
    """
    stored_shapes = {path: variable.shape for path, variable in parameters(build(config.as_stored()))}
    key = jax.random.key(seed)
    arrays: dict[ParamPath, Array] = {}
    total = sum(variable.size * jnp.dtype(variable.dtype).itemsize for _, variable in parameters(model))
    for path, variable in parameters(model):
        axes = axes_of(variable)
        make = _maker(
            variable.get_metadata("init"),
            stored_shapes[path],
            variable.shape,
            jnp.dtype(variable.dtype),
            axes,
            sharding(mesh, axes),
        )
        arrays[path] = make(_key_of(key, path), STANDARD_DEVIATION)
        if progress is not None:
            progress(sum(array.nbytes for array in arrays.values()), total)
    return state_of(model, arrays)


def init_params(model: CausalLM, key: Array, dtype: str = "float32") -> nnx.State:
    """The start of a training: as `dummy_weights`, with what is added to the residual stream scaled down by √(2 layers)."""
    num_layers = len(model.blocks)
    arrays = {}
    for path, variable in parameters(model):
        kind = variable.get_metadata("init")
        make = _maker(kind, variable.shape, variable.shape, jnp.dtype(dtype), axes_of(variable), None)
        residual = path[-2] in ("out", "down")
        arrays[path] = make(_key_of(key, path), STANDARD_DEVIATION / (math.sqrt(2 * num_layers) if residual else 1))
    return state_of(model, arrays)


def _key_of(key: Array, path: ParamPath) -> Array:
    """A key that depends on the parameter's name only, so that other parameters may come and go."""
    return jax.random.fold_in(key, zlib.crc32("/".join(map(str, path)).encode()))


@functools.lru_cache(maxsize=256)
def _maker(
    kind: Init, stored_shape: tuple[int, ...], shape: tuple[int, ...], dtype: jnp.dtype, axes: Axes, place: NamedSharding | None
) -> Callable[[Array, float], Array]:
    # Drawing in two dimensions compiles much faster than in four. The second begins with the one that is split over devices,
    # so that each draws its own part only.
    split = next((i for i, axis in enumerate(axes) if MESH_AXES[axis] is not None), 0)
    flat_shape = (math.prod(stored_shape[:split]), math.prod(stored_shape[split:]))

    def make(key: Array, deviation: float) -> Array:
        if kind == "words":
            values = jax.random.bits(key, flat_shape, jnp.uint16).reshape(stored_shape)
        elif kind == "exponents":
            values = jnp.full(stored_shape, _EXPONENT, jnp.uint8)
        elif kind in ("normal", "values"):
            values = jax.random.normal(key, flat_shape, jnp.float32).reshape(stored_shape)
            values = deviation * values if kind == "normal" else narrow(_FP8_DEVIATION * values)
        elif kind == "scale":
            values = jnp.full(stored_shape, deviation / _FP8_DEVIATION, jnp.float32)
        else:
            values = jnp.full(stored_shape, kind == "ones", jnp.float32)
        return expand(jnp, values.astype(dtype), axes, shape)

    return jax.jit(make, out_shardings=place)

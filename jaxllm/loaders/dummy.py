"""Random weights of the right shapes, for measuring speed."""

import functools
import math
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding

from jaxllm.layers.build import build_model
from jaxllm.layers.parameters import Axes, ParamPath, Weight, parameters, state_of, weights
from jaxllm.loaders.layout import Progress, expand
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.axes import MESH_AXES, sharding
from jaxllm.weight_format import Init, WeightFormat

STANDARD_DEVIATION = 0.02
_THREADS = 8
"""Threads that compile."""


def dummy_weights(
    config: ModelConfig,
    model: nnx.Module,
    mesh: Mesh,
    *,
    seed: int,
    progress: Progress | None = None,
    build: Callable[[ModelConfig], nnx.Module] = build_model,
) -> nnx.State:
    """Norm weights 1, biases 0, all others normal with deviation 0.02, or about that in their formats, made on the
    devices; the same for every mesh size.

    build: makes `model` of its config. One program per distinct shape of a layer, and of each other parameter, compiled at the same time:
    a model of 32 equal layers costs about four compilations and 35 calls. Each call may wait for a thread that holds the interpreter.
    """
    stored_shapes = {path: variable.shape for path, variable in parameters(build(config.as_stored()))}
    key = jax.random.key(seed)
    groups: dict[ParamPath, dict[ParamPath, _Kind]] = {}
    of_layers: dict[ParamPath, list[Weight]] = {}
    for weight in weights(model):
        layer = _layer_of(weight.path)
        of_layers.setdefault(layer, []).append(weight)
        for part, spec in weight.stored_parts.items():
            path, place = weight.path_of(part), sharding(mesh, spec.axes)
            kind = _Kind(
                spec.init, weight.format, part, stored_shapes[path], spec.shape, jnp.dtype(spec.dtype), spec.axes, place
            )
            groups.setdefault(layer, {})[path] = kind
    distinct = dict.fromkeys(tuple(group.values()) for group in groups.values())
    with ThreadPoolExecutor(_THREADS) as pool:
        compiled = dict(zip(distinct, pool.map(partial(_compiled, key), distinct), strict=True))
    arrays: dict[ParamPath, Array] = {}
    loaded, total = 0, sum(kind.num_bytes for group in groups.values() for kind in group.values())
    for layer, group in groups.items():
        numbers = np.array(list(map(_number_of, group)), np.uint32)
        made = dict(zip(group, compiled[tuple(group.values())](key, numbers), strict=True))
        for weight in of_layers[layer]:
            arrays |= weight.laid_out({part: made.pop(weight.path_of(part)) for part in weight.stored_parts}, mesh)
        loaded += sum(kind.num_bytes for kind in group.values())
        if progress is not None:
            progress(loaded, total)
    return state_of(model, arrays)


class _Kind(NamedTuple):
    """Properties of a parameter other than its name."""

    init: Init
    format: WeightFormat
    part: str
    stored_shape: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: Axes
    place: NamedSharding

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def make(self, key: Array) -> Array:
        draw = _Draw(key, self.stored_shape, self.axes)
        if self.init == "normal":
            values = self.format.dummy(self.part, draw, STANDARD_DEVIATION)
        else:
            values = draw.full(self.init == "ones", "float32")
        return expand(values.astype(self.dtype), self.axes, self.shape)


class _Draw(NamedTuple):
    """Makes an array of a stored shape."""

    key: Array
    shape: tuple[int, ...]
    axes: Axes

    def _flat_shape(self) -> tuple[int, int]:
        """Drawing in two dimensions compiles much faster than in four. The second begins with the one that is split over devices, so
        that each draws its own part only."""
        split = next((i for i, axis in enumerate(self.axes) if MESH_AXES[axis] is not None), 0)
        return math.prod(self.shape[:split]), math.prod(self.shape[split:])

    def normal(self) -> Array:
        return jax.random.normal(self.key, self._flat_shape(), jnp.float32).reshape(self.shape)

    def bits(self, dtype: str) -> Array:
        return jax.random.bits(self.key, self._flat_shape(), jnp.dtype(dtype)).reshape(self.shape)

    def full(self, value: Any, dtype: str) -> Array:
        return jnp.full(self.shape, value, dtype)


def _layer_of(path: ParamPath) -> ParamPath:
    """Path of the parameter's layer; its own path if it is in none."""
    return next((path[: i + 1] for i, part in enumerate(path) if isinstance(part, int)), path)


def _number_of(path: ParamPath) -> int:
    """A number that depends on the parameter's name only, so that other parameters may come and go."""
    return zlib.crc32("/".join(map(str, path)).encode())


@functools.lru_cache(maxsize=256)
def _maker(kinds: tuple[_Kind, ...]) -> Any:
    """Makes parameters of their numbers."""

    def make(key: Array, number_n: Array) -> tuple[Array, ...]:
        return tuple(kind.make(jax.random.fold_in(key, number_n[i])) for i, kind in enumerate(kinds))

    return jax.jit(make, out_shardings=tuple(kind.place for kind in kinds))


def _compiled(key: Array, kinds: tuple[_Kind, ...]) -> jax.stages.Compiled:
    return _maker(kinds).lower(key, np.zeros(len(kinds), np.uint32)).compile()

"""The weights of an engine's models, as the flat tuple of arrays that programs take."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxllm.loaders.layout import abstract_state
from jaxllm.runner.step import Params


class Weights:
    """The shapes of all weights, and the way between models and the flat tuple.

    Weights are flattened once: walking the module trees in each step would cost milliseconds.
    """

    def __init__(self, models: Sequence[nnx.Module], mesh: Mesh):
        flat = [jax.tree.flatten(abstract_state(model, mesh)) for model in models]
        self.structures = [structure for _, structure in flat]
        self.shapes: tuple[jax.ShapeDtypeStruct, ...] = tuple(shape for shapes, _ in flat for shape in shapes)
        self.parts: list[slice] = []
        """The place of each model's weights among all."""
        self.merges: list[Callable[[Params], Any]] = []
        """For each model: the weights of all models -> the model with its own."""
        first = 0
        for model, (shapes, structure) in zip(models, flat, strict=True):
            part = slice(first, first + len(shapes))
            self.parts.append(part)
            self.merges.append(partial(_merge, nnx.graphdef(model), structure, part))
            first = part.stop

    def flatten(self, weights: Sequence[nnx.State]) -> Params:
        """The arrays of all models, which must have the shapes and placement that the models declare."""
        leaves: list[jax.Array] = []
        for state, expected in zip(weights, self.structures, strict=True):
            arrays, structure = jax.tree.flatten(state)
            assert structure == expected, "weights of another model"  # type: ignore[operator]
            leaves += arrays
        for found, wanted in zip(leaves, self.shapes, strict=True):
            same = found.shape == wanted.shape and found.dtype == wanted.dtype
            assert same and found.sharding.is_equivalent_to(wanted.sharding, found.ndim), "a weight of another shape or place"
        return tuple(leaves)

    def put(self, arrays: Sequence[np.ndarray]) -> Params:
        """Host arrays in the order of `shapes` on the devices. Waits until they are there."""
        placed = tuple(jax.device_put(array, wanted.sharding) for array, wanted in zip(arrays, self.shapes, strict=True))
        jax.block_until_ready(placed)
        return placed


def _merge(graphdef: Any, structure: Any, part: slice, params: Params) -> Any:
    return nnx.merge(graphdef, jax.tree.unflatten(structure, params[part]))

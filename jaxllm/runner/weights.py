"""The weights of an engine's models, as the flat tuple of arrays that programs take."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxllm.config import EngineConfig
from jaxllm.layers.decoder import CausalLM
from jaxllm.layers.parameters import abstract_state
from jaxllm.loaders.load import load_weights
from jaxllm.model_config import ModelConfig
from jaxllm.progress import Progress, bytes_loaded
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.row_arrays import Params


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

    def place(self, parts: "HostCopies") -> Params:
        """The arrays that `host_copies` copied, on the devices. Waits until they are there."""
        placed = tuple(
            jax.make_array_from_callback(wanted.shape, wanted.sharding, partial(_part, copies))
            for copies, wanted in zip(parts, self.shapes, strict=True)
        )
        jax.block_until_ready(placed)
        return placed


HostCopies = list[dict[tuple[int, ...], np.ndarray]]
"""For each array, the parts on this process's devices by their first index in it, each part once."""


def host_copies(arrays: Params) -> HostCopies:
    """Copy arrays to the host."""
    return [{_corner(shard.index): np.array(shard.data) for shard in _distinct(array)} for array in arrays]


def _distinct(array: jax.Array) -> list[Any]:
    """One of the shards of each part."""
    return list({_corner(shard.index): shard for shard in array.addressable_shards}.values())


def _part(copies: dict[tuple[int, ...], np.ndarray], index: tuple[slice, ...]) -> np.ndarray:
    return copies[_corner(index)]


def _corner(index: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(part.start or 0 for part in index)


class WithWeights(Protocol):
    """A part of an engine that has weights: a drafter, adapters, tables of experts that move."""

    @property
    def model(self) -> nnx.Module | None:
        """Its weights, as shapes with logical axes; None without."""

    def load(self, mesh: Mesh, progress: Progress) -> nnx.State:
        """The values of `model`, on the devices. Raises ModelLoadError."""


@dataclass(frozen=True)
class WeightsSource:
    """Where an engine's weights come from."""

    config: EngineConfig
    model_config: ModelConfig
    model: CausalLM
    mesh: Mesh
    beside: Mapping[str, WithWeights | None]
    """Parts that have weights in addition to the model, by name; None: a part that the engine lacks."""

    @property
    def named_models(self) -> dict[str, nnx.Module]:
        """All that has weights, in the order of `read`: "model", and `beside`."""
        beside = ((name, part.model) for name, part in self.beside.items() if part is not None)
        return {"model": self.model, **{name: model for name, model in beside if model is not None}}

    @property
    def models(self) -> list[nnx.Module]:
        """See `named_models`."""
        return list(self.named_models.values())

    def read(self, model_dir: Path, progress: Progress) -> list[nnx.State]:
        """The weights of each model, on the devices. Raises ModelLoadError."""
        options = self.config.model
        model = load_weights(
            self.model_config,
            self.model,
            model_dir,
            load_format=options.load_format,
            mesh=self.mesh,
            seed=options.seed or 0,
            progress=bytes_loaded(progress),
        )
        beside = (part for part in self.beside.values() if part is not None and part.model is not None)
        weights = [model, *(part.load(self.mesh, progress) for part in beside)]
        jax.block_until_ready(weights)
        progress.finish()
        return weights


def merge_for(kernels: Kernels, merge: Callable[[Params], CausalLM], params: Params) -> CausalLM:
    """The model that `merge` makes of weights, whose head computes with these kernels."""
    model = merge(params)
    if model.head is not None:
        model.head.multiply = kernels.multiply
    return model


def _merge(graphdef: Any, structure: Any, part: slice, params: Params) -> Any:
    return nnx.merge(graphdef, jax.tree.unflatten(structure, params[part]))

"""Training of drafters of the demo model on the target's distributions: an EAGLE-3 head and a small draft model."""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxllm.layers.build import build_model
from jaxllm.layers.dense_attention import dense_step
from jaxllm.model_config import ModelConfig
from scripts.demo_data.initial_weights import init_params

from . import eagle3
from .eagle3 import Eagle3Sizes
from .packing import TRAINED
from .training import Batches, Recipe, Training, make_optimizer, unpack

DEPTH_DECAY = 0.8
"""Ratio of the weight of a draft to that of the draft before it (arXiv:2503.01840)."""


@dataclass(frozen=True)
class Reading:
    """A packed row and what the target makes of it."""

    ids_T: Array
    positions_T: Array
    segment_T: Array
    embedded_TD: Array
    features_TF: Array
    """Inputs of the layers that the head reads, joined."""
    logits_TV: Array
    """Logits of the token after each."""


def read(target: Any, feature_layers: tuple[int, ...], ids_T: Array, positions_T: Array, segment_T: Array) -> Reading:
    """Run the target over a row."""
    step = dense_step(ids_T, positions_T, segment_T)
    runs, features = target.embed(step), []
    ends = (*feature_layers, len(target.blocks))
    for start, end in zip((0, *feature_layers), ends, strict=True):
        runs = target.run(runs, step, range(start, end))
        features.append(runs[0][0])
    features_TF = jnp.concatenate(features[:-1], axis=1)
    return Reading(ids_T, positions_T, segment_T, target.embedding(ids_T), features_TF, target.logits(runs[0][1]))


class DrafterTraining(Protocol):
    """A drafter that can be trained. `logits` is a list with a float32 array [T, columns] for each draft in a row."""

    name: str
    columns: np.ndarray | None
    """The target's token ids of its columns; None: all."""

    def init(self, seed: int) -> Any:
        """Float32 parameters."""

    def logits(self, params: Any, reading: Reading, depth: int) -> list[Array]:
        """Draft j of position t is of the token at t + 2 + j; what comes before it are the row's own tokens."""


class Eagle3Training:
    """The head, drafting from its own output after the first draft."""

    name = "eagle3"

    def __init__(self, sizes: Eagle3Sizes, columns: np.ndarray, embedding_VD: Array):
        self.sizes, self.columns, self._embedding_VD = sizes, columns, embedding_VD

    def init(self, seed: int) -> eagle3.Params:
        return eagle3.init_params(self.sizes, self._embedding_VD[self.columns], jax.random.key(seed))

    def logits(self, params: eagle3.Params, reading: Reading, depth: int) -> list[Array]:
        positions_T, segment_T = reading.positions_T, reading.segment_T
        visible_TS = (positions_T[:, None] >= positions_T) & (segment_T[:, None] == segment_T)
        return eagle3.unrolled(params, self.sizes, reading.features_TF, reading.embedded_TD, positions_T, visible_TS, depth)


class DraftModelTraining:
    """A separate model: a draft differs from the next one only in its position."""

    name, columns = "draft", None

    def __init__(self, config: ModelConfig):
        self.config = config
        self.graph, _ = nnx.split(build_model(config))

    def init(self, seed: int) -> nnx.State:
        return init_params(build_model(self.config), jax.random.key(seed))

    def logits(self, params: nnx.State, reading: Reading, depth: int) -> list[Array]:
        model = nnx.merge(self.graph, params)
        logits_TV = model.logits(model(dense_step(reading.ids_T, reading.positions_T, reading.segment_T)))
        return [jnp.roll(logits_TV, -1 - draft, axis=0) for draft in range(depth)]


def row_measures(drafter: DrafterTraining, params: Any, reading: Reading, wanted_T: Array, depth: int) -> Array:
    """Float32 [3, depth] of each draft in a row: summed cross entropy, how often it is the target's likeliest token, and count.

    wanted_T: which tokens should be drafted. Of a row's probability the part outside of the drafter's columns is left out.
    """
    likeliest_T = jnp.argmax(reading.logits_TV, axis=1)
    probs_TV = jax.nn.softmax(reading.logits_TV)
    if drafter.columns is not None:
        probs_TV = probs_TV[:, drafter.columns]
    measures = []
    for draft, logits_TV in enumerate(drafter.logits(params, reading, depth)):
        ahead = 2 + draft
        here, there = slice(None, -ahead), slice(ahead - 1, -1)
        wanted = wanted_T[ahead:] & (reading.segment_T[here] == reading.segment_T[ahead:])
        losses = -jnp.sum(probs_TV[there] * jax.nn.log_softmax(logits_TV[here]), axis=1)
        best = jnp.argmax(logits_TV[here], axis=1)
        best = best if drafter.columns is None else jnp.asarray(drafter.columns)[best]
        agrees = best == likeliest_T[there]
        measures.append(jnp.stack([jnp.sum(jnp.where(wanted, x, 0.0)) for x in (losses, agrees, jnp.ones_like(losses))]))
    return jnp.stack(measures, axis=1)


class Distilling(Training):
    """Trains drafters side by side on the same readings of the target. Its state: {"target": …, "drafters": {name: …}}."""

    def __init__(
        self,
        target_config: ModelConfig,
        target: nnx.State,
        feature_layers: tuple[int, ...],
        drafters: list[DrafterTraining],
        recipe: Recipe,
        depth: int,
        seed: int,
    ):
        self.measures = tuple(
            f"{drafter.name} {measure}" for drafter in drafters for measure in ("loss", "agrees first", "agrees last")
        )
        graph, _ = nnx.split(build_model(target_config))
        params = {drafter.name: drafter.init(seed) for drafter in drafters}
        optimizer = make_optimizer(recipe)
        moments = {name: optimizer.init(values) for name, values in params.items()}

        def losses(params: Any, target_state: nnx.State, batches: Batches) -> tuple[Array, Array]:
            target = nnx.merge(graph, target_state)

            def row(tokens_T: Array) -> list[Array]:
                ids_T, positions_T, segment_T, _ = unpack(tokens_T)
                reading = read(target, feature_layers, ids_T, positions_T, segment_T)
                wanted_T = (tokens_T & TRAINED) != 0
                return [
                    row_measures(drafter, params[drafter.name], reading, wanted_T, _depth(drafter, depth))
                    for drafter in drafters
                ]

            short, long, text = batches
            parts = [jax.vmap(row)(short), jax.vmap(row)(jnp.concatenate([long, text]))]
            total, means = jnp.float32(0), []
            for of_drafter in zip(*parts, strict=True):
                loss, agrees, count = sum(jnp.sum(part, axis=0) for part in of_drafter)
                count = jnp.maximum(count, 1)
                weights = DEPTH_DECAY ** np.arange(len(loss))
                total += jnp.sum(loss / count * weights) / weights.sum()
                means += [loss[0] / count[0], agrees[0] / count[0], agrees[-1] / count[-1]]
            return total, jnp.stack(means)

        def step(state: Any, moments: Any, rate: Array, batches: Batches) -> tuple:
            params = state["drafters"]
            (_, means), gradients = jax.value_and_grad(losses, has_aux=True)(params, state["target"], batches)
            new_params, new_moments = {}, {}
            for name, values in params.items():
                updates, new_moments[name] = optimizer.update(gradients[name], moments[name], values)
                new_params[name] = jax.tree.map(lambda leaf, update: leaf - rate * update, values, updates)
            return {"target": state["target"], "drafters": new_params}, new_moments, means

        # A copy, because the step takes its state's memory over.
        state = {"target": jax.tree.map(jnp.copy, target), "drafters": params}
        super().__init__(recipe, seed, state, moments, step)


def _depth(drafter: DrafterTraining, depth: int) -> int:
    """In a training row a draft model's later drafts are its first ones of later positions."""
    return depth if drafter.columns is not None else 1

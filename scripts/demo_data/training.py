"""The loop of a training, AdamW in float32 for a given time, and the step of the demo model, which computes in bfloat16."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from jaxllm.layers.build import build_model
from jaxllm.layers.dense_attention import dense_step
from jaxllm.layers.step import Adapt
from jaxllm.model_config import ModelConfig
from scripts.demo_data.initial_weights import init_params

from .packing import STARTS, TOKEN_MASK, TRAINED

Batches = tuple[Array, Array, Array]
"""Short rows, long rows, text."""


@dataclass(frozen=True)
class Recipe:
    """The composition of a step, and the learning rate."""

    short_rows: int
    long_rows: int
    text_rows: int
    short_length: int
    long_length: int
    peak_rate: float
    warmup_steps: int = 200
    constant_until: float = 0.55
    """Share of the time after which the rate falls, linearly, to zero."""
    weight_decay: float = 0.1
    max_gradient_norm: float = 1.0

    @property
    def tokens_per_step(self) -> int:
        """Padding included."""
        return sum(rows * length for rows, length in self.batch_shapes)

    @property
    def batch_shapes(self) -> tuple[tuple[int, int], ...]:
        """Short rows, long rows, text."""
        long = self.long_length
        return (self.short_rows, self.short_length), (self.long_rows, long), (self.text_rows, long)

    def rate(self, step: int, progress: float) -> float:
        """The learning rate at a step, `progress` (0 to 1) of the time gone."""
        falling = min(1.0, max(0.0, (1.0 - progress) / (1.0 - self.constant_until)))
        return self.peak_rate * min(1.0, (step + 1) / self.warmup_steps) * falling


def unpack(tokens_T: Array) -> tuple[Array, Array, Array, Array]:
    """Token ids of a packed row, their positions and segments, and whether a token starts a segment."""
    starts_T = (tokens_T & STARTS) != 0
    places_T = jnp.arange(tokens_T.shape[0])
    positions_T = places_T - jax.lax.cummax(jnp.where(starts_T, places_T, 0))
    return (tokens_T & TOKEN_MASK).astype(jnp.int32), positions_T, jnp.cumsum(starts_T), starts_T


def row_losses(model: nnx.Module, tokens_T: Array, adapt: Adapt | None = None) -> tuple[Array, Array]:
    """Summed cross entropy of the trained tokens of a packed row, and how many they are."""
    ids_T, positions_T, segment_T, starts_T = unpack(tokens_T)
    hidden_TD = model(replace(dense_step(ids_T, positions_T, segment_T), adapt=adapt))
    logits_TV = model.logits(hidden_TD[:-1])
    wanted_T = (((tokens_T & TRAINED) != 0) & ~starts_T)[1:]
    # Picked by comparing, not by indexing: the gradient of an index is a scatter, which a GPU does slowly.
    is_next_TV = jnp.arange(logits_TV.shape[1]) == ids_T[1:, None]
    losses_T = jax.nn.logsumexp(logits_TV, axis=1) - jnp.sum(jnp.where(is_next_TV, logits_TV, 0.0), axis=1)
    return jnp.sum(jnp.where(wanted_T, losses_T, 0.0)), jnp.sum(wanted_T)


def mean_losses(model: nnx.Module, batches: Batches, adapt: Adapt | None = None) -> tuple[Array, Array]:
    """Mean loss of all trained tokens, and of those of dialogues and of text."""
    short, long, text = batches
    sums_short, counts_short = jax.vmap(lambda row: row_losses(model, row, adapt))(short)
    sums_long, counts_long = jax.vmap(lambda row: row_losses(model, row, adapt))(jnp.concatenate([long, text]))
    is_text = jnp.arange(counts_long.shape[0]) >= long.shape[0]
    text_sum, text_count = jnp.sum(sums_long * is_text), jnp.sum(counts_long * is_text)
    chat_sum = jnp.sum(sums_short) + jnp.sum(sums_long) - text_sum
    chat_count = jnp.sum(counts_short) + jnp.sum(counts_long) - text_count
    means = jnp.stack([chat_sum / jnp.maximum(chat_count, 1), text_sum / jnp.maximum(text_count, 1)])
    return (chat_sum + text_sum) / jnp.maximum(chat_count + text_count, 1), means


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW without its learning rate, which the step applies."""
    return optax.chain(
        optax.clip_by_global_norm(recipe.max_gradient_norm),
        optax.scale_by_adam(b1=0.9, b2=0.98),
        optax.add_decayed_weights(recipe.weight_decay, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)),
    )


def make_step(graph: nnx.GraphDef, optimizer: optax.GradientTransformation) -> Callable[..., tuple]:
    """(state, moments, rate, batches) -> (state, moments, mean losses of dialogues and of text)."""

    def loss(state: nnx.State, batches: Batches) -> tuple[Array, Array]:
        return mean_losses(nnx.merge(graph, state), batches)

    def step(state: nnx.State, moments: optax.OptState, rate: Array, batches: Batches) -> tuple:
        (_, means), gradients = jax.value_and_grad(loss, has_aux=True)(state, batches)
        updates, moments = optimizer.update(gradients, moments, state)
        return jax.tree.map(lambda leaf, update: leaf - rate * update, state, updates), moments, means

    return step


class Training:
    """Values that are trained, the optimizer's state and the compiled step."""

    measures: tuple[str, ...] = ()
    """Names of what a step measures."""

    def __init__(self, recipe: Recipe, seed: int, state: Any, moments: Any, step: Callable[..., tuple]):
        """step: (state, moments, rate, batches) -> (state, moments, measures)."""
        self.recipe = recipe
        self.seed = seed
        self.state = state
        self._moments = moments
        batches = tuple(jax.ShapeDtypeStruct(shape, jnp.uint16) for shape in recipe.batch_shapes)
        rate = jax.ShapeDtypeStruct((), jnp.float32)
        self._step = jax.jit(step, donate_argnums=(0, 1)).lower(state, moments, rate, batches).compile()
        self._fetch = jax.jit(self._fetch_batch)

    @property
    def num_parameters(self) -> int:
        """Tied ones count once."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.state))

    def _fetch_batch(self, data: Batches, step: Array) -> Batches:
        """Rows drawn at random, and windows of the text."""
        recipe = self.recipe
        short, long, text = data
        keys = jax.random.split(jax.random.fold_in(jax.random.key(self.seed), step), 3)
        rows = jax.random.randint(keys[0], (recipe.short_rows,), 0, short.shape[0])
        long_rows = jax.random.randint(keys[1], (recipe.long_rows,), 0, long.shape[0])
        begins = jax.random.randint(keys[2], (recipe.text_rows, 1), 0, text.shape[0] - recipe.long_length)
        return short[rows], long[long_rows], text[begins + jnp.arange(recipe.long_length)]

    def train(
        self,
        data: tuple[np.ndarray, np.ndarray, np.ndarray],
        deadline: float,
        *,
        max_steps: int | None,
        report: Callable[[str], None],
        test: Callable[[], str],
        tests: Sequence[float] = (0.25, 0.5, 0.75),
        log_every: int = 200,
    ) -> None:
        """Train until the deadline (of `time.monotonic`) or for `max_steps`. Reports the results of `test` at these shares of it."""
        on_device = tuple(jax.device_put(part) for part in data)
        begin = time.monotonic()
        in_flight: deque[Array] = deque()
        recent: list[np.ndarray] = []
        tests_left = list(tests)
        step, last_log = 0, begin
        while True:
            now = time.monotonic()
            progress = (now - begin) / max(deadline - begin, 1e-9) if max_steps is None else step / max_steps
            if progress >= 1.0:
                break
            batches = self._fetch(on_device, jnp.uint32(step))
            rate = jnp.float32(self.recipe.rate(step, progress))
            self.state, self._moments, losses = self._step(self.state, self._moments, rate, batches)
            in_flight.append(losses)
            step += 1
            if len(in_flight) > 8:  # keeps the host's clock close to the device's without waiting for the newest step
                recent.append(np.asarray(in_flight.popleft()))
            if step % log_every == 0 and recent:
                means = np.mean(recent, axis=0)
                if not np.all(np.isfinite(means)):
                    raise RuntimeError(f"the loss is not finite at step {step}; lower --rate")
                speed = log_every * self.recipe.tokens_per_step / (time.monotonic() - last_log)
                report(
                    f"step {step:>6}  {100 * progress:5.1f} %  rate {float(rate):.5f}  "
                    + "".join(f"{name} {mean:.4f}  " for name, mean in zip(self.measures, means, strict=True))
                    + f"{speed / 1e6:.2f} M tokens/s"
                )
                recent.clear()
                last_log = time.monotonic()
            if tests_left and progress > tests_left[0]:
                tests_left.pop(0)
                report(test())
                last_log = time.monotonic()
        if step == 0:
            raise RuntimeError("no time was left to train; raise --minutes")
        jax.block_until_ready(self.state)
        report(
            f"trained {step} steps, {step * self.recipe.tokens_per_step / 1e6:.0f} M tokens in {time.monotonic() - begin:.0f} s"
        )


class Trainer(Training):
    """The training of the demo model."""

    measures = ("chat loss", "text loss")

    def __init__(self, config: ModelConfig, recipe: Recipe, seed: int):
        model = build_model(config)
        graph, _ = nnx.split(model)
        state = init_params(model, jax.random.key(seed))
        optimizer = make_optimizer(recipe)
        super().__init__(recipe, seed, state, optimizer.init(state), make_step(graph, optimizer))

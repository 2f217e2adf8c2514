"""The training of the model: float32 weights, a step in bfloat16, for a given time."""

import math
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..packing import STARTS, TOKEN_MASK, TRAINED
from .model import Weights, encode_pictures, logits, text_hidden
from .model_files import Sizes
from .optimizer import Moments, init_moments, update
from .rows import Batch, BatchShape
from .workers import Workers

_KEPT = 48
"""Batches that stay on the device, to be trained on again when no new one has come."""
_READY = 4
"""New batches on the device that wait for their turn."""
_IN_FLIGHT = 4
"""Steps that are dispatched before the host waits for one."""


@dataclass(frozen=True)
class Recipe:
    """Learning rate and length."""

    peak_rate: float = 0.003
    warmup_steps: int = 200
    last_rate: float = 0.01
    """Share of the peak that is left at the end of the cosine."""

    def rate(self, step: int, progress: float) -> float:
        """The learning rate at a step, `progress` (0 to 1) of the time gone."""
        cosine = self.last_rate + (1 - self.last_rate) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.peak_rate * min(1.0, (step + 1) / self.warmup_steps) * cosine


class Measures(NamedTuple):
    """Of one step."""

    loss: Array
    accuracy: Array
    """Share of the trained tokens that were the likeliest."""


def batch_loss(weights: Weights, sizes: Sizes, batch: Batch, dtype: str = "bfloat16") -> tuple[Array, Measures]:
    """Mean cross entropy of the trained tokens."""
    cast = {name: value.astype(dtype) for name, value in weights.items()}
    tokens_RT = batch.tokens_RT
    ids_RT = (tokens_RT & TOKEN_MASK).astype(jnp.int32)
    starts_RT = (tokens_RT & STARTS) != 0
    segment_RT = jnp.cumsum(starts_RT, axis=1)
    pictures = encode_pictures(cast, sizes, batch.patches_VPC, batch.places_VP4, batch.segment_VP)
    hidden = text_hidden(cast, sizes, ids_RT, batch.positions_R3T, segment_RT, batch.source_RT, pictures)
    scores_RTV = logits(cast, hidden)
    next_RT = jnp.roll(ids_RT, -1, axis=1)
    wanted_RT = jnp.roll(
        ((tokens_RT & TRAINED) != 0) & ~starts_RT, -1, axis=1
    )  # the first token of a row always starts a document
    # Picked by comparing, not by indexing: the gradient of an index is a scatter, which a GPU does slowly.
    is_next = jnp.arange(sizes.vocab_size) == next_RT[..., None]
    losses = jax.nn.logsumexp(scores_RTV, axis=-1) - jnp.sum(jnp.where(is_next, scores_RTV, 0.0), axis=-1)
    count = jnp.maximum(jnp.sum(wanted_RT), 1)
    loss = jnp.sum(jnp.where(wanted_RT, losses, 0.0)) / count
    right = jnp.sum(wanted_RT & (jnp.argmax(scores_RTV, axis=-1) == next_RT))
    return loss, Measures(loss, right / count)


def train_step(
    sizes: Sizes, dtype: str, weights: Weights, moments: Moments, rate: Array, batch: Batch
) -> tuple[Weights, Moments, Measures]:
    """Weights and moments after a step."""
    gradients, measures = jax.grad(batch_loss, has_aux=True)(weights, sizes, batch, dtype)
    return *update(weights, moments, gradients, rate), measures


class Trainer:
    """Weights in training and the compiled step."""

    def __init__(self, sizes: Sizes, shape: BatchShape, recipe: Recipe, weights: Weights, dtype: str = "bfloat16"):
        self.sizes = sizes
        self.recipe = recipe
        self.weights = weights
        self._moments = init_moments(weights)
        batch = Batch(*(jax.ShapeDtypeStruct(*array) for array in shape.arrays))

        def step(weights: Weights, moments: Moments, rate: Array, batch: Batch) -> tuple[Weights, Moments, Measures]:
            return train_step(sizes, dtype, weights, moments, rate, batch)

        rate = jax.ShapeDtypeStruct((), jnp.float32)
        self._step = jax.jit(step, donate_argnums=(0, 1)).lower(weights, self._moments, rate, batch).compile()

    @property
    def num_parameters(self) -> int:
        """Tied ones count once."""
        return sum(value.size for value in self.weights.values())

    @property
    def temporary_bytes(self) -> int:
        """Memory that a step takes beside weights and batch."""
        analysis = self._step.memory_analysis()
        return 0 if analysis is None else analysis.temp_size_in_bytes

    def train(
        self,
        workers: Workers,
        deadline: float,
        *,
        max_steps: int | None,
        report: Callable[[str], None],
        checkpoint: Callable[[], None],
        log_seconds: float = 10.0,
        checkpoint_seconds: float = 120.0,
    ) -> None:
        """Trains until the deadline (of `time.monotonic`) or for `max_steps`.

        A batch that was trained on is kept for a while: when the workers have none ready, one of those is taken again.
        """
        begin = last_log = last_checkpoint = time.monotonic()
        kept: deque[Batch] = deque(maxlen=_KEPT)
        in_flight: deque[Measures] = deque()
        recent: list[Measures] = []
        rng = random.Random(0)
        step = logged_step = repeated = 0
        with _feeding(workers) as ready:
            while True:
                now = time.monotonic()
                progress = (now - begin) / max(deadline - begin, 1e-9)
                if max_steps is not None:
                    progress = max(progress, step / max_steps)
                if progress >= 1.0:
                    break
                try:
                    taken = ready.get(block=not kept, timeout=60)
                except queue.Empty:
                    if not kept:
                        raise RuntimeError("no batch came within a minute; raise --processes") from None
                    batch = kept[rng.randrange(len(kept))]
                    repeated += 1
                else:
                    if isinstance(taken, Exception):
                        raise taken
                    batch = taken
                    kept.append(batch)
                rate = self.recipe.rate(step, progress)
                self.weights, self._moments, measures = self._step(self.weights, self._moments, jnp.float32(rate), batch)
                in_flight.append(measures)
                step += 1
                if (
                    len(in_flight) > _IN_FLIGHT
                ):  # keeps the host's clock close to the device's without waiting for the newest step
                    recent.append(jax.device_get(in_flight.popleft()))
                now = time.monotonic()
                if recent and now - last_log >= log_seconds:
                    loss, accuracy = np.mean(recent, axis=0)
                    if not math.isfinite(loss):
                        raise RuntimeError(f"the loss is not finite at step {step}; lower --rate")
                    report(
                        f"step {step:>6}  {100 * progress:5.1f} %  rate {rate:.5f}  loss {loss:.4f}  "
                        f"tokens right {100 * accuracy:.1f} %  {(step - logged_step) / (now - last_log):.2f} steps/s  "
                        f"repeated {100 * repeated / step:.0f} %"
                    )
                    recent.clear()
                    last_log, logged_step = now, step
                if now - last_checkpoint >= checkpoint_seconds:
                    checkpoint()
                    last_checkpoint = now
        if step == 0:
            raise RuntimeError("no time was left to train; raise --seconds")
        jax.block_until_ready(self.weights)
        tokens, patches = workers.filled
        report(
            f"trained {step} steps in {time.monotonic() - begin:.0f} s on {workers.num_taken} batches, "
            f"{100 * tokens:.0f} % full of tokens and {100 * patches:.0f} % of patches"
        )


@contextmanager
def _feeding(workers: Workers) -> Iterator["queue.Queue[Batch | Exception]"]:
    """A queue into which a thread puts batches that are on the device, or the error that ended it."""
    ready: queue.Queue[Batch | Exception] = queue.Queue(_READY)
    stop = threading.Event()

    def feed() -> None:
        try:
            while not stop.is_set():
                taken = workers.take(timeout=0.5)
                if taken is not None:
                    ready.put(jax.device_put(taken))
        except Exception as error:
            ready.put(error)

    thread = threading.Thread(target=feed, daemon=True)
    thread.start()
    try:
        yield ready
    finally:
        stop.set()
        while thread.is_alive():  # it may wait for room
            with suppress(queue.Empty):
                ready.get_nowait()
            thread.join(0.1)

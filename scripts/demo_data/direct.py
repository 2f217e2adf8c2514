"""Answers and likelihoods from the plain model in JAX, without the engine: to test a model right after training."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxllm.layers.attend import Projection
from jaxllm.layers.build import build_model
from jaxllm.layers.dense_attention import dense_attend, dense_step
from jaxllm.layers.linear import precision_of
from jaxllm.layers.step import Step
from jaxllm.model_config import ModelConfig

PROMPT_BUCKETS = (128, 512, 1024)


class DirectModel:
    """A model with its values, computing in the type that its config names."""

    def __init__(self, config: ModelConfig, state: nnx.State):
        self.state = jax.tree.map(
            lambda leaf: leaf.astype(config.dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, state
        )
        graph, _ = nnx.split(build_model(config))
        self._generate = jax.jit(partial(_generate, config, graph), static_argnames="max_new")
        self._log_likelihood = jax.jit(partial(_log_likelihood, graph))

    def answer(
        self, prompts: Sequence[Sequence[int]], stop_ids: Sequence[int], max_new: int, batch: int = 128
    ) -> list[list[int]]:
        """The greedy continuation of each prompt up to a stop id, which is left out, or `max_new` tokens."""
        answers = self.generate(prompts, stop_ids, max_new, batch)
        return [answer[:-1] if answer and answer[-1] in stop_ids else answer for answer in answers]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        stop_ids: Sequence[int],
        max_new: int,
        batch: int = 128,
        temperature: float = 0.0,
    ) -> list[list[int]]:
        """The continuation of each prompt up to and with a stop id, or `max_new` tokens, drawn with the noise of `draw_noise`."""
        answers: list[list[int]] = [[] for _ in prompts]
        for lower, upper in zip((0, *PROMPT_BUCKETS), PROMPT_BUCKETS, strict=False):
            places = [place for place, prompt in enumerate(prompts) if lower < len(prompt) <= upper]
            for at in range(0, len(places), batch):
                some = places[at : at + batch]
                token_ids = np.zeros((batch, upper), np.int32)
                lengths = np.ones(batch, np.int32)
                for row, place in enumerate(some):
                    lengths[row] = len(prompts[place])
                    token_ids[row, : lengths[row]] = prompts[place]
                stops = np.array(stop_ids, np.int32)
                seeds = np.resize(np.array(some, np.int32), batch)
                inputs = (token_ids, lengths, len(some), stops, seeds, np.float32(temperature))
                out = np.asarray(self._generate(self.state, *inputs, max_new=max_new))
                for row, place in enumerate(some):
                    ended = np.flatnonzero(np.isin(out[row], stops))
                    answers[place] = out[row, : ended[0] + 1 if len(ended) else max_new].tolist()
        return answers

    def log_likelihood(self, windows: Sequence[Sequence[int]], batch: int = 16) -> float:
        """Summed natural logarithms of the probabilities of all tokens but the first of each window."""
        width = max(map(len, windows))
        total = 0.0
        for at in range(0, len(windows), batch):
            token_ids = np.full((batch, width), -1, np.int32)
            for row, window in enumerate(windows[at : at + batch]):
                token_ids[row, : len(window)] = window
            total += float(self._log_likelihood(self.state, token_ids))
        return total


def draw_noise(seed: Array, position: Array, num_tokens: int) -> Array:
    """Float32 [V], Gumbel: the token drawn for a position is the argmax of logits + temperature * noise."""
    return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (num_tokens,))


def _log_likelihood(graph: nnx.GraphDef, state: nnx.State, token_ids_RT: Array) -> Array:
    """Padding is -1."""
    model = nnx.merge(graph, state)
    positions_T = jnp.arange(token_ids_RT.shape[1])

    def row(token_ids_T: Array) -> Array:
        hidden_TD = model(dense_step(jnp.maximum(token_ids_T, 0), positions_T))
        logprobs_TV = jax.nn.log_softmax(model.logits(hidden_TD))
        picked_T = jnp.take_along_axis(logprobs_TV[:-1], jnp.maximum(token_ids_T[1:, None], 0), axis=1)[:, 0]
        return jnp.sum(jnp.where(token_ids_T[1:] >= 0, picked_T, 0.0))

    return jnp.sum(jax.vmap(row)(token_ids_RT))


def _generate(
    config: ModelConfig,
    graph: nnx.GraphDef,
    state: nnx.State,
    token_ids_RT: Array,
    length_R: Array,
    num_rows: Array,
    stop_ids: Array,
    seed_R: Array,
    temperature: Array,
    *,
    max_new: int,
) -> Array:
    """Continuations [R, max_new] of padded prompts; rows past num_rows are idle. After a stop id comes anything."""
    model = nnx.merge(graph, state)
    R, T = token_ids_RT.shape
    positions_T = jnp.arange(T)
    precision = precision_of(jnp.dtype(config.dtype))

    def draw(hidden_D: Array, seed: Array, position: Array) -> Array:
        logits_V = model.logits(hidden_D[None])[0]
        return jnp.argmax(logits_V + temperature * draw_noise(seed, position, len(logits_V)))

    def prefill(token_ids_T: Array, length: Array, seed: Array) -> tuple[Array, list[Array], list[Array]]:
        keys: list[Array] = []
        values: list[Array] = []
        causal = dense_attend(positions_T)

        def attend(layer: int, projection: Projection, **options: Any) -> Array:
            _, k_TKH, v_TKH = projection.finished()
            room = ((0, max_new), (0, 0), (0, 0))
            keys.append(jnp.pad(k_TKH, room))
            values.append(jnp.pad(v_TKH, room))
            return causal(layer, projection, **options)

        hidden_TD = model(Step(token_ids_T, positions_T, attend))
        return draw(hidden_TD[length - 1], seed, length), keys, values

    def decode(
        token: Array, position: Array, seed: Array, keys: list[Array], values: list[Array]
    ) -> tuple[Array, list[Array], list[Array]]:
        keys, values = list(keys), list(values)

        def attend(layer: int, projection: Projection, *, scale: float, **options: Any) -> Array:
            assert not any(option is not None for option in options.values()), "the demo model has none of these"
            q_TKGH, k_TKH, v_TKH = projection.finished()
            keys[layer] = jax.lax.dynamic_update_slice_in_dim(keys[layer], k_TKH, position, 0)
            values[layer] = jax.lax.dynamic_update_slice_in_dim(values[layer], v_TKH, position, 0)
            scores = scale * jnp.einsum(
                "tkgh,skh->kgts", q_TKGH, keys[layer], precision=precision, preferred_element_type=jnp.float32
            )
            seen = jnp.arange(T + max_new) <= position
            weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(v_TKH.dtype)
            return jnp.einsum("kgts,skh->tkgh", weights, values[layer], precision=precision)

        hidden_TD = model(Step(token[None], position[None], attend))
        return draw(hidden_TD[0], seed, position + 1), keys, values

    def step(carry: tuple) -> tuple:
        step_index, token_R, done_R, keys, values, out = carry
        out = out.at[:, step_index].set(token_R)
        done_R |= jnp.isin(token_R, stop_ids)
        token_R, keys, values = jax.vmap(decode)(token_R, length_R + step_index, seed_R, keys, values)
        return step_index + 1, token_R, done_R, keys, values, out

    token_R, keys, values = jax.vmap(prefill)(token_ids_RT, length_R, seed_R)
    idle_R = jnp.arange(R) >= num_rows
    start = (jnp.int32(0), token_R, idle_R, keys, values, jnp.zeros((R, max_new), token_R.dtype))
    return jax.lax.while_loop(lambda carry: (carry[0] < max_new) & ~jnp.all(carry[2]), step, start)[-1]

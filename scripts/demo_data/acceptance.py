"""How many tokens a step of the target gives with drafts, on what the target itself generates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxllm.layers.build import build_model
from jaxllm.model_config import ModelConfig

from .direct import DirectModel, draw_noise
from .distilling import DrafterTraining, read

WIDTHS = (256, 512, 1152)
"""Texts are padded to the next of these lengths."""


@dataclass(frozen=True)
class Generated:
    """Prompts with what the target generated from them at a temperature."""

    texts: tuple[Sequence[int], ...]
    prompt_lengths: tuple[int, ...]
    temperature: float


def tokens_per_step(accepted: Sequence[int], num_prompt: int, num_tokens: int, num_drafts: int) -> tuple[int, int]:
    """Tokens and steps of a generation, the prompt's step with its token left out.

    accepted: for each position, how many of the drafts that begin there are the target's own tokens. A step's last known token
    stands one place after the position of its drafts; tokens past the end are not counted.
    """
    at, steps = num_prompt, 0
    while at < num_tokens - 1:
        at += 1 + min(accepted[at - 1], num_drafts, num_tokens - 2 - at)
        steps += 1
    return num_tokens - 1 - num_prompt, steps


class AcceptanceTest:
    """Drafts that drafters would have made in texts that the target generates.

    A draft counts only if all drafts before it in its step are the target's tokens: so each is computed from these, and drawn with
    the noise that the target's token was drawn with. No step is simulated, yet the counts are those of an engine's steps.
    """

    def __init__(self, config: ModelConfig, target: nnx.State, feature_layers: tuple[int, ...], depth: int, batch: int):
        """depth: the most drafts in a step. batch: texts that are computed at once."""
        self._direct = DirectModel(config, target)
        self._graph, _ = nnx.split(build_model(config))
        self._feature_layers, self._depth, self._batch = feature_layers, depth, batch
        self._programs: dict[DrafterTraining, Any] = {}

    def generate(
        self, prompts: Sequence[Sequence[int]], stop_ids: Sequence[int], max_new: int, temperature: float
    ) -> Generated:
        """Texts of the target, to measure drafters on."""
        outputs = self._direct.generate(prompts, stop_ids, max_new, self._batch, temperature)
        texts = tuple([*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True))
        return Generated(texts, tuple(map(len, prompts)), temperature)

    def measure(self, drafter: DrafterTraining, params: Any, generated: Generated) -> list[float]:
        """Tokens per step with 1, 2, …, `depth` drafts in a step."""
        accepted = self._accepted(drafter, params, generated)
        results = []
        for num_drafts in range(1, self._depth + 1):
            counts = [
                tokens_per_step(accepted_T, num_prompt, len(text), num_drafts)
                for accepted_T, num_prompt, text in zip(accepted, generated.prompt_lengths, generated.texts, strict=True)
            ]
            tokens, steps = np.sum(counts, axis=0)
            results.append(tokens / max(steps, 1))
        return results

    def _accepted(self, drafter: DrafterTraining, params: Any, generated: Generated) -> list[list[int]]:
        program = self._programs.setdefault(drafter, self._program(drafter))
        accepted: list[list[int]] = [[] for _ in generated.texts]
        for lower, upper in zip((0, *WIDTHS), WIDTHS, strict=False):
            places = [place for place, text in enumerate(generated.texts) if lower < len(text) <= upper]
            for at in range(0, len(places), self._batch):
                some = places[at : at + self._batch]
                token_ids = np.zeros((self._batch, upper), np.int32)
                for row, place in enumerate(some):
                    token_ids[row, : len(generated.texts[place])] = generated.texts[place]
                seeds = np.resize(np.array(some, np.int32), self._batch)
                inputs = (self._direct.state, params, token_ids, seeds, np.float32(generated.temperature))
                counts = np.asarray(program(*inputs))
                for row, place in enumerate(some):
                    accepted[place] = counts[row].tolist()
        return accepted

    def _program(self, drafter: DrafterTraining) -> Any:
        def row(target_state: nnx.State, params: Any, ids_T: Array, seed: Array, temperature: Array) -> Array:
            target = nnx.merge(self._graph, target_state)
            positions_T = jnp.arange(len(ids_T))
            reading = read(target, self._feature_layers, ids_T, positions_T, jnp.zeros_like(positions_T))
            noise_TV = jax.vmap(lambda at: draw_noise(seed, at, reading.logits_TV.shape[1]))(positions_T)
            right_T, accepted_T = True, 0
            for draft, logits_TV in enumerate(drafter.logits(params, reading, self._depth)):
                columns = np.arange(logits_TV.shape[1]) if drafter.columns is None else drafter.columns
                noise = jnp.roll(noise_TV, -2 - draft, axis=0)[:, columns]
                drawn_T = jnp.asarray(columns)[jnp.argmax(logits_TV + temperature * noise, axis=1)]
                right_T &= drawn_T == jnp.roll(ids_T, -2 - draft)
                accepted_T += right_T.astype(jnp.int32)
            return accepted_T

        return jax.jit(jax.vmap(row, in_axes=(None, None, 0, 0, None)))

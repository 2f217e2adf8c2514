"""Drafts of a few layers that go on from the target's hidden states: what EAGLE and multi-token prediction have in common.

For a token and the hidden state of the one before it, they compute an approximation of the token's own hidden state, from which the
next token is drawn. It stands in for the target's in the draft after it.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.layers.step import Step
from jaxllm.parallel.shards import Shards
from jaxllm.runner.drafter import Drafting
from jaxllm.speculative.with_weights import DrafterWithWeights


class Predictor(Protocol):
    """The layers."""

    token_ids: Any
    """A parameter: the target's ids of the vocabulary's tokens; None: they are the target's own."""

    def hidden(self, drafting: Drafting) -> Array:
        """[T, X]: what it takes of the target's hidden states."""

    def __call__(self, target: Any, hidden_TX: Array, step: Step, kept_R: Array | None = None) -> tuple[Array, Array]:
        """The tokens of a step with the hidden states of those before them: their own [T, X], and [T, D] that logits are of.

        kept_R: indices of the tokens whose results are wanted; None: all."""

    def logits(self, target: Any, hidden_RD: Array, shards: Shards) -> Array:
        """Logits of this device's columns of its vocabulary."""


@dataclass(frozen=True, kw_only=True)
class HiddenStateDrafter(DrafterWithWeights):
    """Proposes with a `Predictor`. Position p of its cache has the hidden state of the target's position p with the token behind it."""

    @property
    def num_lookahead(self) -> int:
        return self.num_drafts - 1

    def follow(self, model: Predictor, state: tuple[()], drafting: Drafting) -> tuple[()]:
        """Keep up with the cache, without which no later draft would be right."""
        self._begin(model, drafting)
        return state

    def propose(self, model: Predictor, state: tuple[()], drafting: Drafting) -> tuple[tuple[()], jax.Array]:
        hidden_RX, out_RD = self._begin(model, drafting)
        drafts: list[jax.Array] = []
        for i in range(drafting.num_wanted):
            if i:
                step = drafting.decode_step(drafts[-1], drafting.position_R + i - 1)
                hidden_RX, out_RD = model(drafting.target, hidden_RX, step)
            drafts.append(self._choose(model, out_RD, drafting, drafting.position_R + i + 1))
        return state, jnp.stack(drafts, axis=1)

    def _begin(self, model: Predictor, drafting: Drafting) -> tuple[Array, Array]:
        """Take in the tokens of a step. Only of the last ones is anything but keys and values computed."""
        step = drafting.same_step(drafting.next_ids_T)
        return model(drafting.target, model.hidden(drafting), step, drafting.last_R)

    def _choose(self, model: Predictor, out_RD: Array, drafting: Drafting, position_R: Array) -> jax.Array:
        token_ids_V = None if model.token_ids is None else model.token_ids[...]
        return self.choose(model.logits(drafting.target, out_RD, drafting.shards), position_R, drafting, token_ids_V)

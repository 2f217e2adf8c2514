"""Proposes what followed the latest tokens when they occurred before: prompt lookup, without a model."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.runner.drafter import NO_DRAFT, Drafting
from jaxllm.speculative.weightless import WeightlessDrafter


@dataclass(frozen=True)
class NGramDrafter(WeightlessDrafter):
    """Finds the longest run of `shortest` to `longest` latest tokens that occurs earlier in the request, of several the last one.

    As vLLM's search on GPUs; its search on the host takes the first of several. Where the drafts reach the end of the request, it
    repeats itself with the period found, and so do the drafts.
    """

    num_drafts: int
    shortest: int
    longest: int
    proposes: bool = True
    needs_history: bool = True
    accepts_by_ratio: bool = False
    synthetic_rates: tuple[float, ...] = ()

    def new_state(self, num_rows: int, max_model_len: int) -> jax.Array:
        """int32[rows, positions]: the tokens of each request."""
        return jnp.zeros((num_rows, max_model_len), jnp.int32)

    def show(self, state: jax.Array, row: jax.Array, position: jax.Array, token_ids_C: jax.Array) -> jax.Array:
        """Write tokens that no step computes; a negative one is none."""
        position_C = position + jnp.arange(len(token_ids_C))
        return state.at[row, jnp.where(token_ids_C < 0, state.shape[1], position_C)].set(token_ids_C, mode="drop")

    def follow(self, model: Any, state: jax.Array, drafting: Drafting) -> jax.Array:
        """Write the tokens of the step and the last drawn one. Drafts that were wrong lie behind the end of the request."""
        state = state.at[drafting.row_T, drafting.position_T].set(drafting.token_ids_T, mode="drop")
        return state.at[drafting.row_R, drafting.position_R].set(drafting.token_R, mode="drop")

    def propose(self, model: Any, state: jax.Array, drafting: Drafting) -> tuple[jax.Array, jax.Array]:
        """See Drafter."""
        state = self.follow(model, state, drafting)
        return state, self.find(state[drafting.row_R], drafting.position_R)[:, : drafting.num_wanted]

    def find(self, tokens_RL: jax.Array, last_R: jax.Array) -> jax.Array:
        """int32[R, num_drafts]: the drafts behind position last_R of each row."""
        num_positions = tokens_RL.shape[1]
        position_L = jnp.arange(num_positions)
        matches_RL = position_L < last_R[:, None]
        length_RL = jnp.zeros(tokens_RL.shape, jnp.int32)
        for back in range(self.longest):
            wanted_R1 = jnp.take_along_axis(tokens_RL, jnp.maximum(last_R - back, 0)[:, None], axis=1)
            there_RL = jnp.pad(tokens_RL, ((0, 0), (back, 0)), constant_values=-1)[:, :num_positions]
            matches_RL &= (
                there_RL == wanted_R1
            )  # `length_RL == back` says the same, but fusions that repeat it double each time
            length_RL += matches_RL.astype(jnp.int32)
        # The longest match, of several the last.
        best_R = num_positions - 1 - jnp.argmax(length_RL[:, ::-1], axis=1).astype(jnp.int32)
        length_R = jnp.take_along_axis(length_RL, best_R[:, None], axis=1)[:, 0]
        period_R1 = jnp.maximum(last_R - best_R, 1)[:, None]
        index_RK = best_R[:, None] + 1 + jnp.arange(self.num_drafts) % period_R1
        draft_RK = jnp.take_along_axis(tokens_RL, jnp.minimum(index_RK, num_positions - 1), axis=1)
        return jnp.where((length_R >= self.shortest)[:, None], draft_RK, NO_DRAFT)

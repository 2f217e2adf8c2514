"""Interface of the runner to a drafter, which proposes tokens. A step checks the drafts of the step before it and proposes new ones.

A drafter is traced into the step's programs: nothing here may depend on values, and what it keeps between steps it keeps in arrays.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxllm.cache_spec import CacheSpec
from jaxllm.layers.step import Step
from jaxllm.model_parts import Layer
from jaxllm.parallel.shards import Shards
from jaxllm.progress import Progress
from jaxllm.sampling.rejection import KEPT_DTYPE

NO_DRAFT = -4
"""In place of a draft: there is none. No drawn token equals it."""


@dataclass
class Drafting:
    """A step whose tokens are computed and drawn, while a program is traced. Names of sizes: T tokens of the step, R rows.

    A row of a step has computed a run of consecutive tokens: a part of its prompt, or its last token and the drafts that followed it.
    Some of the drafts may have proved wrong. The tokens after them were computed in vain; whatever is written to the cache at their
    positions is overwritten by later steps before anything reads it.
    """

    target: Any
    """The model that the drafts are for, with `embedding` and `logits(hidden, shards)`."""
    shards: Shards
    token_ids_T: jax.Array
    """The tokens of the step, drafts included; 0 for padding."""
    next_ids_T: jax.Array
    """The token after each of them: known, or drawn in this step."""
    position_T: jax.Array
    row_T: jax.Array
    """The place of each token's row in arrays by row; the last place, which nothing reads, for padding."""
    hidden_TD: jax.Array
    """After the target's last norm."""
    features: tuple[jax.Array, ...]
    """[T, D] each: what enters the target's layers of `Drafter.feature_layers`, before any norm."""
    last_R: jax.Array
    """Index among T of the last token of each row that proved right: the latest draw followed it."""
    token_R: jax.Array
    """The latest drawn token of each row, which the row's next step computes first."""
    position_R: jax.Array
    """Its position."""
    row_R: jax.Array
    """The place of each row in arrays by row; the last place for rows that drew nothing in this step, and for padding."""
    draws_R: jax.Array
    """Whether a row drew a token in this step: its prompt does not go on."""
    offset_T: jax.Array
    """The index of each token in its row's part of the step."""
    query_start_R1: jax.Array
    """Where the tokens of each row begin, and where the last ones end; rows of padding may have none."""
    same_step: Callable[..., Step]
    """(token_ids_T, lag=0) -> a step of the drafter's layers with these tokens in the places and positions of the target's, less
    `lag`; rows that begin at a lower position then begin at 0.

    `Step.attend(layer, …)` counts the drafter's layers from 0. Steps share the caches: each sees what earlier ones wrote."""
    decode_step: Callable[[jax.Array, jax.Array], Step]
    """(token_ids_R, position_R) -> a step of one token for each row at any position from 0 on. A position behind the blocks of its
    row is computed, but not written."""
    run_step: Callable[..., Step]
    """(token_ids_RW, position_R, *, sees_later) -> a step of W tokens for each row from a position on, one row's after the other's.
    sees_later: whether each token sees those behind it in the step too. Positions behind the blocks are as for `decode_step`."""
    num_wanted: int
    """Drafts that the next step has room for: at most `Drafter.num_drafts`. 0 in `Drafter.follow`."""
    draw: Callable[[jax.Array, jax.Array], jax.Array]
    """(logits_RV of this device's columns, position_R) -> a token of each row, drawn as the target will draw it at that position:
    with the row's temperature, filters and noise; if `accepts_by_ratio` with other noise. In greedy programs the likeliest."""


class Drafter(Protocol):
    """Proposes `num_drafts` tokens for each row that drew one."""

    @property
    def num_drafts(self) -> int:
        """Most drafts of a row."""

    @property
    def num_lookahead(self) -> int:
        """Positions from that of the latest drawn token on that `propose` writes to the cache."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs it reads."""

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Its own layers: kernels must support them too."""

    @property
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """Caches of the drafter's own layers in the blocks of requests."""

    @property
    def model(self) -> nnx.Module | None:
        """Its weights, as shapes with logical axes; None without."""

    @property
    def is_drawn(self) -> bool:
        """Whether it draws its drafts: it then calls `Drafting.draw` once for each of `num_wanted` drafts, in their order."""

    @property
    def accepts_by_ratio(self) -> bool:
        """Whether drafts are accepted by the ratio of the target's and the drafter's probabilities (`sampling.rejection`), instead of
        those that equal the target's draw."""

    @property
    def synthetic_rates(self) -> tuple[float, ...]:
        """For measurements: by place, how often a draft counts as right whose predecessors do, whatever it is; else empty."""

    @property
    def proposes(self) -> bool:
        """Whether it proposes anything. If not, the drafts are those of `PendingStep.set_next_drafts` alone."""

    @property
    def needs_history(self) -> bool:
        """Whether it must be shown the tokens of a request that no step computes, because their keys and values are cached."""

    def load(self, mesh: Mesh, progress: Progress) -> nnx.State:
        """The values of `model`, on the devices. Raises ModelLoadError."""

    def new_state(self, num_rows: int, max_model_len: int) -> Any:
        """A tree of arrays by row that are kept between steps, all zeros; num_rows: with that of padding."""

    def show(self, state: Any, row: jax.Array, position: jax.Array, token_ids_C: jax.Array) -> Any:
        """Take in tokens of a row, from a position on, that no step computes; negative ones are none. If `needs_history`."""

    def follow(self, model: Any, state: Any, drafting: Drafting) -> Any:
        """Take in a step after which no drafts are wanted. Returns the state. May do nothing where that only costs acceptance."""

    def propose(self, model: Any, state: Any, drafting: Drafting) -> tuple[Any, jax.Array]:
        """Take in a step. Returns the state and int32[R, num_wanted]: the tokens expected after token_R, NO_DRAFT where none is.

        model: with values. Rows that drew nothing may get anything.
        """


def kept_logits(drafter: Drafter, num_rows: int, vocab_size: int) -> jax.ShapeDtypeStruct | None:
    """[rows, drafts, V]: the logits that each draft was drawn from, which rows keep until it is verified; None where no distribution is
    needed. num_rows: with that of padding."""
    if not (drafter.accepts_by_ratio and drafter.is_drawn):
        return None
    return jax.ShapeDtypeStruct((num_rows, drafter.num_drafts, vocab_size), KEPT_DTYPE)

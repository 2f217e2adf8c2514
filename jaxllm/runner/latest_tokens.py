"""How the rows of a step go on from the tokens that were sampled before it, and keep those that it samples."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp

from jaxllm.parallel.shards import Shards
from jaxllm.runner.batch import Batch
from jaxllm.runner.heads import Device, Hidden
from jaxllm.runner.layout import Column
from jaxllm.runner.places import Places, latest_or_known
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.row_arrays import RowArrays
from jaxllm.runner.step_feature import StepFeature, StepRun
from jaxllm.sampling.variants import Variant

if TYPE_CHECKING:
    from jaxllm.runner.pending import StepInFlight


class Draw(Protocol):
    """See `StepFunctions.draw_shared`."""

    def __call__(
        self, variant: Variant, logits_RV: jax.Array, columns_RC: jax.Array, shards: Shards, mask_RW: jax.Array | None = None
    ) -> jax.Array: ...


class TokensOnHost:
    """Programs for the tokens of rows that a host starts in addition to those of the step. Here there are none."""

    def admit(self, batches: Sequence[Batch]) -> None:
        """Called with the batches of all ranks before a step that admits requests."""

    def keys(self, step: "StepInFlight") -> list[ProgramKey]:
        """The programs of a step that `forward` computes."""
        return []

    def read(self, step: "StepInFlight") -> None:
        """Called before each step that `forward` computes."""

    def follow(self, step: "StepInFlight", hidden: Hidden) -> None:
        """Called behind each step that `forward` computes, once its tokens are sampled."""


class LatestTokens(StepFeature):
    """Each row keeps its latest token and samples one token in a step. A drafter's rows do more: see `features.drafts`."""

    width = 1
    """Most tokens that a row samples in a step."""
    proposes = False
    """Whether programs propose drafts."""
    num_shown = 0
    """Number of results of `shown`."""
    num_lookahead = 0
    """Positions from that of the latest token on that a step may write behind those it computes."""

    def on_host(self, device: Device) -> TokensOnHost:
        """The programs that the host starts in addition to the step."""
        return TokensOnHost()

    def resolved(self, rows: RowArrays, columns_RC: jax.Array) -> jax.Array:
        """The rows' columns with the positions that only the device knows."""
        return columns_RC

    def token_ids(self, rows: RowArrays, known_T: jax.Array, places: Places) -> jax.Array:
        """The ids of a step's tokens, those that the host does not know from their rows."""
        return latest_or_known(rows.last_token_N[places.row_T], known_T)

    def noted(self, rows: RowArrays, columns_RC: jax.Array) -> RowArrays:
        """The rows after a step that computed these tokens and has sampled none yet."""
        return rows

    def shown(self, run: StepRun) -> tuple[Any, ...]:
        """Results of `forward` for the programs after it, in addition to what all programs take."""
        return ()

    def draw(
        self,
        draw: Draw,
        variant: Variant,
        logits_TV: jax.Array,
        rows: RowArrays,
        columns_RC: jax.Array,
        columns_TC: jax.Array,
        width: int,
        shards: Shards,
        mask_TW: jax.Array | None = None,
    ) -> jax.Array:
        """int32[T]: `width` tokens for each row. columns_TC: of each draw."""
        return draw(variant, logits_TV, columns_TC, shards, mask_TW)

    def continues(
        self, rows: RowArrays, columns_RC: jax.Array, index: int, token_R: jax.Array, is_alive_R: jax.Array | None
    ) -> jax.Array:
        """Whether the draw behind a row's `index`-th counts. is_alive_R: whether this one does; None: all do."""
        raise AssertionError("a row samples one token")

    def stored(self, rows: RowArrays, columns_RC: jax.Array, token_T: jax.Array, width: int) -> tuple[RowArrays, jax.Array]:
        """The rows with the tokens that a step has drawn, and what the host reads: here int32[R], the tokens."""
        return with_latest(rows, columns_RC, token_T), token_T

    def follow(self, functions: Any, variant: Variant, width: int, run: StepRun) -> None:
        """Called at the end of `decode`, after `stored`: may change the run's rows and caches."""


def with_latest(rows: RowArrays, columns_RC: jax.Array, token_R: jax.Array) -> RowArrays:
    """The rows with these latest tokens."""
    return rows._replace(last_token_N=rows.last_token_N.at[columns_RC[:, Column.TOKEN_ROW]].set(jnp.maximum(token_R, 0)))

"""The interface between layers that keep a state for each row and the arrays that hold the states between steps."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array


class Spans(NamedTuple):
    """Which tokens of its sequence a step computes of each row, in an engine with drafts."""

    start_R: Array
    """int32: position of the first token. All before it are right."""
    end_R: Array
    """int32: behind the last one."""
    has_drafts_R: Array | None
    """Bool: whether a row's tokens may turn out to be wrong, but for the first. None: that is so for all rows, and they have equally many
    tokens, of which some at the end may be none."""


class StateRows(NamedTuple):
    """The rows of a step, in the order of its tokens."""

    row_R: Array
    """int32: place in the states, all different but for padding rows, which have the last. They may write different values there, of which
    any may stay: no request has that place."""
    is_new_R: Array
    """Bool: the row begins with a state of zeros, whatever the arrays hold."""
    query_start_R1: Array | None
    """int32: row r owns tokens query_start[r]:query_start[r + 1] of the step; None: token i is the only one of row i."""
    spans: Spans | None = None
    """None: all tokens of all steps are right."""


class RowStates(Protocol):
    """The states of all rows: see `jaxllm.cache_spec.RowState`."""

    @property
    def rows(self) -> StateRows: ...

    def read(self, layer: int) -> tuple[Array, ...] | None:
        """The arrays that a layer keeps, [rows, heads, ...]. None: all rows of the step are new, and nothing is kept."""

    def write(self, layer: int, arrays: Sequence[Array]) -> None:
        """Replace them."""


class OneSequence:
    """States of a step that is one sequence, from its first token to its last."""

    def __init__(self, num_tokens: int):
        self.rows = StateRows(jnp.zeros(1, jnp.int32), jnp.ones(1, bool), jnp.array([0, num_tokens], jnp.int32))

    def read(self, layer: int) -> None:
        return None

    def write(self, layer: int, arrays: Sequence[Array]) -> None:
        """Nothing is kept."""

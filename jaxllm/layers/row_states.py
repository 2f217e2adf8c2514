"""The interface between layers that keep a state for each row and the arrays that hold the states between steps."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array


class StateRows(NamedTuple):
    """The rows of a step, in the order of its tokens."""

    row_R: Array
    """int32: place in the states; of padding rows the last."""
    is_new_R: Array
    """Bool: the row begins with a state of zeros, whatever the arrays hold."""
    query_start_R1: Array | None
    """int32: row r owns tokens query_start[r]:query_start[r + 1] of the step; None: token i is the only one of row i."""


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

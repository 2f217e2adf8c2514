"""Keeps the inputs of a row's latest tokens in addition to its states by row: drafts among them may turn out to be wrong.

A state sums up tokens and cannot take one back. So a step with drafts leaves the states of its rows as they were before its tokens, and
keeps what its tokens add; the next step, which begins behind the last token that was right, first adds those before it. Steps of tokens
that are right for sure change states at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp
from jax import Array

from jaxllm.layers.causal_conv import convolved_before
from jaxllm.layers.row_states import Spans, StateRows
from jaxllm.layers.step import Step
from jaxllm.model_parts import StateMixer


class Mix(Protocol):
    """The computation of a layer from its inputs and states."""

    def __call__(
        self, inputs: Sequence[Array], arrays: tuple[Array, ...], rows: StateRows, is_there_T11: Array | None = None
    ) -> tuple[Array, tuple[Array, ...]]:
        """The outputs of tokens, and the states behind them. arrays: before them, the first the last inputs of a convolution over the
        first of inputs. is_there_T11: tokens that change the other states; None: all do."""


@dataclass(frozen=True)
class LatestInputs:
    """The arrays of a layer, all [rows, heads, ...], and the rows of a step."""

    inputs: Sequence[Array]
    """[N, K, B, C] each: inputs of the B latest tokens of each row."""
    position_NK1: Array
    """Float32, the same for all heads: the position of the first of these, which is that behind the states."""
    rows: StateRows

    @property
    def spans(self) -> Spans:
        """Tokens of the step."""
        assert self.rows.spans is not None, "the engine has drafts"
        return self.rows.spans

    @property
    def num_tokens(self) -> int:
        """Most that are kept of a row."""
        return self.inputs[0].shape[2]

    @property
    def kept_rows(self) -> StateRows:
        """The rows of the step with the tokens that are kept of each."""
        num_rows = len(self.rows.row_R)
        return StateRows(self.rows.row_R, self.rows.is_new_R, jnp.arange(num_rows + 1, dtype=jnp.int32) * self.num_tokens)

    @property
    def num_right_R(self) -> Array:
        """int32: how many of the latest tokens of each row were right."""
        kept_R = self.spans.start_R - self.position_NK1[self.rows.row_R, 0, 0].astype(jnp.int32)
        return jnp.where(self.rows.is_new_R, 0, jnp.clip(kept_R, 0, self.num_tokens))

    @property
    def is_right_T11(self) -> Array:
        """Bool [R * B, 1, 1]: which tokens of `right` were."""
        return (jnp.arange(self.num_tokens) < self.num_right_R[:, None]).reshape(-1, 1, 1)

    def right(self) -> list[Array]:
        """[R * B, K, C] each: the inputs of the latest tokens of the step's rows, zeros for those that were wrong."""
        kept = (array_NKBC[self.rows.row_R].swapaxes(1, 2) for array_NKBC in self.inputs)
        # What an earlier owner left may be NaN.
        return [jnp.where(self.is_right_T11, each.reshape(-1, *each.shape[2:]), 0) for each in kept]

    def kept(self, step: Sequence[Array]) -> list[Array]:
        """The layer's arrays with what a step leaves for the next one. step: [T, K, C] each, inputs of its tokens."""
        row_R, spans, position_R = self.rows.row_R, self.spans, self.spans.end_R
        arrays = list(self.inputs)
        if self.rows.query_start_R1 is not None:
            first_R1 = self.rows.query_start_R1[:-1, None]
            for index, (array_NKBC, x_TKC) in enumerate(zip(self.inputs, step, strict=True)):
                token_RB = jnp.minimum(first_R1 + jnp.arange(self.num_tokens), len(x_TKC) - 1)
                arrays[index] = array_NKBC.at[row_R].set(x_TKC[token_RB].swapaxes(1, 2).astype(array_NKBC.dtype))
            has_drafts_R = spans.has_drafts_R
            position_R = spans.start_R if has_drafts_R is None else jnp.where(has_drafts_R, spans.start_R, spans.end_R)
        position_RK1 = jnp.broadcast_to(position_R[:, None, None], (len(row_R), *self.position_NK1.shape[1:]))
        return [*arrays, self.position_NK1.at[row_R].set(position_RK1.astype(jnp.float32))]

    def unless_drafted(self, new_N: Array, old_R: Array) -> Array:
        """States of all rows after a step, but for rows with drafts those that they had before it."""
        has_drafts_R = self.spans.has_drafts_R
        assert has_drafts_R is not None
        row_R = self.rows.row_R
        is_old_R = has_drafts_R.reshape(-1, *[1] * (new_N.ndim - 1))
        return new_N.at[row_R].set(jnp.where(is_old_R, old_R, new_N[row_R]))


def mix_in_layer(layer: int, part: StateMixer, compute: Mix, inputs: Sequence[Array], step: Step) -> Array:
    """The outputs of a layer's tokens, by the states that the step has of it; without any, each sequence begins with zeros.

    inputs: see `mix`."""
    states = step.states
    assert states is not None, "the step has no states by row"
    arrays = states.read(layer)
    if arrays is None:
        shapes = [(2, inputs[0].shape[1], *shape) for shape in part.state_shapes]
        types = [inputs[0].dtype if part.has_convolution and not index else jnp.float32 for index in range(len(shapes))]
        arrays = tuple(map(jnp.zeros, shapes, types))
    out, after = mix(compute, inputs, arrays, states.rows, has_convolution=part.has_convolution)
    states.write(layer, after)
    return out


def mix(
    compute: Mix, inputs: Sequence[Array], arrays: tuple[Array, ...], rows: StateRows, *, has_convolution: bool
) -> tuple[Array, tuple[Array, ...]]:
    """The outputs of a step's tokens, and all that the layer keeps behind them.

    inputs: [T, K, C] each. arrays: what the layer keeps, as many states by row as there are inputs and, in an engine with drafts, behind
    them latest inputs. has_convolution: whether the first state is that of a convolution; else all are like the others.
    """
    states, latest = arrays[: len(inputs)], arrays[len(inputs) :]
    if not latest:
        return compute(inputs, states, rows)
    return _mix_drafts(compute, inputs, states, LatestInputs(latest[:-1], latest[-1], rows), has_convolution)


def _mix_drafts(
    compute: Mix, inputs: Sequence[Array], arrays: tuple[Array, ...], latest: LatestInputs, has_convolution: bool
) -> tuple[Array, tuple[Array, ...]]:
    """As `mix`, in an engine with drafts."""
    rows, right, before = latest.rows, latest.right(), arrays
    _, arrays = compute(right, arrays, latest.kept_rows, latest.is_right_T11)
    if has_convolution:
        arrays = (convolved_before(right[0], latest.num_right_R, before[0], rows), *arrays[1:])
    kept = latest.kept(inputs)
    if rows.query_start_R1 is not None and latest.spans.has_drafts_R is None:
        own = rows._replace(row_R=jnp.arange(len(rows.row_R), dtype=jnp.int32))
        copied_R1 = jnp.append(rows.row_R, len(before[0]) - 1)  # the last row of the states takes writes of padding
        out, _ = compute(inputs, tuple(array[copied_R1] for array in arrays), own)
        return out, (*arrays, *kept)
    old = [array[rows.row_R] for array in arrays]
    out, after = compute(inputs, arrays, rows)
    if rows.query_start_R1 is not None:
        after = tuple(map(latest.unless_drafted, after, old))
    return out, (*after, *kept)

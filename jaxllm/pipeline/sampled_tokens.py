"""How sampled tokens come from the last stage to the first: on the devices of one process, or through the hosts of several."""

from collections import deque
from collections.abc import Sequence

import jax
import numpy as np

from jaxllm.runner.batch import Batch
from jaxllm.runner.layout import FROM_ROW, Column
from jaxllm.runner.runner import ModelRunner

_MOST_IN_FLIGHT = 4
"""More steps than are in flight, for each stage."""


class TokensOnDevices:
    """Tokens that the devices of one process give to each other. The host does not wait for them."""

    def __init__(self, first: ModelRunner, num_stages: int):
        self._first, self._num_stages = first, num_stages
        self._num_launched = 0
        self._trash = first.buckets.max_rows
        self._sampled_in_N = np.full(self._trash + 1, -1)
        """The latest launch that sampled a token of each row, by row; -1: the host knows its last token."""
        self._sent_back: deque[tuple[int, jax.Array]] = deque()
        """By launch, oldest first: the last token of each row, on the way to the first stage."""

    def give(self, batch: Batch) -> None:
        """Give the first stage the tokens of a step's requests that are not known to the host. None that were sampled later: the stage
        would wait for steps that this one need not wait for."""
        self._num_launched += 1
        self._sampled_in_N[[row.index for row in batch.admitted]] = -1
        columns_RC = batch.layout.views(batch.buffer).columns_RC
        newest = self._sampled_in_N[columns_RC[:, Column.ROW]].max()
        tokens = None
        # Tokens of old steps are there, whether or not a request goes on with them.
        newest = max(newest, self._num_launched - 1 - _MOST_IN_FLIGHT * self._num_stages)
        while self._sent_back and self._sent_back[0][0] <= newest:
            _, tokens = self._sent_back.popleft()
        if tokens is not None:
            self._first.take_tokens(tokens)
        self._sampled_in_N[columns_RC[:, Column.TOKEN_ROW]] = self._num_launched
        self._sampled_in_N[self._trash] = -1

    def send_back(self, last_token_N: jax.Array) -> None:
        """Send the tokens of the latest launch to the first stage."""
        tokens_N = jax.device_put(last_token_N, self._first.shapes.replicated)
        self._sent_back.append((self._num_launched, tokens_N))

    def forget(self) -> None:
        """Drop all tokens on the way. No step may be in flight."""
        self._sent_back.clear()
        self._sampled_in_N[:] = -1


class TokensThroughHosts:
    """Tokens that host 0 reads and sends to the host of the first stage, which writes them into the steps that compute them.

    Devices of both stages could exchange them instead, but each runs its programs in the order of their launches: one of the two would
    wait for the other's later steps before it took part, and the stages would compute one after the other.
    """

    def __init__(self, num_rows: int):
        self._last_token_N = np.zeros(num_rows, np.int32)
        self._sampled_in_N = np.zeros(num_rows, np.int64)
        """The latest step that samples a token of each row."""
        self._num_steps = self._num_known = 0
        """Steps so far, and of these, from the first on, those whose tokens are known."""
        self._rows: deque[np.ndarray] = deque()
        """The rows for which each of the other steps samples."""

    def note(self, batch: Batch) -> int:
        """Note the next step. Returns how many steps' tokens must be known before it can be written."""
        rows_T = _rows_without_token(batch)[1]
        needed = int(self._sampled_in_N[rows_T].max(initial=0))
        self._num_steps += 1
        sampled = np.array([row.index for row in batch.sampled], np.int32)
        self._sampled_in_N[sampled] = self._num_steps
        self._rows.append(sampled)
        return needed

    def take(self, tokens: Sequence[int]) -> None:
        """The tokens that the next step sampled, in the order of its requests."""
        self._last_token_N[self._rows.popleft()] = np.maximum(tokens, 0)  # below 0: the request ends
        self._num_known += 1

    def are_known(self, needed: int) -> bool:
        """Whether the tokens of so many steps are known."""
        return self._num_known >= needed

    def write(self, batch: Batch) -> None:
        """Write the tokens into the buffer of a step, all of whose tokens are known."""
        places, rows_T = _rows_without_token(batch)
        batch.layout.views(batch.buffer).token_ids_T[places] = self._last_token_N[rows_T]

    def forget(self) -> None:
        """Drop all tokens on the way. No step may be in flight."""
        self._rows.clear()
        self._num_known = self._num_steps


def _rows_without_token(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """The places among a step's tokens of those that the host did not know when it was planned, and their rows."""
    views = batch.layout.views(batch.buffer)
    rows_T = np.repeat(views.columns_RC[:, Column.ROW], views.columns_RC[:, Column.NUM_TOKENS])
    places = np.flatnonzero(views.token_ids_T[: len(rows_T)] == FROM_ROW)
    return places, rows_T[places]

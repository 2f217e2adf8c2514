"""Layout of the single int32 buffer that carries a step from host to device. Both sides access it through the same views."""

import enum
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from jaxllm.sampling.columns import NUM_COLUMNS

A = TypeVar("A")  # np.ndarray on the host, jax.Array under trace


class Column(enum.IntEnum):
    """Meaning of the first columns of a row; the sampling columns follow from SAMPLING on."""

    ROW = 0  # place in the persistent arrays; the trash row for padding
    NUM_TOKENS = 1  # tokens computed in this step; 0 for padding
    START = 2  # position of the first of them; FROM_ROW if only the device knows
    WRITE_FROM = 3  # keys and values of earlier positions are shared and stay untouched
    LIMIT = 4  # nor are there blocks for this position and later ones
    TOKEN_ROW = 5  # where the sampled token goes: ROW, or the trash row if this step samples nothing
    NUM_DRAFTS = 6  # of the tokens, the last so many are drafts
    NEXT_TOKEN = 7  # of a row that samples nothing: the token behind those of this step
    ADAPTER = 8  # slot of the row's adapter, NO_ADAPTER for none
    SAMPLING = 9


NUM_ROW_COLUMNS = Column.SAMPLING + NUM_COLUMNS
"""Columns of a row in every engine. Columns of features follow: see `FeatureInputs`."""
SAMPLING_COLUMNS = slice(Column.SAMPLING, NUM_ROW_COLUMNS)
FROM_ROW = -1
"""In place of a token id or position: it lies in its request's row on the device."""


@dataclass(frozen=True)
class StepViews(Generic[A]):
    """Parts of the buffer, as views."""

    columns_RC: A
    token_ids_T: A
    update_index_U: A
    """Flat index into the block table; beyond its end for padding."""
    update_block_U: A
    inputs_IT: A
    """Values of each token for features; 0 where there is none."""


@dataclass(frozen=True)
class StepLayout:
    """Sizes of a step's buffer."""

    num_rows: int
    num_tokens: int
    num_updates: int
    num_columns: int = NUM_ROW_COLUMNS
    num_inputs: int = 0

    @property
    def size(self) -> int:
        return self.num_rows * self.num_columns + (1 + self.num_inputs) * self.num_tokens + 2 * self.num_updates

    def views(self, buffer: A) -> StepViews[A]:
        """The parts of a buffer of `size` int32 values."""
        rows_end = self.num_rows * self.num_columns
        tokens_end = rows_end + self.num_tokens
        updates_end = tokens_end + self.num_updates
        blocks_end = updates_end + self.num_updates
        return StepViews(
            buffer[:rows_end].reshape(self.num_rows, self.num_columns),  # type: ignore[index]
            buffer[rows_end:tokens_end],  # type: ignore[index]
            buffer[tokens_end:updates_end],  # type: ignore[index]
            buffer[updates_end:blocks_end],  # type: ignore[index]
            buffer[blocks_end:].reshape(self.num_inputs, self.num_tokens),  # type: ignore[index]
        )


def decode_layout(num_rows: int, num_updates: int = 1, num_columns: int = NUM_ROW_COLUMNS) -> StepLayout:
    """A step in which the host knows at most one token of each row. num_updates: most new blocks of a row, in all groups of layers."""
    return StepLayout(num_rows, num_rows, num_rows * num_updates, num_columns)


def mixed_layout(
    num_tokens: int,
    num_rows: int,
    block_size: int,
    num_groups: int = 1,
    num_columns: int = NUM_ROW_COLUMNS,
    num_inputs: int = 0,
) -> StepLayout:
    """A step of any shape. A separate program writes the new blocks of long cached prefixes that do not fit here."""
    return StepLayout(num_rows, num_tokens, num_groups * (num_tokens // block_size + 2 * num_rows), num_columns, num_inputs)


def padded(first: Any, second: Any, size: int, *, padding: int) -> np.ndarray:
    """int32 [2, size]: two equally long lists, the rest filled with `padding`."""
    arrays = np.full((2, size), padding, np.int32)
    arrays[0, : len(first)] = first
    arrays[1, : len(second)] = second
    return arrays

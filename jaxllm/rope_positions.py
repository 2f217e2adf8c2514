"""Positions of tokens in time, row and column, by which models with ropes in sections (`Rope.sections`) turn them.

A token of text has the same position on all three axes. The tokens of an item with a grid lie in it from the position behind the token
before; the next token follows the largest of their rows and columns. So behind an item, positions are smaller than indices.

Source: arXiv:2409.12191.
"""

from collections.abc import Sequence

import numpy as np

from jaxllm.request import PromptItem


def rope_positions(items: Sequence[PromptItem], start: int, count: int) -> np.ndarray:
    """Int32 [3, count]: the positions of `count` tokens from index `start` on, of a request whose prompt has these items, in order."""
    stop = start + count
    positions_3T = np.tile(np.arange(start, stop, dtype=np.int32), (3, 1))
    delta = 0
    for item in items:
        if item.grid is None:
            continue
        if item.position >= stop:
            break
        first, last = max(item.position, start), min(item.end, stop)
        if first < last:
            in_grid_3T = np.indices(item.grid, np.int32).reshape(3, item.num_tokens)
            own = in_grid_3T[:, first - item.position : last - item.position]
            positions_3T[:, first - start : last - start] = item.position + delta + own
        change = _change(item)
        positions_3T[:, max(item.end - start, 0) :] += change
        delta += change
    return positions_3T


def rope_delta(items: Sequence[PromptItem]) -> int:
    """Position minus index of all tokens behind the last item; at most 0."""
    return sum(map(_change, items))


def _change(item: PromptItem) -> int:
    """Change that an item makes to position minus index of the tokens after it."""
    return 0 if item.grid is None else max(item.grid[1:]) - item.num_tokens

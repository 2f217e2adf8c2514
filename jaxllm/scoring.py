"""Similarity of texts: which text is compared with which, and the cosine of their vectors."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxllm.errors import InvalidRequestError


def pairs(num_first: int, num_second: int, names: tuple[str, str]) -> list[tuple[int, int]]:
    """Which of the first texts goes with which of the second: one with each (1 : N), or pair by pair (N : N).

    `names` are the parameters that hold the texts. Raises InvalidRequestError for other numbers of them.
    """
    if not num_first or not num_second:
        empty = names[0] if not num_first else names[1]
        raise InvalidRequestError(f"{empty} is empty, must have at least one text", empty)
    if num_first == 1:
        return [(0, place) for place in range(num_second)]
    if num_first != num_second:
        raise InvalidRequestError(
            f"{names[0]} has {num_first} texts and {names[1]} {num_second}; give one and many, or as many of each", names[1]
        )
    return [(place, place) for place in range(num_first)]


def as_texts(data: Any, name: str) -> list[Any]:
    """One text (or list of token ids) or many as a list. Raises InvalidRequestError for anything else."""
    if isinstance(data, str) or (isinstance(data, Sequence) and data and isinstance(data[0], int)):
        return [data]
    if not isinstance(data, Sequence):
        raise InvalidRequestError(f"{name} is a {type(data).__name__}, must be a text or a list of texts", name)
    return list(data)


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    """-1 to 1, computed in float64; 0 if one of the vectors is zero."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    length = float(np.sqrt((a @ a) * (b @ b)))
    return max(-1.0, min(1.0, float(a @ b) / length)) if length else 0.0

"""Low-rank changes: near what NumPy computes in float32; tokens without an adapter keep their bits."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.host import Normals, same_bits
from pallas_kernels.lora import Parts, add, group

TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""Bound of the largest difference, relative to the largest value."""
_NUM_SLOTS = 3
_NUM_TOKENS = (1, 13, 150)
"""One; a few, which are one tile; and more than that."""


@dataclass(frozen=True)
class Shapes:
    """A matrix product that adapters change, on one device."""

    dtype: str
    num_slots: int
    rank: int
    width: int
    """Inputs."""
    parts: Parts
    adapter_dtype: str | None = None
    """Of A and B; None: that of the activations."""


def cases(shapes: Shapes, implementation: str, *, interpret: bool) -> list[Case]:
    """A token, a few and many, of few slots; some have no adapter."""
    num_slots = min(shapes.num_slots, _NUM_SLOTS)
    call = functools.partial(run, parts=shapes.parts, implementation=implementation, interpret=interpret)
    return [
        Case(
            f"{shapes.width} to {shapes.parts.num_columns}, {num_tokens} tokens",
            functools.partial(host_arrays, shapes, num_tokens, num_slots),
            {implementation: call},
            functools.partial(host_error, parts=shapes.parts),
            TOLERANCE[shapes.dtype],
        )
        for num_tokens in _NUM_TOKENS
    ]


def run(y: Any, x: Any, a: Any, b: Any, slot: Any, **options: Any) -> Any:
    """The op on y."""
    return add(y, x, a, b, group(slot, a.shape[0]), **options)


def host_arrays(shapes: Shapes, num_tokens: int, num_slots: int) -> tuple[Any, tuple[Any, ...]]:
    """y and x, A and B, and slots; x of tokens without one is NaN."""
    normals, dtype, parts = Normals(), shapes.dtype, shapes.parts
    slot_T = np.random.default_rng(num_tokens).integers(0 if num_tokens == 1 else -1, num_slots, num_tokens, np.int32)
    x_TD = normals(num_tokens, shapes.width)
    x_TD[slot_T < 0] = np.nan
    rows = parts.num_modules * shapes.rank
    a_SQD = normals(num_slots, rows, shapes.width) * np.float32(1 / math.sqrt(shapes.width))
    b_SRN = normals(num_slots, shapes.rank, parts.num_columns) * np.float32(1 / math.sqrt(shapes.rank))
    of_adapters = shapes.adapter_dtype or dtype
    y_TN = normals.of(dtype, num_tokens, parts.num_columns)
    return y_TN, (x_TD.astype(dtype), a_SQD.astype(of_adapters), b_SRN.astype(of_adapters), slot_T)


def host_error(y: Any, constants: tuple[Any, ...], got: Any, *, parts: Parts) -> float:
    """The largest difference from `plain`, relative to the largest value; infinite where a token without adapter changed."""
    y_TN, got, slot_T = np.asarray(y), np.asarray(got), np.asarray(constants[3])
    if not same_bits(got[slot_T < 0], y_TN[slot_T < 0]):
        return math.inf
    expected = plain(y, *constants, parts=parts)
    return float(np.abs(got.astype(np.float32) - expected).max() / max(float(np.abs(expected).max()), 1e-30))


def plain(y: Any, x: Any, a: Any, b: Any, slot: Any, *, parts: Parts) -> np.ndarray:
    """[T, N] in float32, in NumPy."""
    out_TN, x_TD = (np.asarray(array).astype(np.float32) for array in (y, x))
    slot_T, rank = np.asarray(slot), b.shape[1]
    module_N = parts.modules()
    for index in np.unique(slot_T[slot_T >= 0]):
        (token_M,) = np.nonzero(slot_T == index)
        a_QD, b_RN = (np.asarray(array[index]).astype(np.float32) for array in (a, b))
        z_MQ = x_TD[token_M] @ a_QD.T
        for module in range(parts.num_modules):
            (column_C,) = np.nonzero(module_N == module)
            z_MR = z_MQ[:, module * rank : (module + 1) * rank]
            out_TN[np.ix_(token_M, column_C)] += z_MR @ b_RN[:, column_C]
    return out_TN

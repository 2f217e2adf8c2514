"""Mamba-2's recurrence: near what NumPy computes token by token in float64; states of rows that take no part stay as they are."""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.host import Normals, same_bits
from pallas_kernels.state_space import state_space

TOLERANCE = {"float32": 5e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""Bound of the largest difference of outputs or states, relative to the largest value: outputs are rounded."""
COUNTS = (1, 130, 2, 1, 17)
"""Tokens of the rows of a mixed step."""
_MAX_GROUPS = 4
"""Groups of a case at an engine's start: each is computed alike."""


@dataclass(frozen=True)
class Shapes:
    """A model's state-space layer on one device."""

    dtype: str
    num_groups: int
    group_size: int
    """Heads of each group."""
    head_dim: int
    state_size: int


def cases(shapes: Shapes, implementation: str, *, interpret: bool) -> list[Case]:
    """A step that mixes prompts with single tokens, and one of single tokens, both with padding."""
    shapes = replace(shapes, num_groups=min(shapes.num_groups, _MAX_GROUPS))
    call = functools.partial(state_space_of_state, implementation=implementation, interpret=interpret)
    return [
        Case(name, functools.partial(host_arrays, shapes, counts), {implementation: call}, host_error, TOLERANCE[shapes.dtype])
        for name, counts in (("mixed", COUNTS), ("decode", None))
    ]


def state_space_of_state(
    state: Any,
    x: Any,
    b: Any,
    c: Any,
    dt: Any,
    log_decay: Any,
    skip: Any,
    row: Any,
    is_new: Any,
    start: Any = None,
    **options: Any,
) -> Any:
    """The op with the states as first argument."""
    return state_space(x, b, c, dt, log_decay, skip, state, row, is_new, start, **options)


def host_arrays(
    shapes: Shapes, counts: tuple[int, ...] | None, num_rows: int = 6, num_padding: int = 5
) -> tuple[Any, tuple[Any, ...]]:
    """States and a step of rows with `counts` tokens; None: of one each. Some rows are new, and what they hold is NaN.

    num_rows: of the step of one token each. num_padding: tokens, and rows, behind those of requests.
    """
    normals, dtype = Normals(), shapes.dtype
    K, G, P, S = shapes.num_groups, shapes.group_size, shapes.head_dim, shapes.state_size
    is_decode, counts = counts is None, counts or (1,) * num_rows
    T, R, N = sum(counts) + num_padding, len(counts) + num_padding, len(counts) + 4
    b_TKS, c_TKS = (normals.of(dtype, T, K, S) for _ in range(2))
    dt_TKG = np.exp(normals(T, K, G) - 2)
    log_decay_TKG = -dt_TKG * np.exp(normals(1, K, G))
    row_R = np.full(R, N - 1, np.int32)
    row_R[: len(counts)] = np.random.default_rng(0).permutation(N - 1)[: len(counts)]
    is_new_R = np.arange(R) % 3 == 1
    state_NKGPS = normals(N, K, G, P, S)
    state_NKGPS[row_R[is_new_R]] = np.nan
    ends = np.minimum(np.cumsum((*counts, *(0,) * num_padding)), sum(counts))
    start_R1 = np.concatenate([[0], ends]).astype(np.int32)
    tokens = (normals.of(dtype, T, K, G, P), b_TKS, c_TKS, dt_TKG, log_decay_TKG, normals(K, G))
    return state_NKGPS, (*tokens, row_R, is_new_R, *(() if is_decode else (start_R1,)))


def host_error(state: Any, constants: tuple[Any, ...], got: Any) -> float:
    """The largest difference, relative to the largest value; infinite where another row's state has changed."""
    tokens, skip, (row_R, is_new_R, *start) = constants[:5], constants[5], (np.asarray(x) for x in constants[6:])
    start_R1 = start[0] if start else np.arange(len(row_R) + 1)
    before, (out, after) = np.asarray(state), (np.asarray(x) for x in got)
    trash = len(before) - 1
    others = np.setdiff1d(np.arange(trash), row_R)
    if not same_bits(before[others], after[others]):
        return math.inf
    errors: list[float] = []
    for r, row in enumerate(row_R):
        if row == trash:
            continue
        part = slice(start_R1[r], start_R1[r + 1])
        begin = np.zeros(before.shape[1:]) if is_new_R[r] else before[row].astype(np.float64)
        expected = plain(begin, np.asarray(skip), *(np.asarray(x[part]).astype(np.float64) for x in tokens))
        errors += map(_difference, (out[part], after[row]), expected)
    return float(np.max(errors))


def plain(
    state_KGPS: np.ndarray,
    skip_KG: np.ndarray,
    x_TKGP: np.ndarray,
    b_TKS: np.ndarray,
    c_TKS: np.ndarray,
    dt_TKG: np.ndarray,
    log_decay_TKG: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [T, K, G, P] of one row and its state after them, in NumPy."""
    outs = np.empty(x_TKGP.shape)
    for t, x_KGP in enumerate(x_TKGP):
        added_KGP = dt_TKG[t][..., None] * x_KGP
        state_KGPS = state_KGPS * np.exp(log_decay_TKG[t])[..., None, None] + added_KGP[..., None] * b_TKS[t][:, None, None]
        outs[t] = np.einsum("kgps,ks->kgp", state_KGPS, c_TKS[t]) + skip_KG[..., None] * x_KGP
    return outs, state_KGPS


def _difference(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got.astype(np.float64) - expected).max() / max(float(np.abs(expected).max()), 1e-30))

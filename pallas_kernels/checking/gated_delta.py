"""The gated delta rule: near what NumPy computes token by token in float64; states of rows that take no part stay as they are."""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.host import Normals, same_bits
from pallas_kernels.gated_delta import gated_delta

TOLERANCE = {"float32": 5e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""Bound of the largest difference of outputs or states, relative to the largest value: outputs are rounded."""
COUNTS = (1, 70, 2, 1, 17)
"""Tokens of the rows of a mixed step."""
_MAX_HEADS = 4
"""Key heads of a case at an engine's start: each is computed alike."""


@dataclass(frozen=True)
class Shapes:
    """A model's linear attention on one device."""

    dtype: str
    num_key_heads: int
    group_size: int
    """Value heads of each key head."""
    key_dim: int
    value_dim: int


def cases(shapes: Shapes, implementation: str, *, interpret: bool) -> list[Case]:
    """A step that mixes prompts with single tokens, and one of single tokens, both with padding."""
    shapes = replace(shapes, num_key_heads=min(shapes.num_key_heads, _MAX_HEADS))
    call = functools.partial(gated_delta_of_state, implementation=implementation, interpret=interpret)
    return [
        Case(name, functools.partial(host_arrays, shapes, counts), {implementation: call}, host_error, TOLERANCE[shapes.dtype])
        for name, counts in (("mixed", COUNTS), ("decode", None))
    ]


def gated_delta_of_state(
    state: Any, q: Any, k: Any, v: Any, log_decay: Any, beta: Any, row: Any, is_new: Any, start: Any = None, **options: Any
) -> Any:
    """The op with the states as first argument."""
    return gated_delta(q, k, v, log_decay, beta, state, row, is_new, start, **options)


def host_arrays(
    shapes: Shapes, counts: tuple[int, ...] | None, num_rows: int = 6, num_padding: int = 5
) -> tuple[Any, tuple[Any, ...]]:
    """States and a step of rows with `counts` tokens; None: of one each. Some rows are new, and what they hold is NaN.

    num_rows: of the step of one token each. num_padding: tokens, and rows, behind those of requests.
    """
    normals, dtype = Normals(), shapes.dtype
    K, G, H, V = shapes.num_key_heads, shapes.group_size, shapes.key_dim, shapes.value_dim
    is_decode, counts = counts is None, counts or (1,) * num_rows
    T, R, N = sum(counts) + num_padding, len(counts) + num_padding, len(counts) + 4
    q_TKH, k_TKH = normals(T, K, H), normals(1, K, H) + np.float32(0.5) * normals(T, K, H)
    q_TKH, k_TKH = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q_TKH, k_TKH))
    log_decay_TKG = -np.exp(2 * normals(T, K, G) - 3)
    beta_TKG = 1 / (1 + np.exp(-normals(T, K, G)))
    row_R = np.full(R, N - 1, np.int32)
    row_R[: len(counts)] = np.random.default_rng(0).permutation(N - 1)[: len(counts)]
    is_new_R = np.arange(R) % 3 == 1
    state_NKGHV = normals(N, K, G, H, V)
    state_NKGHV[row_R[is_new_R]] = np.nan
    ends = np.minimum(np.cumsum((*counts, *(0,) * num_padding)), sum(counts))
    start_R1 = np.concatenate([[0], ends]).astype(np.int32)
    tokens = (q_TKH.astype(dtype), k_TKH.astype(dtype), normals.of(dtype, T, K, G, V), log_decay_TKG, beta_TKG)
    return state_NKGHV, (*tokens, row_R, is_new_R, *(() if is_decode else (start_R1,)))


def host_error(state: Any, constants: tuple[Any, ...], got: Any) -> float:
    """The largest difference, relative to the largest value; infinite where another row's state has changed."""
    tokens, (row_R, is_new_R, *start) = constants[:5], (np.asarray(x) for x in constants[5:])
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
        expected = plain(begin, *(np.asarray(x[part]).astype(np.float64) for x in tokens))
        errors += map(_difference, (out[part], after[row]), expected)
    return float(np.max(errors))


def plain(
    state_KGHV: np.ndarray,
    q_TKH: np.ndarray,
    k_TKH: np.ndarray,
    v_TKGV: np.ndarray,
    log_decay_TKG: np.ndarray,
    beta_TKG: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [T, K, G, V] of one row and its state after them, in NumPy."""
    outs = np.empty(v_TKGV.shape)
    for t, (q_KH, k_KH) in enumerate(zip(q_TKH, k_TKH, strict=True)):
        state_KGHV = state_KGHV * np.exp(log_decay_TKG[t])[..., None, None]
        known_KGV = np.einsum("kh,kghv->kgv", k_KH, state_KGHV)
        added_KGV = beta_TKG[t][..., None] * (v_TKGV[t] - known_KGV)
        state_KGHV = state_KGHV + k_KH[:, None, :, None] * added_KGV[:, :, None]
        outs[t] = np.einsum("kh,kghv->kgv", q_KH, state_KGHV)
    return outs, state_KGHV


def _difference(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got.astype(np.float64) - expected).max() / max(float(np.abs(expected).max()), 1e-30))

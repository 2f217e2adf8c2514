"""Segment attention: near what NumPy computes in float64, segment by segment; what padding holds is NaN."""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.host import Normals
from pallas_kernels.segment_attention import segment_attention

TOLERANCE = {"float32": 2e-5, "float16": 1e-3, "bfloat16": 8e-3}
"""Bound of the largest difference, relative to the largest result: weights and results are rounded."""
LENGTHS = {
    "ragged": (5, 1, 200, 64, 130, 3),
    "one segment": (448,),
    "windows": (64,) * 7,
    "single patches": (1,) * 150 + (40, 1, 1),
}
"""Patches of the segments, by the name of a case at an engine's start."""
_MAX_HEADS = 4
"""Heads of a case at an engine's start: each is computed alike."""
_MAX_COMPARED = 256
"""Patches whose results are compared, where there are more."""


@dataclass(frozen=True)
class Shapes:
    """An encoder's attention on one device."""

    dtype: str
    num_heads: int
    head_dim: int

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


def cases(shapes: Shapes, implementation: str, *, interpret: bool) -> list[Case]:
    """Segments of several kinds, with padding behind them but for one."""
    shapes = replace(shapes, num_heads=min(shapes.num_heads, _MAX_HEADS))
    call = functools.partial(segment_attention, scale=shapes.scale, implementation=implementation, interpret=interpret)
    error = functools.partial(host_error, scale=shapes.scale)
    return [
        Case(
            name,
            functools.partial(host_arrays, shapes, lengths, num_padding=0 if name == "windows" else 45),
            {implementation: call},
            error,
            TOLERANCE[shapes.dtype],
        )
        for name, lengths in LENGTHS.items()
    ]


def segment_ids(lengths: tuple[int, ...], num_padding: int) -> np.ndarray:
    """int32 [P] of segments with so many patches."""
    ids = np.repeat(np.arange(len(lengths)), np.asarray(lengths, np.int64))
    return np.concatenate([ids, np.full(num_padding, -1)]).astype(np.int32)


def host_arrays(shapes: Shapes, lengths: tuple[int, ...], num_padding: int) -> tuple[Any, tuple[Any, ...]]:
    """Queries, and keys, values and segments; padding of NaN."""
    normals, segment_P = Normals(), segment_ids(lengths, num_padding)
    shape = (len(segment_P), shapes.num_heads, shapes.head_dim)
    # Queries of twice the size: some weights are near 1, so that a key in the wrong place shows.
    q_PHd, k_PHd, v_PHd = 2 * normals(*shape), normals(*shape), normals(*shape)
    for array in (q_PHd, k_PHd, v_PHd):
        array[segment_P < 0] = np.nan
    return q_PHd.astype(shapes.dtype), (k_PHd.astype(shapes.dtype), v_PHd.astype(shapes.dtype), segment_P)


def host_error(q: Any, constants: tuple[Any, ...], got: Any, *, scale: float) -> float:
    """The largest difference, relative to the largest result; infinite where padding has another result than 0.

    Of many patches it compares the first and the last of segments, and others in even steps; all results must be finite.
    """
    q_PHd, k_PHd, v_PHd, segment_P, got_PHd = (np.asarray(array) for array in (q, *constants, got))
    if np.any(got_PHd[segment_P < 0] != 0):
        return math.inf
    compared = compared_patches(segment_P)
    if not len(compared):
        return 0.0
    expected = plain(q_PHd, k_PHd, v_PHd, segment_P, scale=scale, patches=compared)
    error = np.abs(got_PHd[compared].astype(np.float64) - expected).max() / max(float(np.abs(expected).max()), 1e-30)
    return float(error) if np.isfinite(got_PHd.astype(np.float32)).all() else math.nan


def compared_patches(segment_P: np.ndarray) -> np.ndarray:
    """The patches whose results are compared."""
    real = np.flatnonzero(segment_P >= 0)
    if len(real) <= _MAX_COMPARED:
        return real
    last = np.flatnonzero(np.diff(segment_P[real], append=-1))
    edges = np.concatenate([[0], last, last[:-1] + 1])
    steps = np.linspace(0, len(real) - 1, _MAX_COMPARED // 2, dtype=np.int64)
    return real[np.unique(np.concatenate([np.sort(edges)[: _MAX_COMPARED // 2], steps]))]


def plain(
    q_PHd: np.ndarray, k_PHd: np.ndarray, v_PHd: np.ndarray, segment_P: np.ndarray, *, scale: float, patches: np.ndarray
) -> np.ndarray:
    """The results of some patches, none of them padding, in NumPy and float64."""
    out = np.empty((len(patches), *q_PHd.shape[1:]))
    for segment in np.unique(segment_P[patches]):
        is_own, is_key = segment_P[patches] == segment, segment_P == segment
        q_MHd, k_kHd, v_kHd = (
            x.astype(np.float64).swapaxes(0, 1) for x in (q_PHd[patches[is_own]], k_PHd[is_key], v_PHd[is_key])
        )
        scores_HMk = q_MHd @ k_kHd.swapaxes(1, 2) * scale
        weights_HMk = np.exp(scores_HMk - scores_HMk.max(axis=2, keepdims=True))
        out[is_own] = (weights_HMk @ v_kHd / weights_HMk.sum(axis=2, keepdims=True)).swapaxes(0, 1)
    return out

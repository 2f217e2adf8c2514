"""Indices that a vision encoder needs for each patch in addition to its pixels: segments, positions, windows. Computed on the host."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxllm.model_parts import Vision

Grid = tuple[int, int, int]
"""Patches of an image in time, from top to bottom, and from left to right."""


class PatchIndices(NamedTuple):
    """Indices of each patch of some images, image after image, each frame in cells of merge_size² patches, then of padding.

    Arrays of NumPy on the host, of JAX in a trace.
    """

    segment_P: np.ndarray | Array
    """int32: the number of its image's frame among all frames, whose patches attend to each other; -1 for padding."""
    place_P2: np.ndarray | Array
    """int32: row and column."""
    taps_P4: np.ndarray | Array
    """int32: rows of the table of learned positions that are mixed."""
    weights_P4: np.ndarray | Array
    """float32: their weights, 0 for padding."""
    window_P: np.ndarray | Array | None = None
    """int32, of encoders with windows: as segment_P for the layers that attend within them, of patches in `order_P`."""
    order_P: np.ndarray | Array | None = None
    """int32: the patches in an order in which those of a window, and those of a cell, come one after the other; the arrays above are in
    this order."""

    def pack(self) -> np.ndarray:
        """int32 [K, P]: all indices as one array, for one copy to the device."""
        rows = [self.segment_P[None], self.place_P2.T, self.taps_P4.T, self.weights_P4.view(np.int32).T]
        rows += [row[None] for row in (self.window_P, self.order_P) if row is not None]
        return np.ascontiguousarray(np.concatenate(rows))

    @staticmethod
    def unpack(packed_KP: Array) -> "PatchIndices":
        """Inverse of `pack`, in a trace."""
        weights_4P = lax.bitcast_convert_type(packed_KP[7:11], jnp.float32)
        window_P, order_P = (packed_KP[11], packed_KP[12]) if len(packed_KP) > 11 else (None, None)
        return PatchIndices(packed_KP[0], packed_KP[1:3].T, packed_KP[3:7].T, weights_4P.T, window_P, order_P)

    @staticmethod
    def num_rows(vision: Vision) -> int:
        """The K of `pack`."""
        return 13 if vision.encoder is not None and vision.encoder.window else 11


def patch_indices(vision: Vision, grids: Sequence[Grid], num_patches: int) -> PatchIndices:
    """The indices of the patches of images with these grids, padded to num_patches. NumPy only."""
    merge, encoder = vision.merge_size, vision.encoder
    assert encoder is not None
    total = sum(t * h * w for t, h, w in grids)
    assert total <= num_patches, f"{total} patches, place for {num_patches}"
    assert all(h % merge == 0 and w % merge == 0 for _, h, w in grids), f"{grids} are not of whole cells"
    segment_P = np.full(num_patches, -1, np.int32)
    place_P2 = np.zeros((num_patches, 2), np.int32)
    taps_P4, weights_P4 = np.zeros((num_patches, 4), np.int32), np.zeros((num_patches, 4), np.float32)
    window_P, order_P = np.full(num_patches, -1, np.int32), np.arange(num_patches, dtype=np.int32)
    start = num_frames = num_windows = 0
    for t, h, w in grids:
        place_N2 = _places(h, w, merge)
        taps_N4, weights_N4 = _taps(place_N2, h, w, vision.position_grid)
        window_N = _windows(place_N2, w, encoder.window)
        # Cells of a window one after the other; a stable sort keeps the patches of a cell together.
        order_N = np.argsort(window_N, kind="stable")
        for _ in range(t):
            own = slice(start, start + h * w)
            segment_P[own] = num_frames
            place_P2[own], taps_P4[own], weights_P4[own] = place_N2[order_N], taps_N4[order_N], weights_N4[order_N]
            window_P[own] = num_windows + window_N[order_N]
            order_P[own] = start + order_N
            start, num_frames, num_windows = own.stop, num_frames + 1, num_windows + int(window_N.max()) + 1
    indices = PatchIndices(segment_P, place_P2, taps_P4, weights_P4)
    return indices._replace(window_P=window_P, order_P=order_P) if encoder.window else indices


def _places(h: int, w: int, merge: int) -> np.ndarray:
    """int32 [h·w, 2]: row and column of a frame's patches, cell by cell."""
    cells = np.indices((h, w), np.int32).reshape(2, h // merge, merge, w // merge, merge)
    return cells.transpose(1, 3, 2, 4, 0).reshape(h * w, 2)


def _taps(place_N2: np.ndarray, h: int, w: int, grid: int) -> tuple[np.ndarray, np.ndarray]:
    """Bilinear interpolation of a table of grid × grid positions at h × w patches: the four nearest positions of each patch, and their
    weights (float32). Corners of the image are corners of the table."""
    if not grid:
        return np.zeros((len(place_N2), 4), np.int32), np.zeros((len(place_N2), 4), np.float32)
    low, high, part = [], [], []
    for place_N, size in zip(place_N2.T, (h, w), strict=True):
        source_N = np.linspace(0, grid - 1, size, dtype=np.float32)[place_N]
        low_N = source_N.astype(np.int32)
        low.append(low_N)
        high.append(np.minimum(low_N + 1, grid - 1))
        part.append(source_N - low_N)
    (y, x), (y1, x1), (fy, fx) = low, high, part
    taps_N4 = np.stack([y * grid + x, y * grid + x1, y1 * grid + x, y1 * grid + x1], axis=1)
    one = np.float32(1)
    weights_N4 = np.stack([(one - fy) * (one - fx), (one - fy) * fx, fy * (one - fx), fy * fx], axis=1)
    return taps_N4, weights_N4


def _windows(place_N2: np.ndarray, w: int, window: int) -> np.ndarray:
    """int32 [N]: the number of each patch's window, from left to right and from top to bottom; those at the edges may be smaller."""
    if not window:
        return np.zeros(len(place_N2), np.int32)
    row_N, column_N = place_N2.T // window
    return row_N * -(-w // window) + column_N

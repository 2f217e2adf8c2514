"""The patches of an image as bytes: a header of four int32 (little endian: frames, rows, columns, values of a patch), then uint8."""

import struct

import numpy as np

_HEADER = struct.Struct("<4i")


def pack(grid_thw: tuple[int, int, int], patches: np.ndarray) -> bytes:
    """The bytes of patches uint8 [frames · rows · columns, values]. grid_thw counts patches."""
    time, rows, columns = grid_thw
    assert patches.dtype == np.uint8 and patches.ndim == 2 and len(patches) == time * rows * columns, (patches.shape, grid_thw)
    return b"".join((_HEADER.pack(time, rows, columns, patches.shape[1]), np.ascontiguousarray(patches).data))


def unpack(payload: bytes) -> tuple[tuple[int, int, int], np.ndarray]:
    """The grid, in patches, and the patches, uint8 [frames · rows · columns, values], read-only: a view of the bytes."""
    time, rows, columns, values = _HEADER.unpack_from(payload)
    patches = np.frombuffer(payload, np.uint8, offset=_HEADER.size).reshape(time * rows * columns, values)
    return (time, rows, columns), patches

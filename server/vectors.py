"""Serializes vectors: as JSON numbers, base64 or bytes, in the requested number format and byte order."""

import asyncio
import base64
import sys

import ml_dtypes
import msgspec
import numpy as np

_DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
_ROWS_AT_ONCE = 8
"""Number of vectors written before other tasks run: writing one takes some tenths of a millisecond."""


def as_bytes(vectors: np.ndarray, dtype: str, endianness: str) -> bytes:
    """The numbers as bytes, row by row."""
    array = np.ascontiguousarray(_cast(vectors, dtype))
    if endianness not in ("native", sys.byteorder) and array.itemsize > 1:
        array = array.view(f"u{array.itemsize}").byteswap()
    return array.tobytes()


async def as_json(vectors: np.ndarray, encoding: str, dtype: str, endianness: str) -> list[bytes]:
    """A JSON value in pieces: for base64 a string, else lists of numbers in `dtype`. Lets other tasks run in between."""
    await asyncio.sleep(0)
    if encoding == "base64":
        return [b'"', base64.b64encode(as_bytes(vectors, dtype, endianness)), b'"']
    numbers = _cast(vectors, dtype).astype(np.float32)
    if numbers.ndim == 1:
        return [msgspec.json.encode(numbers.tolist())]
    pieces = []
    for first in range(0, len(numbers), _ROWS_AT_ONCE):
        rows = numbers[first : first + _ROWS_AT_ONCE]
        pieces += [b"," if first else b"[", msgspec.json.encode(rows.tolist())[1:-1]]
        await asyncio.sleep(0)
    return [*pieces, b"]"]


def _cast(vectors: np.ndarray, dtype: str) -> np.ndarray:
    """Clip numbers to the range of a narrower type: JSON has no infinity."""
    if dtype == "float32":
        return vectors
    largest = float(ml_dtypes.finfo(_DTYPES[dtype]).max)
    return np.clip(vectors, -largest, largest).astype(_DTYPES[dtype])

"""Blocks of GGUF's number formats as codes, scales and minimums: a weight is code * scale - minimum, or a table's value * scale.

Source: ggml's ggml-common.h and ggml-quants.c.
"""

import concurrent.futures
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

SUFFIX = ".blocks"
"""Suffix by which readers know that blocks are asked for, and not the tensor."""
_BYTES_AT_ONCE = 1 << 16
"""Bytes that a thread decodes at once: what it makes on the way stays in a core's cache."""

Part = Callable[[np.ndarray], np.ndarray]
"""Maps blocks, uint8 [..., bytes of a block], to values [..., values]."""


@dataclass(frozen=True)
class Blocks:
    """A number format whose weights stay in 4 or 8 bits."""

    number: str
    """A key of `jaxllm.quantization.numbers.NUMBERS`; int8 also where a format has 5 or 6 bits."""
    num_bytes: int
    """Bytes of a block."""
    group: int
    """Values that share a scale."""
    codes: Part
    """Codes of a block; of 4 bits two in a byte, the lower half first."""
    scale: Part
    scale_type: str = "float16"
    minimum: Part | None = None
    minimum_type: str = "float32"

    def part(self, name: str, blocks: np.ndarray) -> np.ndarray:
        """A part, [rows, ...], of rows of blocks, uint8 [rows, bytes]."""
        function: Part = getattr(self, name)
        step = max(1, _BYTES_AT_ONCE // blocks.shape[1])

        def of_rows(start: int) -> np.ndarray:
            rows = np.ascontiguousarray(blocks[start : start + step])
            return function(rows.reshape(len(rows), -1, self.num_bytes)).reshape(len(rows), -1)

        starts = range(0, len(blocks), step)
        if len(starts) == 1:
            return of_rows(0)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:  # NumPy computes without Python's lock
            return np.concatenate(list(threads.map(of_rows, starts)))


def _floats(start: int) -> Part:
    """The float16 at a byte of each block."""
    return lambda blocks: np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)


def _halves(start: int, run: int, num_runs: int = 1) -> Part:
    """Codes of runs of bytes, whose lower halves are the first values of the run, and the upper ones those after them."""

    def codes(blocks: np.ndarray) -> np.ndarray:
        qs = np.ascontiguousarray(blocks[..., start : start + run * num_runs])
        pairs = qs.view("<u2").reshape(*blocks.shape[:-1], num_runs, run // 2)
        packed = np.empty((*pairs.shape[:-1], 2, run // 2), np.uint8)
        packed[..., 0, :] = pairs & 0x0F | pairs >> 4 & 0xF0
        packed[..., 1, :] = pairs >> 4 & 0x0F | pairs >> 8 & 0xF0
        return packed

    return codes


def _nibbles(bytes_: np.ndarray) -> np.ndarray:
    """[..., runs, n] to [..., runs, 2, n]: the lower halves of a run of bytes, then the upper ones."""
    return np.stack([bytes_ & 15, bytes_ >> 4], axis=-2)


def _codes_of_5_bits(high: int, low: int, zero: int) -> Part:
    """Of Q5_0 and Q5_1: 32 upper bits at byte `high`, the lower halves from byte `low` on."""

    def codes(blocks: np.ndarray) -> np.ndarray:
        upper = np.unpackbits(blocks[..., high : high + 4], axis=-1, bitorder="little")
        lower = _nibbles(blocks[..., None, low : low + 16]).reshape(upper.shape)
        return (lower | upper << 4).astype(np.int8) - np.int8(zero)

    return codes


def _codes_of_q5_k(blocks: np.ndarray) -> np.ndarray:
    lower = _nibbles(blocks[..., 48:].reshape(*blocks.shape[:-1], 4, 32)).reshape(*blocks.shape[:-1], 8, 32)
    upper = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return (lower | upper << 4).astype(np.int8)


def _codes_of_q6_k(blocks: np.ndarray) -> np.ndarray:
    lower = _nibbles(blocks[..., :128].reshape(*blocks.shape[:-1], 2, 64)).reshape(*blocks.shape[:-1], 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    upper = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32) >> shifts & 3
    return (lower | upper << 4).astype(np.int8) - np.int8(32)


def _scale_of_q6_k(blocks: np.ndarray) -> np.ndarray:
    return _floats(208)(blocks).astype(np.float32) * blocks[..., 192:208].view(np.int8).astype(np.float32)


def _scale_of_k(blocks: np.ndarray) -> np.ndarray:
    """Of Q4_K and Q5_K: 8 factors of 6 bits."""
    first, third = blocks[..., 4:8], blocks[..., 12:16]
    factors = np.concatenate([first & 63, third & 15 | first >> 2 & 48], axis=-1)
    return _floats(0)(blocks).astype(np.float32) * factors.astype(np.float32)


def _minimum_of_k(blocks: np.ndarray) -> np.ndarray:
    second, third = blocks[..., 8:12], blocks[..., 12:16]
    factors = np.concatenate([second & 63, third >> 4 | second >> 2 & 48], axis=-1)
    return _floats(2)(blocks).astype(np.float32) * factors.astype(np.float32)


def _minus_second(blocks: np.ndarray) -> np.ndarray:
    """The minimum of formats that add the second number of a block."""
    return -_floats(2)(blocks)


def _with_float16(number: str, num_bytes: int, codes: Part) -> Blocks:
    """A format of blocks of 32 values that begin with a scale and what is added."""
    return Blocks(number, num_bytes, 32, codes, _floats(0), minimum=_minus_second, minimum_type="float16")


def _k(number: str, num_bytes: int, codes: Part) -> Blocks:
    return Blocks(number, num_bytes, 32, codes, _scale_of_k, "float32", _minimum_of_k)


BLOCKS = {
    "Q4_0": Blocks("int4", 18, 32, _halves(2, 16), _floats(0)),
    "Q4_1": _with_float16("uint4", 20, _halves(4, 16)),
    "Q5_0": Blocks("int8", 22, 32, _codes_of_5_bits(2, 6, 16), _floats(0)),
    "Q5_1": _with_float16("int8", 24, _codes_of_5_bits(4, 8, 0)),
    "Q8_0": Blocks("int8", 34, 32, lambda blocks: blocks[..., 2:].view(np.int8), _floats(0)),
    "Q4_K": _k("uint4", 144, _halves(16, 32, 4)),
    "Q5_K": _k("int8", 176, _codes_of_q5_k),
    "Q6_K": Blocks("int8", 210, 16, _codes_of_q6_k, _scale_of_q6_k, "float32"),
    "IQ4_NL": Blocks("iq4_nl", 18, 32, _halves(2, 16), _floats(0)),
    "MXFP4": Blocks("e2m1", 17, 32, _halves(1, 16), lambda blocks: blocks[..., :1], "uint8"),
}
"""By ggml's name. Scales and minimums that ggml stores as products of two numbers are float32, which takes 1.5 bits a weight more."""

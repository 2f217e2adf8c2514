"""Products with packed weights: near what NumPy computes in float64 from the numbers as a checkpoint stores them.

Rows of padding are NaN and must reach no other row; every number is also decoded, to the bit.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.host import Normals
from pallas_kernels.quantized_matmul import DECODERS, PLAIN, TILE, Packed, decoder_of, pack, product
from pallas_kernels.quantized_matmul.decoders import NF4
from pallas_kernels.quantized_matmul.packed import MIDDLES

_UNIT = 2.0**-8
"""Largest relative rounding of bfloat16."""
TOLERANCE_OF_SUMS = {True: 1e-6, False: 1e-5}
"""Largest distance of results in float32 of kernels, of weights that bfloat16 holds exactly, by whether sums of groups are scaled. Tensor
cores truncate where they add, more often in long sums."""
_NUM_ROWS = (1, 13, 150)
"""One; a few; and so many that another kernel multiplies them. At an engine's start."""
_MAX_OUTPUTS = 1 << 11
"""Outputs of a weight at an engine's start: blocks of outputs are computed alike."""
_STRIDE = TILE - 3
"""Outputs that are compared, of many: some of every block, at changing places of it."""
_MIDDLE_EXPONENT = 122
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Shapes:
    """A weight on one device, and how it is stored."""

    number: str
    num_outputs: int
    num_inputs: int
    group: int | None
    scale_type: str = "bfloat16"
    """uint8: the exponents of powers of two."""
    has_zeros: bool = False
    has_factor: bool = False
    dtype: str = "bfloat16"
    """Type of activations."""
    result: str | None = None
    """Type of results; None: that of activations."""

    @property
    def num_groups(self) -> int:
        return 1 if self.group is None else self.num_inputs // self.group

    @property
    def is_exact(self) -> bool:
        """Whether kernels round neither weights nor results."""
        return self.result == "float32" and self.group is None and self.number != "nf4"

    def __str__(self) -> str:
        of = f"g{self.group}" if self.group else "by output"
        notes = [
            of,
            self.scale_type,
            *["zeros"] * self.has_zeros,
            *["factor"] * self.has_factor,
            *[f"to {self.result}"] * (self.result is not None),
        ]
        return f"{self.number} {self.num_outputs}x{self.num_inputs} {' '.join(notes)}"


@dataclass(frozen=True)
class Stored:
    """A weight as a checkpoint has it: see `pack`."""

    codes: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | None = None
    factor: np.ndarray | None = None

    def pack(self, number: str) -> Packed:
        """For the kernels."""
        return pack(number, self.codes, self.scale, self.zero, self.factor)

    def values(self, number: str, outputs: np.ndarray) -> np.ndarray:
        """float64 [outputs, K]"""
        codes = self.codes.view(np.uint8)[outputs]
        if bits_of(number) == 4:
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
        if number in MIDDLES:
            values = codes.astype(np.float64) - (MIDDLES[number] if self.zero is None else 0)
        elif number == "e2m1":
            values = np.array([*_MAGNITUDES, *(-x for x in _MAGNITUDES)])[codes]
        elif number == "nf4":
            values = np.array(NF4)[codes]
        else:
            values = codes.view(np.int8 if number == "int8" else ml_dtypes.float8_e4m3fn).astype(np.float64)
        scale = self.scale[outputs]
        scale = np.exp2(scale.astype(np.float64) - 127) if scale.dtype == np.uint8 else scale.astype(np.float64)
        copies = values.shape[1] // scale.shape[1]
        if self.zero is not None:
            values -= np.repeat(self.zero[outputs].astype(np.float64), copies, axis=1)
        values *= np.repeat(scale, copies, axis=1)
        return values if self.factor is None else values * self.factor[outputs, None]


def bits_of(number: str) -> int:
    """Bits of a code."""
    return DECODERS[decoder_of(number)].bits


def cases(shapes: Shapes, implementation: str, *, interpret: bool) -> list[Case]:
    """A row, a few and many; the last ones are padding."""
    small = Shapes(**{**shapes.__dict__, "num_outputs": min(shapes.num_outputs, _MAX_OUTPUTS)})
    call = functools.partial(product, dtype=shapes.result, implementation=implementation, interpret=interpret)
    return [
        Case(
            f"{small}, {num_rows} rows",
            functools.partial(host_arrays, small, num_rows),
            {implementation: call},
            functools.partial(host_error, small),
            TOLERANCE_OF_SUMS[False] if small.is_exact and implementation not in PLAIN else tolerance(small),
        )
        for num_rows in _NUM_ROWS
    ]


def stored(shapes: Shapes) -> Stored:
    """Random numbers of all kinds but NaN, the same for the same shapes."""
    rng = np.random.default_rng(shapes.num_outputs + shapes.num_inputs)
    N, K, bits = shapes.num_outputs, shapes.num_inputs, bits_of(shapes.number)
    codes: Any = rng.integers(0, 256, (N, K * bits // 8), dtype=np.uint8)
    if shapes.number == "e4m3":
        codes[codes & 0x7F == 0x7F] = 0x38
        codes = codes.view(ml_dtypes.float8_e4m3fn)
    elif shapes.number == "int8":
        codes = codes.view(np.int8)
    by_group = N, shapes.num_groups
    scale: Any
    if shapes.scale_type == "uint8":
        scale = rng.integers(_MIDDLE_EXPONENT - 2, _MIDDLE_EXPONENT + 3, by_group, dtype=np.uint8)
    else:
        scale = (rng.uniform(0.5, 1.5, by_group) / math.sqrt(K)).astype(np.float32)
        if shapes.scale_type == "float8_e4m3fn":  # whose smallest numbers are large
            scale = scale * np.float32(math.sqrt(K))
        scale = scale.astype(np.dtype(getattr(ml_dtypes, shapes.scale_type, shapes.scale_type)))
    zero = rng.integers(0, 1 << bits, by_group, dtype=np.uint8) if shapes.has_zeros else None
    factor = rng.uniform(0.5, 1.5, N).astype(np.float32) if shapes.has_factor else None
    return Stored(codes, scale, zero, factor)


def host_arrays(shapes: Shapes, num_rows: int) -> tuple[np.ndarray, tuple[Packed]]:
    """x, of whose rows the last are NaN, and the weight."""
    x_TK = Normals()(num_rows, shapes.num_inputs)
    x_TK[num_real(num_rows) :] = np.nan
    return x_TK.astype(shapes.dtype), (stored(shapes).pack(shapes.number),)


def num_real(num_rows: int) -> int:
    """Rows before the padding."""
    return max(1, num_rows - 3)


def host_error(shapes: Shapes, x: Any, constants: Any, got: Any) -> float:
    """The `distance` of real rows; infinite where a padded output is not 0, NaN where one is not finite. Of many outputs it compares some
    of every block."""
    N, real = shapes.num_outputs, num_real(len(x))
    got_TN = np.asarray(got)[:real]
    if np.any(got_TN[:, N:] != 0):
        return math.inf
    if not np.isfinite(got_TN.astype(np.float32)).all():
        return math.nan
    outputs = np.arange(N) if N <= 8 * TILE else np.unique(np.append(np.arange(0, N, _STRIDE), N - 1))
    expected = np.asarray(x)[:real].astype(np.float64) @ stored(shapes).values(shapes.number, outputs).T
    return distance(got_TN[:, outputs].astype(np.float64), expected)


def tolerance(shapes: Shapes) -> float:
    """Largest `distance` of results in bfloat16, whose weights are rounded n times: their product with scales, scales of groups that
    bfloat16 does not hold, and the table of nf4.

    The result is rounded by up to a unit of the largest one. A weight's rounding is 0.42 units of it in root mean square; n of them, which
    are independent, move a sum by 0.42 sqrt(n) units of the sums' deviation. The largest of such errors is about three times that, and the
    largest sum at least 2.5 deviations.
    """
    is_scale_rounded = shapes.group is not None and shapes.scale_type in ("float16", "float32")
    num_roundings = 1 + is_scale_rounded + (shapes.number == "nf4")
    return _UNIT * (1 + math.sqrt(num_roundings) * 0.42 * 3 / 2.5)


def distance(got: np.ndarray, expected: np.ndarray) -> float:
    """The larger of two relative differences: of the norm, and of the largest value."""
    difference, largest = got - expected, max(float(np.abs(expected).max()), 1e-30)
    norm = float(np.linalg.norm(difference)) / max(float(np.linalg.norm(expected)), 1e-30)
    return max(norm, float(np.abs(difference).max()) / largest)


def every_code(shapes: Shapes) -> Stored:
    """A weight in which each input has all codes. Scales are powers of two, so that no product with them is rounded."""
    N, K, bits = shapes.num_outputs, shapes.num_inputs, bits_of(shapes.number)
    codes: Any = ((np.arange(N)[:, None] + 37 * np.arange(K)) % (1 << bits)).astype(np.uint8)
    if bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    if shapes.number == "e4m3":
        codes[codes & 0x7F == 0x7F] = 0x38
        codes = codes.view(ml_dtypes.float8_e4m3fn)
    groups = np.arange(N)[:, None] + np.arange(shapes.num_groups)
    scale = np.exp2(groups % 5 - 2.0).astype(np.float32)
    zero = (groups * 7 % (1 << bits)).astype(np.uint8) if shapes.has_zeros else None
    return Stored(codes.view(np.int8) if shapes.number == "int8" else codes, scale, zero)


def picked_inputs(num_inputs: int) -> np.ndarray:
    """TILE of them, of all places in a tile, and of every tile."""
    row_M, num_tiles = np.arange(TILE), num_inputs // TILE
    return row_M * num_tiles + row_M % num_tiles


def decoding_arrays(shapes: Shapes) -> tuple[np.ndarray, tuple[Packed]]:
    """x that picks inputs, and the weight of `every_code`: the result is a part of the weight, transposed."""
    return np.eye(shapes.num_inputs, dtype=shapes.dtype)[picked_inputs(shapes.num_inputs)], (
        every_code(shapes).pack(shapes.number),
    )


def decoding_error(shapes: Shapes, x: Any, constants: Any, got: Any) -> float:
    """The largest difference from the numbers in bfloat16, to be 0."""
    expected = every_code(shapes).values(shapes.number, np.arange(shapes.num_outputs))[:, picked_inputs(shapes.num_inputs)].T
    expected = expected.astype(ml_dtypes.bfloat16).astype(np.float64)
    return float(np.abs(np.asarray(got)[:, : shapes.num_outputs].astype(np.float64) - expected).max())

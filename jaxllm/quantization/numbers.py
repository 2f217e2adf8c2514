"""Numbers of 4 and 8 bits as formats of weights store them, and what groups of them stand for: NumPy and JAX alike."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from jaxllm.weight_format import Array, Arrays

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""By code. Source: OCP Microscaling Formats (MX) Specification 1.0, 2023, table 5."""
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""By code. Source: arXiv:2305.14314, appendix E."""
_MAGNITUDES = (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4)
FP4 = (*_MAGNITUDES, *(0.0 - value for value in _MAGNITUDES))
"""bitsandbytes' own, by code."""
IQ4_NL = tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)))
"""By code. Source: ggml-common.h."""
EXPONENT_BIAS = 127
"""Added to the exponents of scales that are powers of two."""
NO_EXPONENT = 255
"""The scale that is no number. Source: OCP Microscaling Formats (MX) Specification 1.0, 2023, section 5.4.1."""


class Number(NamedTuple):
    """Meaning of the codes of a weight."""

    bits: int
    code_type: str
    """Type of the array that holds the codes: two in a byte, or one in a value."""
    deviation: float
    """Standard deviation of the values of random codes."""
    middle: int = 0
    """The code of zero, where a group does not say its own."""
    table: tuple[float, ...] | None = None
    """Values by code; None: codes are the values."""

    @property
    def per_value(self) -> int:
        """Codes in a value of the array."""
        return 8 // self.bits


NUMBERS = {
    "int4": Number(4, "uint8", 4.6, middle=8),
    "uint4": Number(4, "uint8", 4.6),
    "e2m1": Number(4, "uint8", 2.9, table=E2M1),
    "nf4": Number(4, "uint8", 0.54, table=NF4),
    "fp4": Number(4, "uint8", 0.49, table=FP4),
    "iq4_nl": Number(4, "uint8", 68.5, table=IQ4_NL),
    "int8": Number(8, "int8", 73.9),
    "uint8b128": Number(8, "uint8", 73.9, middle=128),
    "e4m3": Number(8, "float8_e4m3fn", 100.0),
}
"""By name. `uint8b128` is vLLM's name: codes without sign, of which 128 means zero, as 8 does of `int4`."""


@dataclass(frozen=True)
class Scheme:
    """How the weights of a module are stored: (value - zero) * scale * factor - minimum, value being a number's of a code."""

    number: str
    """A key of NUMBERS."""
    group: int | None = None
    """Inputs that share a scale; None: all of an output."""
    zeros: bool = False
    """Each group has the code that means zero."""
    minimums: bool = False
    """Each group has a number that is subtracted."""
    scale_type: str = "float32"
    """uint8: exponents of two, plus EXPONENT_BIAS."""
    minimum_type: str = "float32"
    factor: bool = False
    """Each output has a further factor of its scales."""

    def __str__(self) -> str:
        return f"{self.number}{'' if self.group is None else f' in groups of {self.group}'}{' with zero points' * self.zeros}"


NVFP4 = Scheme("e2m1", 16, scale_type="float8_e4m3fn", factor=True)


def widen(arrays: "Arrays", scheme: Scheme, xp: Any) -> "Array":
    """The weights, float32 [*outputs, inputs]. xp: numpy or jax.numpy."""
    if NUMBERS[scheme.number].bits == 8:
        return scaled(arrays["codes"], arrays, scheme, xp)
    codes = xp.stack(nibbles(arrays["codes"]), axis=-1)
    return scaled(codes.reshape(*codes.shape[:-2], -1), arrays, scheme, xp)


def nibbles(codes: "Array") -> tuple["Array", "Array"]:
    """The codes of even and of odd inputs, of bytes that hold two."""
    return codes & 15, codes >> 4


def split(codes: "Array", scheme: Scheme) -> tuple["Array", ...]:
    """The codes of an array, those of bytes that hold two as two arrays."""
    return nibbles(codes) if NUMBERS[scheme.number].bits == 4 else (codes,)


def plain_codes(codes: "np.ndarray", number: Number) -> "np.ndarray":
    """The values of codes [outputs, n] as int8 [outputs, inputs], where they are whole numbers."""
    if number.bits == 4:
        codes = np.stack(nibbles(codes), axis=-1).reshape(len(codes), -1)
    table = np.arange(2**number.bits) - number.middle if number.table is None else np.array(number.table)
    return codes if number.code_type == "int8" else table.astype(np.int8)[codes]


def scaled(codes: "Array", arrays: "Arrays", scheme: Scheme, xp: Any) -> "Array":
    """The weights with these codes, float32 in their shape [*outputs, n], of which each group has equally many:
    (value - zero) * scale * factor - minimum."""
    number, scale = NUMBERS[scheme.number], arrays["scale"]
    values = codes.astype("float32") if number.table is None else xp.asarray(number.table, "float32")[codes]
    values = values.reshape(*scale.shape, -1)
    if "zero" in arrays:
        values = values - arrays["zero"][..., None].astype("float32")
    elif number.middle:
        values = values - xp.float32(number.middle)
    if scale.dtype == "uint8":
        scale = xp.ldexp(xp.float32(1), scale.astype("int32") - EXPONENT_BIAS)
    values = values * scale[..., None].astype("float32")
    if "factor" in arrays:
        values = values * arrays["factor"][..., None, None].astype("float32")
    if "minimum" in arrays:
        values = values - arrays["minimum"][..., None].astype("float32")
    return values.reshape(codes.shape)

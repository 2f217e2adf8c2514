"""Numbers of 4 and 8 bits as bfloat16, in plain JAX, and by a few instructions for the two of a register. All but nf4 are exact.

Register r of a word of packed codes (see `packed`) has the codes at bits b * r and b * r + 16, b bits each, unless the kind of number has
an arrangement of its own. `instructions` are PTX that turn a word $n into its registers $0 to $(n - 1), n = 16 / b; they may use the
32-bit registers of TEMPORARIES, and read the word after they wrote a register. Bits of a bfloat16: sign 15, exponent 14 to 7, mantissa 6
to 0. So 0x4300 | n is 128 + n for n below 128, and a small float whose exponent and mantissa are moved to the lower end of both fields is
a subnormal or normal number that is a power of two too small. The instruction that mends it can be left out where scales do.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

TEMPORARIES = "a", "b", "c", "d", "m", "t0", "t1", "t2", "t3"
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""By code. Source: arXiv:2305.14314, appendix E."""
_AND_OR = 0xEA
"""Truth table of lop3 for (x & y) | z."""


@dataclass(frozen=True)
class Decoder:
    """A kind of number."""

    bits: int
    widen: Callable[[jax.Array], jax.Array]
    """From uint8 codes to bfloat16, any shape."""
    instructions: str
    """PTX for a word."""
    too_small: str = ""
    """PTX for a word that makes 2^-`exponent` of each number, plus `bias`."""
    exponent: int = 0
    bias: int = 0
    moves: tuple[tuple[int, int], ...] = ()
    """How the lower half of a word, and so the upper, is arranged: bits of a mask move up by so many, or down."""

    def arranged(self, words: jax.Array) -> jax.Array:
        """int32 words with codes one after the other, as the instructions take them."""
        return _moved(words, self.moves) if self.moves else words

    def in_order(self, words: jax.Array) -> jax.Array:
        """The inverse of `arranged`."""
        return _moved(words, [(mask << up if up > 0 else mask >> -up, -up) for mask, up in self.moves]) if self.moves else words


def _moved(words: jax.Array, moves: Sequence[tuple[int, int]]) -> jax.Array:
    found = jnp.zeros_like(words)
    for mask, up in moves:
        part = words & lax.bitcast_convert_type(jnp.uint32(mask * 0x10001), jnp.int32)
        found |= part << up if up > 0 else lax.shift_right_logical(part, jnp.int32(-up))
    return found


def _each(bits: int, instructions: Callable[[int], str]) -> str:
    """The PTX of a word from what makes register r, $r, of the word, $w."""
    count = 16 // bits
    return " ".join(instructions(r).replace("$r", f"${r}").replace("$w", f"${count}") for r in range(count))


def _widen_int4(codes: jax.Array) -> jax.Array:
    return (codes.astype(jnp.int32) - 8).astype(jnp.bfloat16)


def _int4(r: int) -> str:
    """128 + code, less 136."""
    return (
        f"shr.u32 a, $w, {4 * r}; lop3.b32 a, a, 0x000F000F, 0x43004300, {_AND_OR}; mov.b32 m, 0x43084308; sub.bf16x2 $r, a, m;"
    )


def _biased_int4(r: int) -> str:
    """The code alone, a subnormal number."""
    return f"shr.u32 a, $w, {4 * r}; and.b32 $r, a, 0x000F000F;" if r else "and.b32 $r, $w, 0x000F000F;"


def _widen_e2m1(codes: jax.Array) -> jax.Array:
    exponent, mantissa = codes.astype(jnp.int32) >> 1 & 3, (codes & 1).astype(jnp.float32) / 2
    size = jnp.where(exponent == 0, mantissa, (1 + mantissa) * (1 << jnp.maximum(exponent - 1, 0)).astype(jnp.float32))
    return jnp.where(codes & 8, -size, size).astype(jnp.bfloat16)


_E2M1_MOVES = (
    *((0x0008, 12), (0x0007, 6)),
    *((0x0080, 5), (0x0070, -1)),
    *((0x0800, -2), (0x0700, -8)),
    *((0x8000, -1), (0x6000, -3), (0x1000, 1)),
)
"""Sign, and exponent with mantissa, of four codes: of three as far apart as in a bfloat16, of the fourth in the bits that are left."""


def _e2m1(r: int) -> str:
    """Sign to bit 15, exponent and mantissa to bits 8 to 6."""
    if r == 0:
        return "and.b32 $r, $w, 0x81C081C0;"
    if r < 3:
        return f"shl.b32 a, $w, {3 * r}; and.b32 $r, a, 0x81C081C0;"
    sign = "shl.b32 a, $w, 1; and.b32 a, a, 0x80008000;"
    exponent = f"shr.u32 m, $w, 3; lop3.b32 a, m, 0x01800180, a, {_AND_OR};"
    return f"{sign} {exponent} shr.u32 m, $w, 7; lop3.b32 $r, m, 0x00400040, a, {_AND_OR};"


def _mended(instructions: str, bits: int, exponent: int) -> str:
    """With a product by a power of two for each register."""
    factor = f"0x{(exponent + 127 << 7) * 0x10001:08X}"
    return " ".join([instructions, f"mov.b32 m, {factor};", *(f"mul.rn.bf16x2 ${r}, ${r}, m;" for r in range(16 // bits))])


def _widen_int8(codes: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.bfloat16)


def _int8(r: int) -> str:
    """128 + the lower 7 bits, less 128 or, where the sign is set, 256."""
    low = f"shr.u32 m, $w, {8 * r}; lop3.b32 a, m, 0x007F007F, 0x43004300, {_AND_OR};"
    return f"{low} lop3.b32 m, m, 0x00800080, 0x43004300, {_AND_OR}; sub.bf16x2 $r, a, m;"


def _widen_e4m3(codes: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.bfloat16)


def _e4m3(r: int) -> str:
    """Sign at bit 15, the rest moved to bits 10 to 4. NaN becomes ±480."""
    move = f"shl.b32 m, $w, {8 - 8 * r}; and.b32 a, m, 0x7F007F00; shr.u32 a, a, 4;"
    return f"{move} lop3.b32 $r, m, 0x80008000, a, {_AND_OR};"


def _widen_by_table(table: Sequence[float], codes: jax.Array) -> jax.Array:
    # No array of constants: kernels that are interpreted cannot have one.
    values = [jnp.where(codes == code, jnp.float32(value), 0) for code, value in enumerate(table)]
    return functools.reduce(jnp.add, values).astype(jnp.bfloat16)


def _by_table(table: Sequence[float]) -> str:
    """Four codes at a time, lower and upper bytes apart: the lower three bits of codes choose from each half of the table, the upper bits a
    half. Then the bytes of the lower four codes and of the upper four are put together."""
    words = np.asarray(table, np.float32).astype(jnp.bfloat16).view(np.uint8).reshape(4, 4, 2)
    # The places in both halves of the table, and which half: byte i of the first or of the second.
    text = [f"and.b32 a, $4, 0x77777777; shr.u32 b, $4, 1; lop3.b32 b, b, 0x44444444, 0x32103210, {_AND_OR};"]
    for four in range(2):
        if four:
            text.append("shr.u32 a, a, 16; shr.u32 b, b, 16;")
        for byte in range(2):
            parts = [f"0x{int.from_bytes(words[part, :, byte].tobytes(), 'little'):08X}" for part in range(4)]
            text.append(f"prmt.b32 c, {parts[0]}, {parts[1]}, a; prmt.b32 d, {parts[2]}, {parts[3]}, a;")
            text.append(f"prmt.b32 t{2 * four + byte}, c, d, b;")
    # Of a register: lower and upper byte of a lower code, lower and upper byte of an upper one.
    for r in range(4):
        if r % 2 == 0:
            selector = "0x5140" if r == 0 else "0x7362"
            text.append(f"prmt.b32 c, t0, t1, {selector}; prmt.b32 d, t2, t3, {selector};")
        text.append(f"prmt.b32 ${r}, c, d, {'0x7632' if r % 2 else '0x5410'};")
    return " ".join(text)


def _small_float(bits: int, widen: Callable[[jax.Array], jax.Array], decode: Callable[[int], str], exponent: int) -> Decoder:
    too_small = _each(bits, decode)
    return Decoder(bits, widen, _mended(too_small, bits, exponent), too_small, exponent)


DECODERS = {
    "int4": Decoder(4, _widen_int4, _each(4, _int4), _each(4, _biased_int4), 133, 8),
    "e2m1": replace(_small_float(4, _widen_e2m1, _e2m1, 126), moves=_E2M1_MOVES),
    "nf4": Decoder(4, functools.partial(_widen_by_table, NF4), _by_table(NF4)),
    "int8": Decoder(8, _widen_int8, _each(8, _int8)),
    "e4m3": _small_float(8, _widen_e4m3, _e4m3, 120),
}
"""By the name of the number. int4: code - 8. e2m1: OCP Microscaling Formats (MX) Specification 1.0. nf4: `NF4`, rounded.
int8: two's complement. e4m3: float8_e4m3fn."""

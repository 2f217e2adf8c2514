"""Weights of 4 or 8 bits in the order in which tensor cores take them from registers.

A tile of 64 outputs x 64 inputs is four products of 64 x 16 (wgmma, or per 16 outputs mma.m16n8k16), whose operand lies in 128 threads.
Thread 32 w + 4 g + q has words of its own, so that it reads 16 bytes at a time and nothing moves between threads:

    4 bits   one plane; word j: product j; nibble 4 p + 2 c + h (bits of e2m1 are rearranged: `Decoder.moves`)
    8 bits   two planes; word 2 (j mod 2) + c of plane j div 2; byte 2 p + h
             is output 16 w + 8 h + g, input 16 j + 8 c + 2 q + p of the tile; p, c and h are 0 or 1

Tiles are whole in memory: a slice of tiles is the packed slice of the weight.
"""

from dataclasses import dataclass
from functools import partial
from math import gcd

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantized_matmul.decoders import DECODERS

TILE = 64
"""Outputs, and inputs, of a tile."""
GROUPS = (16, 32, 64, 128)
"""Inputs that share a scale: sizes that kernels take."""
MIDDLES = {"int4": 8, "uint8b128": 128}
"""The code of zero of numbers that are stored without a sign, where a group does not say its own."""


def fold_of(number: str, scale: jax.Array | None, zero: jax.Array | None) -> int:
    """n, if stored scales are 2^n of the true ones, so that products with numbers that are decoded too small (`Decoder.too_small`) are only
    half as many powers of two too small, and no bfloat16 leaves its range: scales up to 2^61 do not, values below 2^-66 become 0. Float16
    has no room for it, and zero points are subtracted first."""
    is_left_out = scale is None or scale.dtype == jnp.float16 or zero is not None
    return 0 if is_left_out else DECODERS[number].exponent // 2


def decoder_of(number: str) -> str:
    """The key of DECODERS with which a number is packed. uint8b128: its codes less 128 are int8."""
    return "int8" if number == "uint8b128" else number


@partial(jax.tree_util.register_dataclass, data_fields=["words", "scale", "zero", "factor"], meta_fields=["number"])
@dataclass(frozen=True)
class Packed:
    """A weight: (number(code) - zero) * scale * factor. N outputs and K inputs are multiples of 64; those of padding have scale 0."""

    words: jax.Array
    """int32 [N / 64, K / 64, 128 * bits]"""
    scale: jax.Array | None
    """float16, bfloat16 or float32 [K / group, N], times 2^`fold`; None: 1"""
    zero: jax.Array | None
    """bfloat16, as scale; None: 0"""
    factor: jax.Array | None
    """float32 [N]; None: 1"""
    number: str
    """A key of DECODERS."""

    @property
    def num_outputs(self) -> int:
        return TILE * self.words.shape[0]

    @property
    def num_inputs(self) -> int:
        return TILE * self.words.shape[1]

    @property
    def fold(self) -> int:
        """See `fold_of`."""
        return fold_of(self.number, self.scale, self.zero)

    @property
    def group(self) -> int | None:
        """Inputs that share a scale; None: there is none but the factor."""
        return None if self.scale is None else self.num_inputs // self.scale.shape[0]


@partial(jax.jit, static_argnames="number")
def pack(
    number: str, codes: jax.Array, scale: jax.Array, zero: jax.Array | None = None, factor: jax.Array | None = None
) -> Packed:
    """A weight from what checkpoints store.

    number: a key of DECODERS, or uint8b128. codes: [N, K] of 8 bits, or uint8 [N, K / 2], the even input in the lower half. scale: [N, G],
    G = K / group or 1, floats or the exponents uint8 of powers of two, plus 127. zero: uint8 [N, G], of numbers that MIDDLES has.
    factor: [N].
    Raises ValueError for groups that are no multiples of 16, and for zero points of other numbers.
    """
    bits = DECODERS[decoder_of(number)].bits
    codes = lax.bitcast_convert_type(codes, jnp.uint8)
    if bits == 4:
        codes = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], -1)
    elif number == "uint8b128":
        codes ^= 128
    num_outputs, num_inputs = codes.shape
    if scale.shape[1] == 1 and zero is None:
        whole = _as_float(scale)[:, 0].astype(jnp.float32)
        factor, scale_GN = whole if factor is None else whole * factor, None
    else:
        scale_GN = _by_group(_as_float(scale, fold_of(decoder_of(number), scale, zero)), num_inputs)
    zero_GN = None
    if zero is not None:
        if number not in MIDDLES:
            raise ValueError(f"zero points are of {' and '.join(MIDDLES)} numbers, not of {number}")
        zero_GN = _by_group((zero.astype(jnp.int32) - MIDDLES[number]).astype(jnp.bfloat16), num_inputs)
    padding = -num_outputs % TILE, -num_inputs % TILE
    words = DECODERS[decoder_of(number)].arranged(pack_words(jnp.pad(codes, ((0, padding[0]), (0, padding[1]))), bits))
    if factor is not None:
        factor = jnp.pad(factor.astype(jnp.float32), (0, padding[0]))
    return Packed(words, scale_GN, zero_GN, factor, decoder_of(number))


def _as_float(scale: jax.Array, fold: int = 0) -> jax.Array:
    """Scales times 2^fold in a type that kernels read; exact."""
    if scale.dtype == jnp.uint8:
        # The exponent is that of a bfloat16: 0 is subnormal, the largest stands for NaN.
        exponent = scale.astype(jnp.uint16) + fold
        bits = jnp.where(exponent == 0, 0x40, jnp.minimum(exponent, 255) << 7)
        return lax.bitcast_convert_type(jnp.where(scale == 255, 0x7FC0, bits).astype(jnp.uint16), jnp.bfloat16)
    scale = scale.astype(jnp.bfloat16) if scale.dtype.itemsize == 1 else scale
    return scale * jnp.asarray(2.0**fold, scale.dtype) if fold else scale


def _by_group(values_NG: jax.Array, num_inputs: int) -> jax.Array:
    """[inputs / group, outputs] of whole tiles, the group one of GROUPS; 0 in padding."""
    num_outputs, num_groups = values_NG.shape
    group = num_inputs // num_groups
    if num_groups == 1:
        finer = GROUPS[-1] if num_inputs % GROUPS[-1] == 0 else TILE
        num_copies = -(-num_inputs // finer)
    else:
        finer = gcd(group, GROUPS[-1])
        num_copies = group // finer
    if finer not in GROUPS or (num_groups > 1 and group * num_groups != num_inputs):
        raise ValueError(f"{num_groups} scales for {num_inputs} inputs: groups must divide the inputs and be multiples of 16")
    values_GN = jnp.repeat(values_NG.T, num_copies, axis=0)
    rows = -(-num_inputs // TILE) * TILE // finer
    return jnp.pad(values_GN, ((0, rows - values_GN.shape[0]), (0, -num_outputs % TILE)))


def pack_words(codes: jax.Array, bits: int) -> jax.Array:
    """int32 [N / 64, K / 64, 128 * bits] of uint8 codes [N, K], both multiples of 64."""
    num_outputs, num_inputs = codes.shape
    split = codes.reshape(num_outputs // TILE, 4, 2, 8, num_inputs // TILE, 4, 2, 4, 2)  # b w h g | k j c q p
    tiles = num_outputs // TILE, num_inputs // TILE
    if bits == 4:
        nibbles = split.transpose(0, 4, 1, 3, 7, 5, 8, 6, 2).reshape(*tiles, 128 * 4, 4, 2)  # b k | w g q j | p c, h
        parts = nibbles[..., 0] | nibbles[..., 1] << 4
    else:
        split = split.reshape(*split.shape[:5], 2, 2, *split.shape[6:])  # b w h g | k, j div 2, j mod 2, c q p
        parts = split.transpose(0, 4, 5, 1, 3, 8, 6, 7, 9, 2).reshape(*tiles, 2 * 128 * 4, 4)
    return lax.bitcast_convert_type(parts, jnp.int32)


def unpack_words(words: jax.Array, bits: int) -> jax.Array:
    """The codes of `pack_words`."""
    num_blocks, num_tiles, _ = words.shape
    parts = lax.bitcast_convert_type(words, jnp.uint8)
    if bits == 4:
        nibbles = jnp.stack([parts & 15, parts >> 4], axis=-1).reshape(num_blocks, num_tiles, 4, 8, 4, 4, 2, 2, 2)
        split = nibbles.transpose(0, 2, 8, 3, 1, 5, 7, 4, 6)
    else:
        split = parts.reshape(num_blocks, num_tiles, 2, 4, 8, 4, 2, 2, 2, 2).transpose(0, 3, 9, 4, 1, 2, 6, 7, 5, 8)
    return split.reshape(TILE * num_blocks, TILE * num_tiles)


def widened(weight: Packed) -> jax.Array:
    """float32 [N, K]: the values."""
    decoder = DECODERS[weight.number]
    values = decoder.widen(unpack_words(decoder.in_order(weight.words), decoder.bits)).astype(jnp.float32)

    def of_inputs(values_GN: jax.Array) -> jax.Array:
        return jnp.repeat(values_GN.T.astype(jnp.float32), weight.num_inputs // values_GN.shape[0], axis=1)

    if weight.zero is not None:
        values -= of_inputs(weight.zero)
    if weight.scale is not None:
        values *= of_inputs(weight.scale) * 2.0**-weight.fold
    return values if weight.factor is None else values * weight.factor[:, None]

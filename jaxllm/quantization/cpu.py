"""Products with weights of 4 and 8 bits on a CPU: XLA widens them in registers or in its caches, never as a whole in memory."""

import math

import jax.numpy as jnp
from jax import Array, lax

from jaxllm.quantization import numbers
from jaxllm.quantization.numbers import Scheme
from jaxllm.weight_format import Arrays

_FEW_ROWS = 4
"""Rows up to which weights are widened once for each row, because that takes less time than writing them down."""
_FEW_ROWS_OF_FLOATS = 1
"""The limit of numbers that take longer to read: from a table, or floats."""
_LANES = 16
"""Neighbouring codes that are computed at once."""
_UNROLLED = 16
"""Vectors of so many codes that are summed in registers."""
_WIDE_BYTES = 1 << 22
"""Most bytes of outputs that are widened at a time: they stay in a cache."""


def product(arrays: Arrays, x: Array, scheme: Scheme) -> Array:
    """[..., inputs] to [..., *outputs], float32."""
    number = numbers.NUMBERS[scheme.number]
    outputs = arrays["scale"].shape[:-1]
    flat = {name: array.reshape(math.prod(outputs), *array.shape[len(outputs) :]) for name, array in arrays.items()}
    if number.code_type == "float8_e4m3fn":
        # XLA would convert them one by one, in slices too.
        flat["codes"] = lax.bitcast_convert_type(flat["codes"], jnp.uint8)
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    is_integer = number.table is None and number.code_type != "float8_e4m3fn"
    lanes = math.gcd(flat["codes"].shape[-1] // flat["scale"].shape[-1], _LANES)
    if len(rows) <= (_FEW_ROWS if is_integer else _FEW_ROWS_OF_FLOATS) and lanes >= _LANES // 2:
        y = _few_rows(flat, scheme, _parts(rows, scheme), lanes)
    else:
        y = many_rows(flat, scheme, rows)
    return y.reshape(*x.shape[:-1], *outputs)


def _few_rows(arrays: Arrays, scheme: Scheme, parts: list[Array], lanes: int) -> Array:
    """Sums in lanes, as one elementwise loop over [outputs, vectors / unrolled, rows, lanes], then those of the lanes.

    XLA sums numbers that are neighbours in memory one by one; what it writes to neighbours it computes at once.
    """
    num_outputs, num_codes = arrays["codes"].shape
    num_rows = len(parts[0])
    num_vectors = num_codes // lanes
    unrolled = max(n for n in range(1, _UNROLLED + 1) if num_vectors % n == 0)
    codes = arrays["codes"].reshape(num_outputs, -1, unrolled, lanes)
    # [vectors / unrolled, unrolled, rows, lanes]
    inputs = [part.reshape(num_rows, -1, unrolled, lanes).transpose(1, 2, 0, 3) for part in parts]
    vectors_of_group = num_vectors // arrays["scale"].shape[-1]

    def of_vectors(array: Array) -> Array:
        """A part with one value per group, for each vector."""
        return jnp.repeat(array, vectors_of_group, axis=1).reshape(num_outputs, -1, unrolled)

    by_vector = {name: of_vectors(array) for name, array in arrays.items() if name not in ("codes", "factor")}
    sums: Array | float = 0.0
    for i in range(unrolled):
        group = {name: array[:, :, i, None] for name, array in by_vector.items()}
        for half, x in zip(numbers.split(codes[:, :, i], scheme), inputs, strict=True):
            weights = numbers.scaled(_float32(half, scheme), group, scheme, jnp)
            sums = sums + weights[:, :, None] * x[:, i]
    # Changes nothing. Without it XLA takes the loop into the sum over lanes, which YNNPACK then interprets piece by piece.
    sums = lax.reduce_precision(sums, exponent_bits=8, mantissa_bits=23)
    y = jnp.sum(sums, axis=(1, 3)).T
    return y * arrays["factor"] if "factor" in arrays else y


def many_rows(arrays: Arrays, scheme: Scheme, x: Array) -> Array:
    """Float32 products [rows, outputs] with a block of outputs after the other. arrays: their outputs are one dimension."""
    num_outputs, num_inputs, parts = len(arrays["codes"]), x.shape[1], _parts(x, scheme)
    most = max(1, _WIDE_BYTES // (4 * num_inputs))
    block = max(n for n in range(1, most + 1) if num_outputs % n == 0)
    block = block if block >= _LANES else num_outputs

    def of_block(block: Arrays) -> Array:
        sums: Array | float = 0.0
        for half, x in zip(numbers.split(block["codes"], scheme), parts, strict=True):
            weights = lax.reduce_precision(
                numbers.scaled(_float32(half, scheme), block, scheme, jnp), exponent_bits=8, mantissa_bits=23
            )
            sums = sums + lax.dot_general(x, weights, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
        return sums  # type: ignore[return-value]

    blocks = {name: array.reshape(-1, block, *array.shape[1:]) for name, array in arrays.items()}
    return lax.map(of_block, blocks).transpose(1, 0, 2).reshape(-1, num_outputs)


def _parts(x: Array, scheme: Scheme) -> list[Array]:
    """Inputs 0, 2, ... of bytes that hold two codes, then 1, 3, ...; or all of them."""
    per_value = numbers.NUMBERS[scheme.number].per_value
    return [x[:, i::per_value] for i in range(per_value)]


def _float32(codes: Array, scheme: Scheme) -> Array:
    """Codes of which the bytes are floats (e4m3) as float32, others as they are. NaN becomes 480."""
    if scheme.number != "e4m3":
        return codes
    bits = codes.astype(jnp.int32)
    magnitude = bits & 0x7F
    # The exponents' biases are 7 and 127. Without a leading one (below 8), the number is what is added to 2^-6.
    normal = lax.bitcast_convert_type((magnitude << 20) + (120 << 23), jnp.float32)
    subnormal = lax.bitcast_convert_type((magnitude << 20) + (121 << 23), jnp.float32) - 2.0**-6
    value = jnp.where(magnitude < 8, subnormal, normal)
    return jnp.where(bits > 0x7F, -value, value)

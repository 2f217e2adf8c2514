"""Products with weights of 4 and 8 bits on a CPU: XLA widens them in registers or in its caches, never as a whole in memory."""

import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.quantization import numbers
from jaxllm.quantization.numbers import Scheme
from jaxllm.weight_format import Arrays

_FEW_ROWS = 4
"""Rows up to which weights are widened once for each row, because that takes less time than writing them down."""
_LANES = 16
"""Neighbouring codes that are computed at once."""
_UNROLLED = 16
"""Vectors of so many codes that are summed in registers."""
_BLOCK = 256
"""Outputs that are widened at a time: 8192 inputs of each take 8 MB."""


def product(arrays: Arrays, x: Array, scheme: Scheme) -> Array:
    """[..., inputs] to [..., *outputs], float32."""
    outputs = arrays["scale"].shape[:-1]
    flat = {name: array.reshape(math.prod(outputs), *array.shape[len(outputs) :]) for name, array in arrays.items()}
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    per_value = numbers.NUMBERS[scheme.number].per_value
    # Inputs 0, 2, ... of bytes that hold two codes, then 1, 3, ...; or all of them.
    parts = [rows[:, i::per_value] for i in range(per_value)]
    codes_of_group = flat["codes"].shape[-1] // flat["scale"].shape[-1]
    few = len(rows) <= _FEW_ROWS and codes_of_group % _LANES == 0
    y = (_few_rows if few else _many_rows)(flat, scheme, parts)
    return y.reshape(*x.shape[:-1], *outputs)


def _few_rows(arrays: Arrays, scheme: Scheme, parts: list[Array]) -> Array:
    """Sums in lanes, as one elementwise loop over [outputs, vectors / _UNROLLED, rows, lanes], then those of the lanes.

    XLA sums numbers that are neighbours in memory one by one; what it writes to neighbours it computes at once.
    """
    num_outputs, num_codes = arrays["codes"].shape
    num_rows = len(parts[0])
    num_vectors = num_codes // _LANES
    unrolled = max(n for n in range(1, _UNROLLED + 1) if num_vectors % n == 0)
    codes = arrays["codes"].reshape(num_outputs, -1, unrolled, _LANES)
    # [vectors / unrolled, unrolled, rows, lanes]
    inputs = [part.reshape(num_rows, -1, unrolled, _LANES).transpose(1, 2, 0, 3) for part in parts]
    vectors_of_group = num_vectors // arrays["scale"].shape[-1]

    def of_vectors(array: Array) -> Array:
        """A part with one value per group, for each vector."""
        return jnp.repeat(array, vectors_of_group, axis=1).reshape(num_outputs, -1, unrolled)

    by_vector = {name: of_vectors(array) for name, array in arrays.items() if name not in ("codes", "factor")}
    sums: Array | float = 0.0
    for i in range(unrolled):
        group = {name: array[:, :, i, None] for name, array in by_vector.items()}
        for half, x in zip(numbers.split(codes[:, :, i], scheme), inputs, strict=True):
            weights = numbers.scaled(half, group, scheme, jnp)
            sums = sums + weights[:, :, None] * x[:, i]
    # Changes nothing. Without it XLA takes the loop into the sum over lanes, which YNNPACK then interprets piece by piece.
    sums = lax.reduce_precision(sums, exponent_bits=8, mantissa_bits=23)
    y = jnp.sum(sums, axis=(1, 3)).T
    return y * arrays["factor"] if "factor" in arrays else y


def _many_rows(arrays: Arrays, scheme: Scheme, parts: list[Array]) -> Array:
    """Float32 products with a block of outputs after the other."""
    num_outputs = len(arrays["codes"])
    block = math.gcd(num_outputs, _BLOCK)
    # All at once where there are no blocks.
    block = block if block >= 32 else num_outputs

    def of_block(block: Arrays) -> Array:
        sums: Array | float = 0.0
        for half, x in zip(numbers.split(block["codes"], scheme), parts, strict=True):
            weights = lax.reduce_precision(numbers.scaled(half, block, scheme, jnp), exponent_bits=8, mantissa_bits=23)
            sums = sums + lax.dot_general(x, weights, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
        return sums  # type: ignore[return-value]

    blocks = {name: array.reshape(-1, block, *array.shape[1:]) for name, array in arrays.items()}
    return lax.map(of_block, blocks).transpose(1, 0, 2).reshape(-1, num_outputs)

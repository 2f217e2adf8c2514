"""Weights of 4 and 8 bits in the order in which a CPU computes with them: a code of each of 16 outputs, then the next input's."""

import functools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from jaxllm.parallel.arrays import convert
from jaxllm.parallel.axes import sharding
from jaxllm.parallel.shards import Shards
from jaxllm.quantization import cpu, numbers
from jaxllm.quantization.numbers import NUMBERS, Scheme
from jaxllm.weight_format import Arrays, Multiply, ParamSpec, WeightSpec

LANES = 16
"""Outputs that are computed at once: a vector of 512 bits."""
_UNROLLED = 32
"""Values of codes that are summed in registers."""
_FEW_ROWS = 32
"""Rows up to which weights are widened in registers for each; for more they are written to a cache once."""
_SUMS_BYTES = 1 << 24
"""Most bytes of sums of pieces that are written down at a time."""
_LEAST_UNROLLED = 8
"""Fewest such values: fewer are written down too often."""


def takes(scheme: Scheme, num_outputs: int, num_inputs: int) -> bool:
    """Whether a weight may be in this order. Its codes are then whole numbers, which XLA converts many at a time."""
    number = NUMBERS[scheme.number]
    is_whole = number.table is None and number.code_type != "float8_e4m3fn" and scheme.scale_type != "uint8"
    values = (scheme.group or num_inputs) // number.per_value
    return is_whole and num_outputs % LANES == 0 and _unrolled(values) >= _LEAST_UNROLLED


@dataclass(frozen=True)
class Laned:
    """A `Layout` in lanes, as a CPU has it."""

    outputs: tuple[int, ...]
    stored: Mapping[str, ParamSpec] = field(compare=False)
    """As of `Tiled`."""

    @classmethod
    def of(cls, weight: WeightSpec, scheme: Scheme, stored: Mapping[str, ParamSpec], size: int) -> "Laned | None":
        """That of a weight; None: it is none of a linear layer or head, devices split weights, or its numbers are not converted many at a
        time."""
        outputs, num_inputs = stored["scale"].shape[:-1], stored["codes"].shape[-1] * NUMBERS[scheme.number].per_value
        is_taken = weight.modules and size == 1 and takes(scheme, math.prod(outputs), num_inputs)
        return cls(outputs, stored) if is_taken else None

    def declare(self, weight: WeightSpec, scheme: Scheme, size: int) -> dict[str, ParamSpec]:
        """The parts: [outputs / LANES, of an output, LANES]."""
        found = {}
        for name, spec in self.stored.items():
            num_parts = math.prod(spec.shape) // math.prod(self.outputs)
            shape = (math.prod(self.outputs) // LANES, num_parts, LANES)
            found[name] = ParamSpec(shape, ("tiles",) * 3, spec.dtype, spec.source)
        return found

    def lay_out(self, arrays: Arrays, parts: Mapping[str, ParamSpec], scheme: Scheme, mesh: Mesh) -> dict[str, Array]:
        """Lay stored parts out in lanes."""
        return {
            name: convert(_in_lanes, sharding(mesh, spec.axes), arrays[name], shape=spec.shape) for name, spec in parts.items()
        }

    def product(self, arrays: Arrays, scheme: Scheme, x: Array, shards: Shards, multiply: Multiply) -> Array:
        """`product` in x's type."""
        return product(arrays, scheme, x, self.outputs).astype(x.dtype)

    def logits(self, arrays: Arrays, scheme: Scheme, x: Array, multiply: Multiply) -> Array:
        """`product`."""
        return product(arrays, scheme, x, self.outputs)

    def rows(self, arrays: Arrays, scheme: Scheme, index: Array) -> Array:
        """`rows`."""
        return rows(arrays, scheme, index)


def _in_lanes(array: Array, shape: tuple[int, int, int]) -> Array:
    return array.reshape(shape[0], LANES, shape[1]).transpose(0, 2, 1)


def product(arrays: Arrays, scheme: Scheme, x: Array, outputs: tuple[int, ...]) -> Array:
    """[..., inputs] to [..., *outputs], float32."""
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    y = _few_rows(arrays, scheme, rows) if len(rows) <= _FEW_ROWS else _many_rows(arrays, scheme, rows)
    return y.reshape(*x.shape[:-1], *outputs)


def rows(arrays: Arrays, scheme: Scheme, index: Array) -> Array:
    """The weights of these outputs, float32 [..., inputs]; outputs that do not exist are the nearest that do."""
    index = jnp.clip(index, 0, len(arrays["codes"]) * LANES - 1)
    taken = {name: array[index // LANES, :, index % LANES] for name, array in arrays.items()}
    if "factor" in taken:
        taken["factor"] = taken["factor"][..., 0]
    return numbers.widen(taken, scheme, jnp)


def _pieces(arrays: Arrays) -> tuple[int, int]:
    """(pieces of a group that are summed in registers, values of codes in each)."""
    of_group = arrays["codes"].shape[1] // arrays["scale"].shape[1]
    return of_group // _unrolled(of_group), _unrolled(of_group)


def _unrolled(of_group: int) -> int:
    """Values of a group that are summed in registers at a time."""
    return max(n for n in range(1, min(of_group, _UNROLLED) + 1) if of_group % n == 0)


def _few_rows(arrays: Arrays, scheme: Scheme, x: Array) -> Array:
    """Sums of as many outputs at a time as a cache has room for."""
    num_vectors, num_groups, _ = arrays["scale"].shape
    most = max(1, _SUMS_BYTES // (4 * LANES * len(x) * num_groups * _pieces(arrays)[0]))
    block = max(n for n in range(1, most + 1) if num_vectors % n == 0)
    if block == num_vectors:
        return _sums(arrays, scheme, x)
    blocks = {name: array.reshape(-1, block, *array.shape[1:]) for name, array in arrays.items()}
    return jnp.moveaxis(lax.map(lambda block: _sums(block, scheme, x), blocks), 0, 1).reshape(len(x), -1)


def _sums(arrays: Arrays, scheme: Scheme, x: Array) -> Array:
    """Sums of pieces of groups, as one elementwise loop over [vectors, groups, pieces, rows, lanes], then those of outputs.

    What XLA writes to neighbours in memory it computes at once.
    """
    num_rows, per_value = len(x), NUMBERS[scheme.number].per_value
    num_vectors, num_groups, _ = arrays["scale"].shape
    num_pieces, num_values = _pieces(arrays)
    codes = arrays["codes"].reshape(num_vectors, num_groups, num_pieces, num_values, LANES)
    x = x.reshape(num_rows, num_groups, num_pieces, num_values, per_value)
    sums: list[Array | float] = [0.0] * 2  # Two, because an addition waits for the one before it.
    for i in range(num_values):
        for half, of_half in enumerate(numbers.split(codes[..., i, :], scheme)):
            values = _centred(of_half, scheme).astype(jnp.float32)[:, :, :, None]
            of_rows = jnp.moveaxis(x[..., i, half], 0, -1)[..., None]
            sums[i % 2] = sums[i % 2] + values * of_rows
    scale, offset = _scale_and_offset(arrays, scheme)
    y = (sums[0] + sums[1]) * scale[:, :, None, None]
    if offset is not None:
        y = y - offset[:, :, None, None] * jnp.moveaxis(x.sum(axis=(3, 4)), 0, -1)[..., None]
    # The loop ends here: XLA would else compute all pieces of an output in one, which it does not do for several outputs at once.
    y = lax.optimization_barrier(y.reshape(num_vectors, -1, num_rows, LANES))
    # Not `sum`, which goes to YNNPACK: that takes longer to begin than to add.
    y = functools.reduce(operator.add, (y[:, i] for i in range(y.shape[1])))
    return jnp.moveaxis(y, 1, 0).reshape(num_rows, -1)


def _many_rows(arrays: Arrays, scheme: Scheme, x: Array) -> Array:
    """Float32 products with the weight as stored, into which the codes are brought for all rows."""
    stored = {name: array.transpose(0, 2, 1).reshape(-1, array.shape[1]) for name, array in arrays.items()}
    if "factor" in stored:
        stored["factor"] = stored["factor"][:, 0]
    # Written down before they are widened: else each code would be looked for by itself.
    return cpu.many_rows(lax.optimization_barrier(stored), scheme, x)


def _centred(codes: Array, scheme: Scheme) -> Array:
    """Codes less the code of zero, where that is the same for all."""
    middle = NUMBERS[scheme.number].middle
    return codes if scheme.zeros or not middle else lax.bitcast_convert_type(codes - jnp.uint8(middle), jnp.int8)


def _scale_and_offset(arrays: Arrays, scheme: Scheme) -> tuple[Array, Array | None]:
    """Scale and offset of each group, float32 [vectors, groups, LANES]: a value is scale * code - offset. None: no offset."""
    scale, offset = arrays["scale"].astype(jnp.float32), None
    scale = scale * arrays["factor"] if scheme.factor else scale
    if scheme.zeros:
        offset = scale * arrays["zero"].astype(jnp.float32)
    if scheme.minimums:
        minimum = arrays["minimum"].astype(jnp.float32)
        offset = minimum if offset is None else offset + minimum
    return scale, offset

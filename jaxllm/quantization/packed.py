"""Products with weights of 4 and 8 bits, widened inside the product."""

import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxllm.parallel.arrays import convert
from jaxllm.parallel.shards import ONE_DEVICE, Shards
from jaxllm.quantization import cpu, numbers
from jaxllm.quantization.numbers import Scheme
from jaxllm.weight_format import Arrays, Multiply


def widen(arrays: Arrays, scheme: Scheme, dtype: jax.typing.DTypeLike) -> Array:
    """The weights [*outputs, inputs], computed in float32."""
    return numbers.widen(arrays, scheme, jnp).astype(dtype)


def product(
    arrays: Arrays,
    scheme: Scheme,
    x: Array,
    shards: Shards = ONE_DEVICE,
    dtype: jax.typing.DTypeLike | None = None,
) -> Array:
    """[..., inputs] to [..., *outputs], in this type, by default x's; the sums are float32.

    shards: what x and the inputs are split over; the result is then a part of the sum.
    """
    on_cpu, on_others = (functools.partial(function, scheme=scheme) for function in (cpu.product, _product))
    return lax.platform_dependent(dict(arrays), x, cpu=on_cpu, default=on_others).astype(dtype or x.dtype)


def _product(arrays: Arrays, x: Array, scheme: Scheme) -> Array:
    """Float32; the weights are rounded to x's type."""
    if numbers.NUMBERS[scheme.number].bits == 8:
        return _dot(x, widen(arrays, scheme, x.dtype))
    # Two products, because XLA fuses the unpacking of a byte into each, and not that of both with an interleaving.
    even, odd = (numbers.scaled(codes, arrays, scheme, jnp).astype(x.dtype) for codes in numbers.nibbles(arrays["codes"]))
    return _dot(x[..., 0::2], even) + _dot(x[..., 1::2], odd)


def _dot(x: Array, weight: Array) -> Array:
    """Float32 products."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    contracted = (((x.ndim - 1,), (weight.ndim - 1,)), ((), ()))
    return lax.dot_general(x, weight, contracted, precision=precision, preferred_element_type=jnp.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StoredExperts:
    """Weights of experts [*lead, outputs, inputs] as stored, of which those that are taken are widened."""

    arrays: Arrays
    scheme: Scheme = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        codes = self.arrays["codes"].shape
        return (*codes[:-1], codes[-1] * numbers.NUMBERS[self.scheme.number].per_value)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> "StoredExperts":
        """The part at indices of leading dimensions."""
        return StoredExperts({name: array[index] for name, array in self.arrays.items()}, self.scheme)

    def astype(self, dtype: jax.typing.DTypeLike) -> Array:
        """The values, computed in float32."""
        return widen(self.arrays, self.scheme, dtype)


@dataclass(frozen=True)
class AsStored:
    """The `Layout` of arrays as files have them."""

    stored: ClassVar[None] = None

    def product(self, arrays: Arrays, scheme: Scheme, x: Array, shards: Shards, multiply: Multiply) -> Array:
        """`product` in x's type."""
        return product(arrays, scheme, x, shards)

    def logits(self, arrays: Arrays, scheme: Scheme, x: Array, multiply: Multiply) -> Array:
        """`product` in float32."""
        return product(arrays, scheme, x, dtype="float32")

    def rows(self, arrays: Arrays, scheme: Scheme, index: Array) -> Array:
        """The weights of these outputs, float32 [..., inputs]; outputs that do not exist are the nearest that do."""
        return widen({name: array.at[index].get(mode="clip") for name, array in arrays.items()}, scheme, "float32")

    def operand(self, arrays: Arrays, scheme: Scheme) -> Array:
        """Float32, which whoever takes it rounds to the model's type."""
        return widen(arrays, scheme, "float32")


AS_STORED = AsStored()


def rounded_arrays(weight: np.ndarray, scheme: Scheme) -> tuple[np.ndarray, np.ndarray]:
    """`round_to_nearest` of a weight on the host, computed on a device."""
    codes, scale = convert(round_to_nearest, None, np.ascontiguousarray(weight), scheme=scheme)
    return np.asarray(codes), np.asarray(scale)


def round_to_nearest(weight: Array, scheme: Scheme) -> tuple[Array, Array]:
    """(codes [N, K / codes in a byte], scale [N, G]) of a weight [N, K], as compressed-tensors rounds: symmetric, the largest value of
    a group half a step beyond the largest number."""
    number = numbers.NUMBERS[scheme.number]
    values = weight.astype(jnp.float32).reshape(len(weight), -1, scheme.group or weight.shape[1])
    largest = jnp.max(jnp.abs(values), axis=-1, keepdims=True) / (number.middle - 0.5)
    scale = jnp.where(largest > 0, largest, 1).astype(scheme.scale_type)
    rounded = jnp.round(values / scale.astype(jnp.float32)) + number.middle
    codes = jnp.clip(rounded, 0, 2**number.bits - 1).astype(jnp.uint8).reshape(weight.shape)
    if number.bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return codes, scale[..., 0]

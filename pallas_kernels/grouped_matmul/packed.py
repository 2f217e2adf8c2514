"""Weights of experts in 4 or 8 bits as `quantized_matmul.Packed`, with leading axes."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.quantized_matmul.packed import TILE, Packed, pack, widened

_KIND = "packed "


def type_of(number: str) -> str:
    """The name of the type of weights that are packed with a number of `quantized_matmul.DECODERS`."""
    return f"{_KIND}{number}"


def is_packed_type(weight_dtype: DTypeLike | str) -> bool:
    """Whether a type is one of `type_of`."""
    return isinstance(weight_dtype, str) and weight_dtype.startswith(_KIND)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedExperts:
    """Weights [..., N, K]; N and K are multiples of 64, and what pads them is 0."""

    packed: Packed
    """Its arrays have the leading axes."""

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, num_blocks, num_tiles, _ = self.packed.words.shape
        return (*lead, TILE * num_blocks, TILE * num_tiles)

    @property
    def dtype(self) -> str:
        """See `type_of`."""
        return type_of(self.packed.number)

    @property
    def num_groups(self) -> int | None:
        """Groups of inputs that share a scale; None: there is none but the factor."""
        return None if self.packed.scale is None else self.packed.scale.shape[-2]

    def __len__(self) -> int:
        return len(self.packed.words)

    def __getitem__(self, index: Any) -> "PackedExperts":
        """The part at indices of leading dimensions."""
        return PackedExperts(jax.tree.map(lambda array: array[index], self.packed))

    def astype(self, dtype: DTypeLike) -> jax.Array:
        """The values, computed in float32."""
        num_lead = len(self.shape) - 2
        flat = jax.tree.map(lambda array: array.reshape(-1, *array.shape[num_lead:]), self.packed)
        return jax.vmap(widened)(flat).astype(dtype).reshape(self.shape)


def pack_experts(
    number: str, codes: jax.Array, scale: jax.Array, zero: jax.Array | None = None, factor: jax.Array | None = None
) -> PackedExperts:
    """As `quantized_matmul.pack`, each array with leading axes."""
    lead = codes.shape[:-2]
    named = {"codes": (codes, 2), "scale": (scale, 2), "zero": (zero, 2), "factor": (factor, 1)}
    flat = {
        name: array.reshape(-1, *array.shape[array.ndim - own :]) for name, (array, own) in named.items() if array is not None
    }
    packed = jax.vmap(lambda arrays: pack(number, **arrays))(flat)
    return PackedExperts(jax.tree.map(lambda array: array.reshape(*lead, *array.shape[1:]), packed))


def padded(array: jax.Array, size: int) -> jax.Array:
    """With zeros at the end of the last dimension, if fewer than a tile are missing."""
    if not 0 < size - array.shape[-1] < TILE:
        return array
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, size - array.shape[-1])])

"""Resources of a CTA of either kernel: shared memory, and a weight's arrays as they are copied there."""

import jax

from pallas_kernels.quantized_matmul.decoders import DECODERS
from pallas_kernels.quantized_matmul.fragments import WORD_COLUMNS, word_rows
from pallas_kernels.quantized_matmul.packed import Packed

SMEM_BYTES = 227 << 10
RESERVED_BYTES = 2 << 10
"""For barriers and alignment."""


def words(weight: Packed) -> jax.Array:
    """int32 [N / 64, K / 64 * word_rows, WORD_COLUMNS]"""
    num_blocks, num_tiles, _ = weight.words.shape
    return weight.words.reshape(num_blocks, num_tiles * word_rows(DECODERS[weight.number].bits), WORD_COLUMNS)


def vectors(weight: Packed) -> dict[str, jax.Array]:
    """The scale and the zero of groups that there are, by name."""
    return {name: vector for name in ("scale", "zero") if (vector := getattr(weight, name)) is not None}


def num_groups(weight: Packed, num_inputs: int) -> int:
    """Groups that the inputs of a step belong to."""
    return max(1, num_inputs // (weight.group or num_inputs))

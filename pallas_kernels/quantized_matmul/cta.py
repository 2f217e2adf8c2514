"""Resources of a CTA of either kernel: registers, shared memory, and a weight's arrays as they are copied there."""

import jax

from pallas_kernels.quantized_matmul.decoders import DECODERS
from pallas_kernels.quantized_matmul.fragments import WORD_COLUMNS, word_rows
from pallas_kernels.quantized_matmul.packed import Packed

SMEM_BYTES = 227 << 10
RESERVED_BYTES = 2 << 10
"""For barriers and alignment."""
PRODUCER_REGISTERS = 40


def consumer_registers(num_consumers: int) -> int:
    """Registers that a consumer may ask for: those its threads begin with, and its share of those that the producer gives back. It
    waits forever for more."""
    at_start = (1 << 16) // (128 * (num_consumers + 1)) // 8 * 8
    return (at_start + (at_start - PRODUCER_REGISTERS) // num_consumers) // 8 * 8


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

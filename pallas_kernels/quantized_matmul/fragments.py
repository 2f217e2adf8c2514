"""From a tile of packed words to an operand of wgmma in registers: all that rests on the inside of Mosaic GPU.

What may change with JAX: the registers of a `FragmentedArray` in the layouts WGMMA and, for a vector by rows, WGMMA.reduce(1). The
interpreter knows neither inline code nor operands in registers: there, the tile is decoded in plain JAX into shared memory.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _compat
from pallas_kernels.quantized_matmul.decoders import DECODERS, TEMPORARIES, Decoder
from pallas_kernels.quantized_matmul.packed import TILE, unpack_words

WORD_COLUMNS = 256
"""Columns of an array of words in the kernels: no box of a copy is wider."""
_PRODUCTS, _REGISTERS = 4, 4
"""Products of 64 x 16 of a tile, and registers of a thread for each."""


def word_rows(bits: int) -> int:
    """Rows of WORD_COLUMNS words that a tile has."""
    return bits // 2


def operand(
    number: str, words_smem: Any, tile: int, scales: Sequence[jax.Array], zeros: Sequence[jax.Array], interpreted_smem: Any
) -> Any:
    """bfloat16 [64 outputs, 64 inputs] of a tile: (number - zero) * scale, the product rounded. What wgmma takes.

    words_smem: int32 [tiles * word_rows, WORD_COLUMNS]. scales, zeros: bfloat16 [64] in the layout WGMMA.reduce(1), one for each of
    equal parts of the inputs; none: 1, 0. interpreted_smem: bfloat16 [64, 64] where the kernel is interpreted, else None.
    """
    decoder = DECODERS[number]
    if interpreted_smem is None:
        return _in_registers(decoder, words_smem, tile, scales, zeros)
    rows = word_rows(decoder.bits)
    words = words_smem[pl.ds(tile * rows, rows)].reshape(1, 1, rows * WORD_COLUMNS)
    values = decoder.widen(unpack_words(words, decoder.bits))
    for vectors, apply in ((zeros, jnp.subtract), (scales, jnp.multiply)):
        if vectors:
            values = apply(values, jnp.repeat(jnp.stack(list(vectors), axis=1), TILE // len(vectors), axis=1))
    interpreted_smem[...] = values
    _compat.mosaic().commit_smem()
    return interpreted_smem


def _in_registers(
    decoder: Decoder, words_smem: Any, tile: int, scales: Sequence[jax.Array], zeros: Sequence[jax.Array]
) -> jax.Array:
    plgpu, fa = _compat.mosaic(), importlib.import_module("jax.experimental.mosaic.gpu.fragmented_array")
    by_row = [plgpu.Layout.WGMMA.reduce(1)]
    result = plgpu.ShapeDtypeStruct((TILE, TILE), jnp.bfloat16, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), by_row * len(scales), by_row * len(zeros)), return_type=result)
    def decode(_: Any, words_ref: Any, scales: Sequence[Any], zeros: Sequence[Any]) -> Any:
        found = _decoded(decoder, words_ref, tile)
        for vectors, operation in ((zeros, "subf"), (scales, "mulf")):
            if vectors:
                found = _by_rows(found, vectors, operation)
        registers = np.empty(fa.WGMMA_LAYOUT.registers_shape((TILE, TILE)), dtype=object)
        for index in np.ndindex(registers.shape):
            # [1, 8 inputs each, ..., 8 outputs each, ...]: of two registers that are 8 outputs apart.
            eight = index[1]
            (half,) = (i for i, size in zip(index[2:], registers.shape[2:], strict=True) if size == 2)
            registers[index] = found[eight // 2][half + 2 * (eight % 2)]
        return fa.FragmentedArray(_registers=registers, _layout=fa.WGMMA_LAYOUT, _is_signed=None)

    return decode(words_smem, list(scales), list(zeros))


def _decoded(decoder: Decoder, words_ref: Any, tile: int) -> list[list[Any]]:
    """Vectors of two bfloat16, by product and register."""
    ir, (arith, llvm, vector), utils = _mlir()
    i32 = ir.IntegerType.get_signless(32)
    pair = ir.VectorType.get((2,), ir.BF16Type.get())

    def constant(value: int) -> Any:
        return arith.constant(i32, value)

    thread = arith.remui(utils.thread_idx(), constant(128))
    column = arith.muli(arith.andi(thread, constant(63)), constant(4))
    registers_of_word = 16 // decoder.bits
    found = []
    for plane in range(decoder.bits // 4):
        row = arith.addi(constant(tile * word_rows(decoder.bits) + 2 * plane), arith.shrui(thread, constant(6)))
        place = [arith.index_cast(ir.IndexType.get(), index) for index in (row, column)]
        four = vector.load(ir.VectorType.get((4,), i32), words_ref, place)
        for word in range(4):
            value = vector.extract(four, [], [word])
            for register in range(registers_of_word):
                text = f"{{ .reg .b32 {', '.join(TEMPORARIES)}; {decoder.instructions(register)} }}"
                found.append(utils.bitcast(llvm.inline_asm(i32, [value], text, "=r,r"), pair))
    return [found[start : start + _REGISTERS] for start in range(0, _PRODUCTS * _REGISTERS, _REGISTERS)]


def _by_rows(found: list[list[Any]], vectors: Sequence[Any], operation: str) -> list[list[Any]]:
    """An operation of each value with that of its row, from the vector of its part of the inputs."""
    ir, (arith, _, vector), _ = _mlir()
    pair = ir.VectorType.get((2,), ir.BF16Type.get())

    def twice(register: Any) -> Any:
        value = vector.extract(register, [], [0]) if isinstance(register.type, ir.VectorType) else register
        return vector.broadcast(pair, value)

    halves = [[twice(register) for register in each.registers.flat] for each in vectors]
    apply = getattr(arith, operation)
    return [
        [apply(value, halves[product * len(vectors) // _PRODUCTS][register % 2]) for register, value in enumerate(values)]
        for product, values in enumerate(found)
    ]


def _mlir() -> tuple[Any, Any, Any]:
    dialects = tuple(importlib.import_module(f"jaxlib.mlir.dialects.{name}") for name in ("arith", "llvm", "vector"))
    return importlib.import_module("jaxlib.mlir.ir"), dialects, importlib.import_module("jax.experimental.mosaic.gpu.utils")


def of_tile(vectors_smem: Any, group: int, tile: int) -> list[jax.Array]:
    """Scales or zeros of a tile, as `operand` takes them. vectors_smem: [groups, 64] of consecutive groups, from that of tile 0 on."""
    first, count = tile * TILE // group, max(1, TILE // group)
    return [load_rows(vectors_smem.at[row]).astype(jnp.bfloat16) for row in range(first, first + count)]


def load_rows(vector_ref: Any) -> jax.Array:
    """A vector with a value for each row of a product."""
    return _compat.load_smem(vector_ref, _compat.mosaic().Layout.WGMMA.reduce(1))


def by_rows(vector: jax.Array, num_columns: int) -> jax.Array:
    """The vector's values in every column."""
    return lax.broadcast_in_dim(vector, (vector.shape[0], num_columns), [0])

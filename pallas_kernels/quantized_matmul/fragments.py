"""From a tile of packed words to an operand of wgmma in registers: all that rests on the inside of Mosaic GPU.

What may change with JAX: the registers of a `FragmentedArray` in the layouts WGMMA and, for a vector by rows, WGMMA.reduce(1). The
interpreter knows neither inline code nor operands in registers: there, the tile is decoded in plain JAX into shared memory.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import partial
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
THREADS = 128
CHUNK, FOUR = 8, 4
"""Columns of sums of which a thread has four values."""


def word_rows(bits: int) -> int:
    """Rows of WORD_COLUMNS words that a tile has."""
    return bits // 2


def operand(
    number: str,
    words_smem: Any,
    tile: int,
    scales: Sequence[jax.Array],
    zeros: Sequence[jax.Array],
    interpreted_smem: Any,
    *,
    fold: int = 0,
) -> Any:
    """bfloat16 [64 outputs, 64 inputs] of a tile: (number - zero) * scale, the product rounded. What wgmma takes.

    words_smem: int32 [tiles * word_rows, WORD_COLUMNS]. scales, zeros: bfloat16 [64] in the layout WGMMA.reduce(1), one for each of
    equal parts of the inputs; none: 1, 0. interpreted_smem: bfloat16 [64, 64] where the kernel is interpreted, else None. fold: of the
    scales (see `packed.fold_of`), of which there are some then; the result is as much too small as `unfolded` mends.
    """
    decoder = DECODERS[number]
    if interpreted_smem is None:
        return _in_registers(decoder, words_smem, tile, scales, zeros, is_too_small=fold > 0)
    rows = word_rows(decoder.bits)
    words = words_smem[pl.ds(tile * rows, rows)].reshape(1, 1, rows * WORD_COLUMNS)
    values = decoder.widen(unpack_words(decoder.in_order(words), decoder.bits))
    if fold:  # in two steps: 2^-exponent may be subnormal
        scales = [scale * jnp.bfloat16(2.0**-fold) * jnp.bfloat16(2.0 ** (fold - decoder.exponent)) for scale in scales]
    for vectors, apply in ((zeros, jnp.subtract), (scales, jnp.multiply)):
        if vectors:
            values = apply(values, jnp.repeat(jnp.stack(list(vectors), axis=1), TILE // len(vectors), axis=1))
    interpreted_smem[...] = values
    _compat.mosaic().commit_smem()
    return interpreted_smem


def unfolded(sums: jax.Array, number: str, fold: int) -> jax.Array:
    """The sums of products of such operands, as they would be with scales that are not stored larger."""
    return sums * 2.0 ** (DECODERS[number].exponent - fold) if fold else sums


def _in_registers(
    decoder: Decoder,
    words_smem: Any,
    tile: int,
    scales: Sequence[jax.Array],
    zeros: Sequence[jax.Array],
    *,
    is_too_small: bool,
) -> jax.Array:
    plgpu, fa = _compat.mosaic(), importlib.import_module("jax.experimental.mosaic.gpu.fragmented_array")
    by_row = [plgpu.Layout.WGMMA.reduce(1)]
    result = plgpu.ShapeDtypeStruct((TILE, TILE), jnp.bfloat16, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), by_row * len(scales), by_row * len(zeros)), return_type=result)
    def decode(_: Any, words_ref: Any, scales: Sequence[Any], zeros: Sequence[Any]) -> Any:
        found = _decoded(decoder.bits, decoder.too_small if is_too_small else decoder.instructions, words_ref, tile)
        if zeros:
            found = _by_rows(found, zeros, partial(_apply, "subf"))
        if scales:
            bias = decoder.bias * 2.0**-decoder.exponent if is_too_small else 0.0
            found = _by_rows(found, scales, partial(_scaled_less, bias) if bias else partial(_apply, "mulf"))
        registers = np.empty(fa.WGMMA_LAYOUT.registers_shape((TILE, TILE)), dtype=object)
        for index in np.ndindex(registers.shape):
            eight = index[1]
            registers[index] = found[eight // 2][_half(index, registers.shape) + 2 * (eight % 2)]
        return fa.FragmentedArray(_registers=registers, _layout=fa.WGMMA_LAYOUT, _is_signed=None)

    return decode(words_smem, list(scales), list(zeros))


def _decoded(bits: int, instructions: str, words_ref: Any, tile: int) -> list[list[Any]]:
    """Vectors of two bfloat16, by product and register."""
    ir, (arith, llvm, vector), utils = _mlir()
    i32 = ir.IntegerType.get_signless(32)
    pair = ir.VectorType.get((2,), ir.BF16Type.get())

    def constant(value: int) -> Any:
        return arith.constant(i32, value)

    thread = arith.remui(utils.thread_idx(), constant(THREADS))
    column = arith.muli(arith.andi(thread, constant(63)), constant(4))
    registers_of_word = 16 // bits
    outputs = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * registers_of_word)})>")
    text = f"{{ .reg .b32 {', '.join(TEMPORARIES)}; {instructions} }}"
    found = []
    for plane in range(bits // 4):
        row = arith.addi(constant(tile * word_rows(bits) + 2 * plane), arith.shrui(thread, constant(6)))
        place = [arith.index_cast(ir.IndexType.get(), index) for index in (row, column)]
        four = vector.load(ir.VectorType.get((4,), i32), words_ref, place)
        for word in range(4):
            value = vector.extract(four, [], [word])
            # No register shares a place with the word, which is read to the end.
            registers = llvm.inline_asm(outputs, [value], text, ",".join(["=&r"] * registers_of_word + ["r"]))
            found += [utils.bitcast(llvm.extractvalue(i32, registers, [i]), pair) for i in range(registers_of_word)]
    return [found[start : start + _REGISTERS] for start in range(0, _PRODUCTS * _REGISTERS, _REGISTERS)]


def _by_rows(found: list[list[Any]], vectors: Sequence[Any], apply: Callable[[Any, Any], Any]) -> list[list[Any]]:
    """An operation of each value with that of its row, from the vector of its part of the inputs."""
    ir, (_, _, vector), _ = _mlir()
    pair = ir.VectorType.get((2,), ir.BF16Type.get())

    def twice(register: Any) -> Any:
        value = vector.extract(register, [], [0]) if isinstance(register.type, ir.VectorType) else register
        return vector.broadcast(pair, value)

    halves = [[twice(register) for register in each.registers.flat] for each in vectors]
    return [
        [apply(value, halves[product * len(vectors) // _PRODUCTS][register % 2]) for register, value in enumerate(values)]
        for product, values in enumerate(found)
    ]


def _apply(operation: str, value: Any, of_row: Any) -> Any:
    _, (arith, _, _), _ = _mlir()
    return getattr(arith, operation)(value, of_row)


def _scaled_less(bias: float, value: Any, scale: Any) -> Any:
    """(value - bias) * scale with one rounding: bias * scale is exact."""
    ir, (_, llvm, _), utils = _mlir()
    i32 = ir.IntegerType.get_signless(32)
    bits = int(np.asarray(-bias, np.float32).astype(jnp.bfloat16).view(np.uint16)) * 0x10001
    text = f"{{ .reg .b32 b; mov.b32 b, 0x{bits:08X}; mul.rn.bf16x2 b, $2, b; fma.rn.bf16x2 $0, $1, $2, b; }}"
    found = llvm.inline_asm(i32, [utils.bitcast(value, i32), utils.bitcast(scale, i32)], text, "=r,r,r")
    return utils.bitcast(found, ir.VectorType.get((2,), ir.BF16Type.get()))


def _mlir() -> tuple[Any, Any, Any]:
    dialects = tuple(importlib.import_module(f"jaxlib.mlir.dialects.{name}") for name in ("arith", "llvm", "vector"))
    return importlib.import_module("jaxlib.mlir.ir"), dialects, importlib.import_module("jax.experimental.mosaic.gpu.utils")


def of_tile(vectors_smem: Any, group: int, tile: int) -> list[jax.Array]:
    """Scales or zeros of a tile, as `operand` takes them. vectors_smem: [groups, 64] of consecutive groups, from that of tile 0 on."""
    first, count = tile * TILE // group, max(1, TILE // group)
    return [load_rows(vectors_smem.at[row]).astype(jnp.bfloat16) for row in range(first, first + count)]


def keep_sums(sums: jax.Array, sums_smem: Any) -> None:
    """Put float32 [64, M] in the layout WGMMA into shared memory, [M / CHUNK, THREADS, FOUR]: a thread's own values side by side."""
    plgpu = _compat.mosaic()

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def keep(_: Any, sums: Any, sums_ref: Any) -> None:
        ir, (_, llvm, vector), _ = _mlir()
        for chunk, pairs in enumerate(_by_chunk(sums.registers)):
            values = [vector.extract(pair, [], [i]) for pair in pairs for i in range(2)]
            place = _address(sums_ref, chunk * THREADS * FOUR * 4)
            text = "st.shared.v4.f32 [$0], {$1, $2, $3, $4};"
            llvm.inline_asm(ir.Type.parse("!llvm.void"), [place, *values], text, "r,f,f,f,f,~{memory}", has_side_effects=True)

    keep(sums, sums_smem)


def add_parts(chunk_smem: Any, num_parts: int) -> jax.Array:
    """float32 [64, CHUNK] in the layout WGMMA: the sum of what each CTA of the cluster has in this place, in their order.

    chunk_smem: [THREADS, FOUR] of `keep_sums`.
    """
    plgpu, fa = _compat.mosaic(), importlib.import_module("jax.experimental.mosaic.gpu.fragmented_array")
    shape = TILE, CHUNK

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA)
    )
    def add(_: Any, chunk_ref: Any) -> Any:
        ir, (arith, llvm, vector), _ = _mlir()
        f32, place = ir.F32Type.get(), _address(chunk_ref, 0)
        total: list[Any] = []
        for part in range(num_parts):
            text = (
                f"{{ .reg .b32 p; mapa.shared::cluster.u32 p, $4, {part}; ld.shared::cluster.v4.f32 {{$0, $1, $2, $3}}, [p]; }}"
            )
            four = ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>")
            loaded = llvm.inline_asm(four, [place], text, "=f,=f,=f,=f,r,~{memory}", has_side_effects=True)
            values = [llvm.extractvalue(f32, loaded, [i]) for i in range(FOUR)]
            total = [arith.addf(x, y) for x, y in zip(total, values, strict=True)] if total else values
        pair = ir.VectorType.get((2,), f32)
        registers = np.empty(fa.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        for index in np.ndindex(registers.shape):
            half = _half(index, registers.shape)
            registers[index] = vector.from_elements(pair, total[2 * half : 2 * half + 2])
        return fa.FragmentedArray(_registers=registers, _layout=fa.WGMMA_LAYOUT, _is_signed=None)

    return add(chunk_smem)


def turn_sums(sums: jax.Array, rows_smem: Any) -> None:
    """Put float32 [64, M] in the layout WGMMA into shared memory the other way round, [M, 64]."""
    plgpu = _compat.mosaic()

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def turn(_: Any, sums: Any, rows_ref: Any) -> None:
        ir, (arith, _, vector), utils = _mlir()
        i32, one = ir.IntegerType.get_signless(32), ir.VectorType.get((1,), ir.F32Type.get())

        def constant(value: int) -> Any:
            return arith.constant(i32, value)

        # Of 16 outputs of a warp, a thread has two that are 8 apart, of each CHUNK rows two that are neighbours.
        thread = arith.remui(utils.thread_idx(), constant(THREADS))
        lane, warp = arith.andi(thread, constant(31)), arith.shrui(thread, constant(5))
        output = arith.addi(arith.muli(warp, constant(16)), arith.shrui(lane, constant(2)))
        row = arith.muli(arith.andi(lane, constant(3)), constant(2))
        for chunk, pairs in enumerate(_by_chunk(sums.registers)):
            for half, pair in enumerate(pairs):
                for i in range(2):
                    index = arith.addi(row, constant(chunk * CHUNK + i)), arith.addi(output, constant(8 * half))
                    place = [arith.index_cast(ir.IndexType.get(), each) for each in index]
                    vector.store(vector.from_elements(one, [vector.extract(pair, [], [i])]), rows_ref, place)

    turn(sums, rows_smem)


def synchronize_cluster() -> None:
    """Wait until all threads of the cluster's CTAs are here; what they wrote before is seen after."""

    @_compat.mosaic().inline_mgpu()
    def synchronize(_: Any) -> None:
        ir, (_, llvm, _), _ = _mlir()
        text = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "~{memory}", has_side_effects=True)

    synchronize()


def _address(ref: Any, offset: int) -> Any:
    """Of this thread's FOUR values from a place of shared memory on, as an integer."""
    ir, (arith, llvm, _), utils = _mlir()
    i32 = ir.IntegerType.get_signless(32)
    thread = arith.remui(utils.thread_idx(), arith.constant(i32, THREADS))
    own = arith.addi(arith.muli(thread, arith.constant(i32, FOUR * 4)), arith.constant(i32, offset))
    return arith.addi(llvm.ptrtoint(i32, utils.memref_ptr(ref)), own)


def _by_chunk(registers: np.ndarray) -> list[list[Any]]:
    """Registers of [64, M] in the layout WGMMA: of each CHUNK columns the two, 8 rows apart."""
    found: list[list[Any]] = [[None, None] for _ in range(registers.shape[1])]
    for index in np.ndindex(registers.shape):
        found[index[1]][_half(index, registers.shape)] = registers[index]
    return found


def _half(index: Sequence[int], shape: Sequence[int]) -> int:
    """Of a register in the layout WGMMA, [1, 8 columns each, ..., 8 rows each, ...]: which of two that are 8 rows apart."""
    (half,) = (i for i, size in zip(index[2:], shape[2:], strict=True) if size == 2)
    return half


def load_rows(vector_ref: Any) -> jax.Array:
    """A vector with a value for each row of a product."""
    return _compat.load_smem(vector_ref, _compat.mosaic().Layout.WGMMA.reduce(1))


def by_rows(vector: jax.Array, num_columns: int) -> jax.Array:
    """The vector's values in every column."""
    return lax.broadcast_in_dim(vector, (vector.shape[0], num_columns), [0])

"""Tiles of float8_e4m3fn as 16-bit operands of wgmma, in registers for a decode and in shared memory for a prefill: all of attention
that rests on the inside of Mosaic GPU.

A byte's sign and its other bits move to the places that they have in a float16: a number 2^-8 times as large, subnormals too, and
NaN becomes ±480 * 2^-8, so that slots which hold anything are harmless under a weight of zero. See `UNIT`.

A register of ldmatrix holds two numbers each of two rows, and the operands want two of one row, or of one column: bytes 0 and 2, and
bytes 1 and 3, become a register each. So of every 16 columns of a head, or rows of the transposed values, the even ones come first:

    place in 16    0  1  2 ...  7  8  9 ... 15
    column         0  2  4 ... 14  1  3 ... 15

The queries are laid out alike (`store_queries`), and the results are put in order again (`store_result`). The interpreter knows neither
inline code nor operands in registers: there, tiles are widened in plain JAX, in shared memory, in the order in which they lie.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels import _compat

WIDE = jnp.float16
"""What the numbers become."""
UNIT = 256.0
"""What the operands are multiplied with to be the numbers that were stored."""
LARGEST = 480.0
"""What NaN becomes, times UNIT."""
TILE_ROWS = 8  # of the swizzled tiles in shared memory
BLOCK = 64  # rows of an operand of wgmma
_SIZE = 16  # rows and columns that a warp takes at once, of the operand
_AND_OR = 0xEA
"""Truth table of lop3 for (x & y) | z."""
_FIRST = {
    "0 and 2": "shl.b32 m, $1, 8;",
    "1 and 3": "mov.b32 m, $1;",
    "0 and 1": "prmt.b32 m, $1, 0, 0x1404;",
    "2 and 3": "prmt.b32 m, $1, 0, 0x3424;",
}
"""Two bytes of a word to bits 8 to 15 and 24 to 31."""


def unit(dtype: Any) -> float:
    """What tiles that were widened to a type are multiplied with."""
    return UNIT if jnp.dtype(dtype) == WIDE else 1.0


def row_bytes(head_dim: int) -> int:
    """Width of the swizzled tiles that rows of a head lie in, in bytes and numbers."""
    return min(head_dim, 128)


def transforms(head_dim: int) -> tuple[Any, ...]:
    """Of shared memory [..., keys, head_dim] for keys and values."""
    plgpu = _compat.mosaic()
    width = row_bytes(head_dim)
    return plgpu.TilingTransform((TILE_ROWS, width)), plgpu.SwizzleTransform(width)


def keys(tile_ref: Any, start: int) -> jax.Array:
    """float16 [64 keys, H] from row `start` of a tile [keys, H], columns in the order above: what wgmma takes."""
    return _operand(tile_ref, start, is_transposed=False)


def values(tile_ref: Any, start: int) -> jax.Array:
    """float16 [H, 64 keys] from row `start` of a tile [keys, H], H in the order above."""
    return _operand(tile_ref, start, is_transposed=True)


def _operand(tile_ref: Any, start: int, *, is_transposed: bool) -> jax.Array:
    plgpu = _compat.mosaic()
    head_dim = tile_ref.shape[-1]
    fa = importlib.import_module("jax.experimental.mosaic.gpu.fragmented_array")
    shape = (head_dim, BLOCK) if is_transposed else (BLOCK, head_dim)
    result = plgpu.ShapeDtypeStruct(shape, WIDE, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms(head_dim)),), return_type=result)
    def load(_: Any, ref: Any) -> Any:
        registers = np.empty(fa.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        loaded = _load_transposed(ref, start, head_dim) if is_transposed else _load(ref, start, head_dim)
        for index in np.ndindex(registers.shape):
            # [64 rows each, 8 columns each, ..., 8 rows each of a warp's 16, ...]
            registers[index] = loaded[index[0], index[1] // 2][index[1] % 2][_half(registers.shape, index)]
        return fa.FragmentedArray(_registers=registers, _layout=fa.WGMMA_LAYOUT, _is_signed=None)

    return load(tile_ref)


def _half(shape: tuple[int, ...], index: tuple[int, ...]) -> int:
    (half,) = (i for i, size in zip(index[2:], shape[2:], strict=True) if size == 2)
    return half


class _Places:
    """Addresses of 16 bytes in a tile of keys or values, for the thread that this is."""

    def __init__(self, ref: Any, head_dim: int) -> None:
        ir, (arith, llvm, _), utils = _mlir()
        self.i32 = ir.IntegerType.get_signless(32)
        self.arith, self.llvm = arith, llvm
        self.width, self.columns = row_bytes(head_dim), head_dim // row_bytes(head_dim)
        thread = arith.remui(utils.thread_idx(), self.constant(128))
        self.warp, self.lane = arith.shrui(thread, self.constant(5)), arith.andi(thread, self.constant(31))
        self.base = llvm.ptrtoint(self.i32, utils.memref_ptr(ref))

    def constant(self, value: int) -> Any:
        return self.arith.constant(self.i32, value)

    def of_row(self, row: Any) -> tuple[Any, Any]:
        """Where a row begins, within the tiles of the first columns, and what its columns are swizzled with."""
        arith, c = self.arith, self.constant
        in_tile = arith.andi(row, c(TILE_ROWS - 1))
        tile = arith.muli(arith.shrui(row, c(3)), c(TILE_ROWS * self.width * self.columns))
        swizzled = in_tile if self.width == 128 else arith.shrui(in_tile, c(1))
        return arith.addi(self.base, arith.addi(tile, arith.muli(in_tile, c(self.width)))), arith.shli(swizzled, c(4))

    def of_column(self, row: tuple[Any, Any], column: Any, offset: int) -> Any:
        """The address of a column of a row; a column is `column`, below the width and a multiple of 16, in the tile `offset`."""
        arith = self.arith
        start, swizzle = row
        place = arith.addi(start, arith.xori(column, swizzle))
        return arith.addi(place, self.constant(offset * TILE_ROWS * self.width)) if offset else place

    def load(self, address: Any, *, is_transposed: bool) -> list[Any]:
        """Four registers of ldmatrix: of matrices whose rows the lanes of 8 each have the addresses of."""
        llvm = self.llvm
        kind = ".trans" if is_transposed else ""
        found = llvm.inline_asm(
            llvm.StructType.get_literal([self.i32] * 4),
            [address],
            f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 {{$0, $1, $2, $3}}, [$4];",
            "=r,=r,=r,=r,r",
            has_side_effects=True,
        )
        return [llvm.extractvalue(self.i32, found, [i]) for i in range(4)]


def _load(ref: Any, start: int, head_dim: int) -> dict[tuple[int, int], list[list[Any]]]:
    """{(0, k): [[row, row + 8] of the first 8 columns, of the others]} for columns 16 k up to 16 k + 16."""
    places = _Places(ref, head_dim)
    arith, c = places.arith, places.constant
    # Lanes 0 to 7: rows 0 to 7, 16 columns; 8 to 15: rows 8 to 15; 16 to 31: the same rows, the next 16 columns.
    row = arith.addi(arith.muli(places.warp, c(_SIZE)), arith.andi(places.lane, c(15)))
    row = places.of_row(arith.addi(row, c(start)) if start else row)
    column = arith.andi(places.lane, c(16))
    found = {}
    for first in range(0, head_dim, 32):
        in_tile = arith.addi(column, c(first % places.width)) if first % places.width else column
        four = places.load(places.of_column(row, in_tile, first // places.width), is_transposed=False)
        for k in range(2):
            upper, lower = (_widen(places, word) for word in four[2 * k : 2 * k + 2])
            found[0, first // 16 + k] = [[upper[part], lower[part]] for part in range(2)]
    return found


def _load_transposed(ref: Any, start: int, head_dim: int) -> dict[tuple[int, int], list[list[Any]]]:
    """{(m, k): [[row, row + 8] of the first 8 keys, of the others]} for rows 64 m up to 64 m + 64 and keys 16 k up to 16 k + 16."""
    places = _Places(ref, head_dim)
    arith, c = places.arith, places.constant
    found = {}
    for k in range(0, BLOCK, 32):
        row = places.of_row(arith.addi(places.lane, c(start + k)) if start + k else places.lane)
        for m in range(head_dim // BLOCK):
            column = arith.muli(places.warp, c(_SIZE))
            in_tile = m * BLOCK % places.width
            column = arith.addi(column, c(in_tile)) if in_tile else column
            four = places.load(places.of_column(row, column, m * BLOCK // places.width), is_transposed=True)
            for half in range(2):
                found[m, (k + 16 * half) // 16] = [_widen(places, word) for word in four[2 * half : 2 * half + 2]]
    return found


def instructions(pair: str, is_bfloat16: bool = False) -> str:
    """PTX for a register $0 of two numbers, of two bytes of the word $1 (a key of _FIRST), with the 32-bit registers a and m.

    In float16 numbers are 1 / UNIT times as large, in bfloat16 exact; NaN becomes ±LARGEST.
    """
    if is_bfloat16:
        # Times 2^120, so that no number is subnormal.
        move = "and.b32 a, m, 0x7F007F00; shr.u32 a, a, 4;"
        return f"{_FIRST[pair]} {move} lop3.b32 a, m, 0x80008000, a, {_AND_OR}; mov.b32 m, 0x7B807B80; mul.rn.bf16x2 $0, a, m;"
    return f"{_FIRST[pair]} shr.u32 a, m, 1; and.b32 a, a, 0x3F803F80; lop3.b32 $0, m, 0x80008000, a, {_AND_OR};"


def _widened(places: _Places, word: Any, pair: str, is_bfloat16: bool = False) -> Any:
    text = f"{{ .reg .b32 a, m; {instructions(pair, is_bfloat16)} }}"
    return places.llvm.inline_asm(places.i32, [word], text, "=r,r")


def _widen(places: _Places, word: Any) -> list[Any]:
    """Bytes 0 and 2, and bytes 1 and 3, as two float16 each."""
    ir, _, utils = _mlir()
    two = ir.VectorType.get((2,), ir.F16Type.get())
    return [utils.bitcast(_widened(places, word, pair), two) for pair in ("0 and 2", "1 and 3")]


def store_queries(q_ref: Any, wide_ref: Any) -> None:
    """wide_ref[n, ...] = the queries of q_ref [N, H], in float16 and in the order above. q_ref: without tiles."""
    plgpu = _compat.mosaic()
    num_lines, head_dim = q_ref.shape
    swizzled = plgpu.TilingTransform((TILE_ROWS, 64)), plgpu.SwizzleTransform(128)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(swizzled)))
    def store(_: Any, q: Any, wide: Any) -> None:
        ir, (arith, llvm, vector), utils = _mlir()
        i32, index_type = ir.IntegerType.get_signless(32), ir.IndexType.get()
        dtype = ir.MemRefType(q.type).element_type
        wide_type = ir.F16Type.get()

        def c(value: int) -> Any:
            return arith.constant(i32, value)

        def at(*numbers: Any) -> list[Any]:
            return [arith.index_cast(index_type, number) for number in numbers]

        thread = arith.remui(utils.thread_idx(), c(128))
        for turn in range(num_lines * head_dim // 4 // 128):
            number = arith.addi(thread, c(128 * turn))
            line, four = arith.divui(number, c(head_dim // 4)), arith.remui(number, c(head_dim // 4))
            found = vector.load(ir.VectorType.get((4,), dtype), q, at(line, arith.muli(four, c(4))))
            if dtype != wide_type:
                found = arith.extf(ir.VectorType.get((4,), ir.F32Type.get()), found)
                found = arith.truncf(ir.VectorType.get((4,), wide_type), found)
            # Of 16, where the two even columns go: place 2 of `four`, and 8 behind it the odd ones.
            place = arith.addi(arith.muli(arith.shrui(four, c(2)), c(16)), arith.muli(arith.andi(four, c(3)), c(2)))
            in_tile = arith.andi(line, c(TILE_ROWS - 1))
            for odd in range(2):
                column = arith.addi(place, c(8 * odd)) if odd else place
                tile = arith.shrui(column, c(6))
                column = arith.xori(arith.andi(column, c(63)), arith.muli(in_tile, c(8)))
                pair = vector.shuffle(found, found, [odd, odd + 2])
                vector.store(pair, wide, at(arith.shrui(line, c(3)), tile, in_tile, column))

    store(q_ref, wide_ref)


def store_result(ref: Any, acc_HN: jax.Array) -> None:
    """ref[N, H] = acc.T of ref's type, H in order again. ref: without tiles."""
    plgpu = _compat.mosaic()
    head_dim, num_lines = acc_HN.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def store(_: Any, out: Any, acc: Any) -> None:
        ir, (arith, _, vector), utils = _mlir()
        i32, index_type = ir.IntegerType.get_signless(32), ir.IndexType.get()
        dtype = ir.MemRefType(out.type).element_type

        def c(value: int) -> Any:
            return arith.constant(i32, value)

        thread = arith.remui(utils.thread_idx(), c(128))
        warp, lane = arith.shrui(thread, c(5)), arith.andi(thread, c(31))
        row = arith.addi(arith.muli(warp, c(_SIZE)), arith.muli(arith.shrui(lane, c(2)), c(2)))
        line = arith.muli(arith.andi(lane, c(3)), c(2))
        shape = acc.registers.shape
        found: dict[tuple[int, int], dict[int, Any]] = {}
        for index in np.ndindex(shape):
            found.setdefault((index[0], index[1]), {})[_half(shape, index)] = acc.registers[index]
        for (m, n), halves in found.items():
            for odd in range(2):
                two = vector.from_elements(
                    ir.VectorType.get((2,), ir.F32Type.get()),
                    [vector.extract(halves[half], [], [odd]) for half in range(2)],
                )
                if dtype != ir.F32Type.get():
                    two = arith.truncf(ir.VectorType.get((2,), dtype), two)
                at = [
                    arith.index_cast(index_type, x) for x in (arith.addi(line, c(8 * n + odd)), arith.addi(row, c(BLOCK * m)))
                ]
                vector.store(two, out, at)

    store(ref, acc_HN)


def _mlir() -> tuple[Any, tuple[Any, ...], Any]:
    dialects = tuple(importlib.import_module(f"jaxlib.mlir.dialects.{name}") for name in ("arith", "llvm", "vector"))
    return importlib.import_module("jaxlib.mlir.ir"), dialects, importlib.import_module("jax.experimental.mosaic.gpu.utils")


def widen(tile_ref: Any, wide_ref: Any) -> Any:
    """`widen_tile` for the interpreter, and fenced -> wide_ref, which also stands in for `keys` and `values`."""
    plgpu = _compat.mosaic()
    for start in range(0, tile_ref.shape[1], BLOCK):
        chunk = (slice(None), pl.ds(start, BLOCK))
        found = _compat.load_smem(tile_ref.at[chunk], plgpu.Layout.WGMMA).astype(jnp.float32)
        wide_ref[chunk] = (jnp.where(jnp.isnan(found), LARGEST, found) / unit(wide_ref.dtype)).astype(wide_ref.dtype)
    plgpu.commit_smem()
    return wide_ref


def widen_tile(tile_ref: Any, wide_ref: Any) -> None:
    """wide_ref [keys, H] = the tile [keys, H], in its own order and wide_ref's type: times 1 / UNIT in float16, exact in bfloat16.

    By the 128 threads of a warpgroup, 8 rows of 64 columns by a warp at once; rows p and p ^ 5 in a group of 8 lanes meet no bank
    twice. Not fenced.
    """
    plgpu = _compat.mosaic()
    num_rows, head_dim = tile_ref.shape
    swizzled = plgpu.TilingTransform((TILE_ROWS, 64)), plgpu.SwizzleTransform(128)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms(head_dim)), plgpu.RefType(swizzled)))
    def widen(_: Any, tile: Any, wide: Any) -> None:
        ir, (arith, llvm, _), utils = _mlir()
        places = _Places(tile, head_dim)
        c, i32 = places.constant, places.i32
        is_bfloat16 = isinstance(ir.MemRefType(wide.type).element_type, ir.BF16Type)
        wide_base = llvm.ptrtoint(i32, utils.memref_ptr(wide))
        lane = places.lane
        odd = arith.andi(arith.shrui(lane, c(2)), c(1))
        row, four = arith.xori(arith.shrui(lane, c(3)), arith.muli(odd, c(5))), arith.andi(lane, c(3))
        column = arith.muli(four, c(16))
        wide_places = [arith.muli(arith.xori(arith.addi(arith.muli(four, c(2)), c(i)), row), c(16)) for i in range(2)]
        wide_row = arith.addi(wide_base, arith.muli(row, c(128)))
        columns = head_dim // 64
        turns = num_rows // TILE_ROWS * columns // 4

        def load(turn: int) -> tuple[list[Any], list[Any]]:
            number = arith.addi(arith.muli(c(4), c(turn)), places.warp)
            tile_row, block = arith.divui(number, c(columns)), arith.remui(number, c(columns))
            start, swizzle = places.of_row(arith.addi(arith.muli(tile_row, c(TILE_ROWS)), row))
            first = arith.addi(arith.muli(block, c(64)), column)
            address = arith.addi(start, arith.xori(first, swizzle))
            found = llvm.inline_asm(
                llvm.StructType.get_literal([i32] * 4),
                [address],
                "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
                "=r,=r,=r,=r,r",
                has_side_effects=True,
            )
            target = arith.addi(wide_row, arith.muli(number, c(TILE_ROWS * 128)))
            return [llvm.extractvalue(i32, found, [i]) for i in range(4)], [arith.addi(target, x) for x in wide_places]

        def store(words: list[Any], targets: list[Any]) -> None:
            pairs = [_widened(places, word, pair, is_bfloat16) for word in words for pair in ("0 and 1", "2 and 3")]
            for i, target in enumerate(targets):
                llvm.inline_asm(
                    ir.Type.parse("!llvm.void"),
                    [target, *pairs[4 * i : 4 * i + 4]],
                    "st.shared.v4.b32 [$0], {$1, $2, $3, $4};",
                    "r,r,r,r,r",
                    has_side_effects=True,
                )

        for first in range(0, turns, 2):
            for found in [load(turn) for turn in range(first, min(first + 2, turns))]:
                store(*found)

    widen(tile_ref, wide_ref)

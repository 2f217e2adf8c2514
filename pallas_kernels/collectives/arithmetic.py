"""Sums and RMS norms over the words of vectors, as pieces of PTX."""

from collections.abc import Sequence

from pallas_kernels.collectives.ptx import Block, float32, vector

ITEMSIZE = {"bfloat16": 2, "float32": 4}
WARP = 32


def unpack(block: Block, word: str, dtype: str) -> list[str]:
    """The float32 values in a word."""
    if dtype == "float32":
        return [word]
    return [block.compute("shl.b32", word, 16), block.compute("and.b32", word, "0xffff0000")]


def pack(block: Block, values: Sequence[str], dtype: str) -> list[str]:
    """Float32 values, rounded to the type, as words."""
    if dtype == "float32":
        return list(values)
    pairs = zip(values[::2], values[1::2], strict=True)
    return [block.compute("cvt.rn.bf16x2.f32", high, low) for low, high in pairs]


def add_up(block: Block, addends: Sequence[Sequence[str]], dtype: str) -> list[str]:
    """The words of a sum of vectors, added in their order in float32 and rounded once."""
    sums = []
    for words in zip(*addends, strict=True):
        totals = [block.compute("mov.b32", value) for value in unpack(block, words[0], dtype)]
        for word in words[1:]:
            for total, value in zip(totals, unpack(block, word, dtype), strict=True):
                block.emit(f"add.rn.f32 {total}, {total}, {value}")
        sums += totals
    return pack(block, sums, dtype)


def norm_rows(
    block: Block,
    rows: Sequence[Sequence[Sequence[str]]],
    weights: Sequence[Sequence[str]],
    *,
    thread: str,
    scratch: str,
    threads: int,
    width: int,
    eps: float,
    dtype: str,
) -> list[list[list[str]]]:
    """RMS norms of rows that a CTA holds: [row][vector][word] to the same of row / rms(row) * weight.

    width: values in a row. scratch: shared memory of `scratch_words` words. Every thread adds in the same order, so that the
    result does not hang on which device computes it.
    """
    num_warps = threads // WARP
    warp, lane = block.compute("shr.u32", thread, 5), block.compute("and.b32", thread, WARP - 1)
    leads = block.compute("setp.eq.u32", lane, 0, kind="pred")
    own_scratch = block.compute("mad.lo.u32", warp, 4, scratch)
    for i, row in enumerate(rows):
        total = block.compute("mov.b32", 0)
        for words in row:
            for value in (value for word in words for value in unpack(block, word, dtype)):
                block.emit(f"fma.rn.f32 {total}, {value}, {value}, {total}")
        for distance in (16, 8, 4, 2, 1):
            other = block.compute("shfl.sync.bfly.b32", total, distance, 31, -1)
            block.emit(f"add.rn.f32 {total}, {total}, {other}")
        block.emit(f"@{leads} st.shared.b32 [{own_scratch}+{i * WARP * 4}], {total}")
    block.emit("bar.sync 0")
    normed = []
    for i, row in enumerate(rows):
        parts = block.regs(num_warps)
        for first in range(0, num_warps, 4):
            block.emit(f"ld.shared.v4.b32 {vector(parts[first : first + 4])}, [{scratch}+{(i * WARP + first) * 4}]")
        total = block.compute("mov.b32", parts[0])
        block.emit(*(f"add.rn.f32 {total}, {total}, {part}" for part in parts[1:]))
        block.emit(
            f"mul.rn.f32 {total}, {total}, {float32(1.0 / width)}",
            f"add.rn.f32 {total}, {total}, {float32(eps)}",
            f"rsqrt.approx.f32 {total}, {total}",
        )
        normed.append([_scaled(block, words, total, weight, dtype) for words, weight in zip(row, weights, strict=True)])
    return normed


def scratch_words(num_rows: int) -> int:
    """Of shared memory that `norm_rows` needs: a sum per row and warp."""
    return num_rows * WARP


def _scaled(block: Block, words: Sequence[str], factor: str, weights: Sequence[str], dtype: str) -> list[str]:
    """words * factor * weights, rounded after each product as plain JAX does in float32."""
    values = []
    for word, weight in zip(words, weights, strict=True):
        for value, scale in zip(unpack(block, word, dtype), unpack(block, weight, dtype), strict=True):
            product = block.compute("mul.rn.f32", value, factor)
            block.emit(f"mul.rn.f32 {product}, {product}, {scale}")
            values.append(product)
    return pack(block, values, dtype)

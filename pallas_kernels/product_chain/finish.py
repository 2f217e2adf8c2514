"""The PTX of what follows a unit's sums.

A warpgroup has the sums of HALF outputs, transposed, in the tensor cores' order: thread 32 w + 4 g + q has, of each CHUNK of rows, those of
the outputs 16 w + g and 8 more, each for the rows 2 q and 2 q + 1.

*Parts.* The warpgroup that adds the last part of an output's sums reads all of them and adds them up in their order, whichever came last.
"""

from collections.abc import Sequence

from pallas_kernels.collectives.ptx import float32, guarded, vector
from pallas_kernels.product_chain.plan import HALF, Chain, Product
from pallas_kernels.product_chain.waiting import COUNTER_BYTES, THREADS, Counters, Warpgroup

CHUNK, FOUR = 8, 4
"""Rows of sums of which a thread has four values: two outputs of each of two rows."""
WARPS = 4
_LOG2_E = 1.4426950408889634


def scratch_words(padded_rows: int) -> int:
    """Shared memory of a warpgroup: what it tells its threads, and sums of squares of each warp."""
    return 4 + WARPS * padded_rows


def sums_per_thread(product: Product, padded_rows: int) -> int:
    """Values of a thread: [sums of an output, rows / CHUNK, FOUR]."""
    return product.num_sums * padded_rows // CHUNK * FOUR


def finish_operands(product: Product) -> tuple[str, ...]:
    """Names of the pointers that `finish` takes after "unit"."""
    return (
        "workspace",
        "scratch",
        "out",
        *["parts"] * (product.num_parts > 1),
        *["residual"] * product.adds_residual,
        *["squares"] * product.is_normed,
        *["norm_weight", "normed", "own_squares"] * product.norms_next,
    )


class _Finish(Warpgroup):
    """A block of PTX that knows where its thread's values lie. The warpgroup's number is that of its half of a block."""

    def __init__(self, operands: Sequence[str], chain: Chain, index: int):
        super().__init__(operands)
        self.chain, self.index, self.product = chain, index, chain.products[index]
        self.counters = Counters(chain)
        self.half = self.number
        self.warp, self.lane = self.compute("shr.u32", self.thread, 5), self.compute("and.b32", self.thread, 31)
        self.row = self.compute("and.b32", self.lane, 3)
        self.emit(f"shl.b32 {self.row}, {self.row}, 1")
        self.group = self.compute("shr.u32", self.lane, 2)

    def pointer(self, name: str, offset: str, itemsize: int) -> str:
        """Address of the operand's value at an offset, which is a register of 32 bits."""
        at = self.compute("mul.wide.u32", offset, itemsize, kind="b64")
        self.emit(f"add.s64 {at}, {at}, {self.operand(name)}")
        return at

    def find_unit(self) -> None:
        """The block of the unit, and this thread's first output."""
        product, unit = self.product, self.operand("unit")
        self.unit_block = self.compute("div.u32", unit, product.num_parts)
        self.own_half = self.compute("mad.lo.u32", self.unit_block, 2, self.half)
        """Among the halves of all blocks."""
        self.output = self.compute("mad.lo.u32", self.own_half, HALF, self.group)
        self.emit(f"mad.lo.u32 {self.output}, {self.warp}, 16, {self.output}")
        self.origin = self.compute("mad.lo.u32", self.row, product.num_outputs, self.output)

    def places(self) -> list[tuple[int, int, int, str | None]]:
        """(chunk, row of two, output of two, predicate of the threads whose row there is), for each value of a sum."""
        found: list[tuple[int, int, int, str | None]] = []
        for chunk in range(self.chain.padded_rows // CHUNK):
            for row in range(2):
                left = self.chain.num_rows - CHUNK * chunk - row
                if left > 0:
                    where = None if left > CHUNK - 2 else self.compute("setp.lt.u32", self.row, left, kind="pred")
                    found += [(chunk, row, output, where) for output in range(2)]
        return found

    def at(self, pointer: str, chunk: int, row: int, output: int) -> str:
        """Place of a value in an array of 16 bits like the result."""
        return f"[{pointer}+{((CHUNK * chunk + row) * self.product.num_outputs + 8 * output) * 2}]"

    def load16(self, at: str, where: str | None = None, kind: str = "ld.global") -> str:
        """A bfloat16 as float32; 0 where it is not loaded."""
        short = self.reg("b16")
        if where is not None:
            self.emit(f"mov.b16 {short}, 0")
        self.emit(guarded(where, f"{kind}.b16 {short}, {at}"))
        wide = self.compute("cvt.u32.u16", short)
        self.emit(f"shl.b32 {wide}, {wide}, 16")
        return wide

    def store16(self, at: str, value: str, where: str | None) -> str:
        """Rounds a float32 to bfloat16 and stores it; returns what was stored, as float32."""
        word = self.compute("cvt.rn.bf16x2.f32", value, value)
        short = self.compute("cvt.u16.u32", word, kind="b16")
        self.emit(guarded(where, f"st.global.b16 {at}, {short}"))
        self.emit(f"and.b32 {word}, {word}, 0xffff0000")
        return word


def finish(operands: Sequence[str], chain: Chain, index: int, sums: Sequence[str] | None = None) -> str:
    """Add up the parts of a unit of product `index`, and write its result.

    operands: "unit", those of `finish_operands`, and the sums, of which `sums` are the names: [sums of an output, chunk, FOUR].
    """
    block = _Finish(operands, chain, index)
    product = block.product
    count = sums_per_thread(product, chain.padded_rows)
    found = list(sums or (block.operand(f"sum{i}") for i in range(count)))
    block.find_unit()
    end = block.label()
    places = block.places()
    factors = _inverse_rms(block) if product.is_normed and product.num_parts == 1 else {}
    if product.num_parts > 1:
        _keep_part(block, found, end)
        factors = _inverse_rms(block) if product.is_normed else {}
        found = _add_parts(block, count)
    if product.is_normed:
        found = _scaled(block, found, factors)
    if product.gated:
        found = _silu_up(block, found)
    _store(block, found, places)
    if index + 1 < len(chain.products):
        block.emit("fence.proxy.async.global", "fence.acq_rel.gpu")
        block.meet()
        done = f"[{block.operand('workspace')}+{block.counters.done(index)}]"
        block.emit(guarded(block.first, f"red.release.gpu.global.add.u32 {done}, 1"))
    block.place(end)
    return block.text()


def _keep_part(block: _Finish, sums: Sequence[str], end: str) -> None:
    """Write the sums of a part; only the warpgroup that is the last of its half goes on, the others to `end`."""
    at = block.compute("mad.lo.u32", block.operand("unit"), 2, block.half)
    block.emit(f"mad.lo.u32 {at}, {at}, {THREADS * len(sums)}, 0")
    block.emit(f"mad.lo.u32 {at}, {block.thread}, {FOUR}, {at}")
    pointer = block.pointer("parts", at, 4)
    for i in range(0, len(sums), FOUR):
        block.emit(f"st.global.v4.f32 [{pointer}+{i * THREADS * 4}], {vector(sums[i : i + FOUR])}")
    block.emit("fence.acq_rel.gpu")
    block.meet()
    counter = block.pointer("workspace", block.own_half, COUNTER_BYTES)
    counter_at = f"[{counter}+{block.counters.parts(block.index)}]"
    num_before, told = block.compute("mov.b32", 0), _own_scratch(block)
    block.emit(
        f"@{block.first} atom.acq_rel.gpu.global.add.u32 {num_before}, {counter_at}, 1",
        f"@{block.first} st.shared.b32 [{told}], {num_before}",
    )
    block.meet()
    block.emit(f"ld.shared.b32 {num_before}, [{told}]")
    others = block.compute("setp.ne.u32", num_before, block.product.num_parts - 1, kind="pred")
    block.emit(f"@{others} bra {end}")
    zero = block.compute("mov.b32", 0)
    block.emit("fence.acq_rel.gpu", f"@{block.first} st.global.b32 {counter_at}, {zero}")


def _own_scratch(block: _Finish) -> str:
    return block.compute("mad.lo.u32", block.half, 4 * scratch_words(block.chain.padded_rows), block.operand("scratch"))


def _add_parts(block: _Finish, count: int) -> list[str]:
    product = block.product
    at = block.compute("mul.lo.u32", block.unit_block, 2 * product.num_parts)
    block.emit(
        f"add.u32 {at}, {at}, {block.half}",
        f"mul.lo.u32 {at}, {at}, {THREADS * count}",
        f"mad.lo.u32 {at}, {block.thread}, {FOUR}, {at}",
    )
    pointer = block.pointer("parts", at, 4)
    found: list[str] = []
    for i in range(0, count, FOUR):
        parts = [block.regs(FOUR) for _ in range(product.num_parts)]
        for part, words in enumerate(parts):
            offset = (2 * part * count + i) * THREADS * 4
            block.emit(f"ld.relaxed.gpu.global.v4.b32 {vector(words)}, [{pointer}+{offset}]")
        total, *others = parts
        for words in others:
            block.emit(*(f"add.rn.f32 {x}, {x}, {y}" for x, y in zip(total, words, strict=True)))
        found += total
    return found


def _inverse_rms(block: _Finish) -> dict[tuple[int, int], str]:
    """1 / rms of the rows (chunk, row of two) of the product before, whose squares are summed in eight parts and these by pairs."""
    chain, before = block.chain, block.chain.products[block.index - 1]
    num_slots, width = before.num_outputs // HALF, chain.padded_rows
    at = block.compute("mad.lo.u32", block.group, width, block.row)
    pointer = block.pointer("squares", at, 4)
    keys = [(chunk, row) for chunk in range(width // CHUNK) for row in range(2)]
    totals = {key: block.compute("mov.b32", 0) for key in keys}
    for first in range(0, num_slots, 8):
        left = num_slots - first
        where = None if left >= 8 else block.compute("setp.lt.u32", block.group, left, kind="pred")
        for chunk in range(width // CHUNK):
            words = [block.compute("mov.b32", 0) for _ in range(2)]
            offset = (first * width + CHUNK * chunk) * 4
            block.emit(guarded(where, f"ld.relaxed.gpu.global.v2.b32 {vector(words)}, [{pointer}+{offset}]"))
            for row, word in enumerate(words):
                block.emit(f"add.rn.f32 {totals[chunk, row]}, {totals[chunk, row]}, {word}")
    for total in totals.values():
        _add_groups(block, total)
        block.emit(
            f"mul.rn.f32 {total}, {total}, {float32(1.0 / before.num_outputs)}",
            f"add.rn.f32 {total}, {total}, {float32(chain.eps)}",
            f"rsqrt.approx.f32 {total}, {total}",
        )
    return totals


def _add_groups(block: _Finish, total: str) -> None:
    """Add up over the eight threads of a warp that have the same rows."""
    for distance in (4, 8, 16):
        other = block.compute("shfl.sync.bfly.b32", total, distance, 31, -1)
        block.emit(f"add.rn.f32 {total}, {total}, {other}")


def _scaled(block: _Finish, sums: Sequence[str], factors: dict[tuple[int, int], str]) -> list[str]:
    chunks = block.chain.padded_rows // CHUNK
    # Of FOUR values the first and third are of the first row.
    return [block.compute("mul.rn.f32", value, factors[i // FOUR % chunks, i % 2]) for i, value in enumerate(sums)]


def _silu_up(block: _Finish, sums: Sequence[str]) -> list[str]:
    gates, ups = sums[: len(sums) // 2], sums[len(sums) // 2 :]
    found = []
    for gate, up in zip(gates, ups, strict=True):
        x = block.compute("mul.rn.f32", gate, float32(-_LOG2_E))
        block.emit(f"ex2.approx.f32 {x}, {x}", f"add.rn.f32 {x}, {x}, {float32(1.0)}", f"rcp.approx.f32 {x}, {x}")
        block.emit(f"mul.rn.f32 {x}, {x}, {gate}", f"mul.rn.f32 {x}, {x}, {up}")
        found.append(x)
    return found


def _store(block: _Finish, values: Sequence[str], places: Sequence[tuple[int, int, int, str | None]]) -> None:
    """The result, with the residual added; and for a norm, the result times its weight, and the squares."""
    product, out = block.product, block.pointer("out", block.origin, 2)
    olds = []
    if product.adds_residual:
        residual = block.pointer("residual", block.origin, 2)
        olds = [block.load16(block.at(residual, *place), where, "ld.relaxed.gpu.global") for *place, where in places]
    weights, normed = [], ""
    if product.norms_next:
        weight = block.pointer("norm_weight", block.output, 2)
        weights, normed = (
            [block.load16(f"[{weight}+{16 * output}]") for output in range(2)],
            block.pointer("normed", block.origin, 2),
        )
    squares: dict[tuple[int, int], str] = {}
    for number, (chunk, row, output, where) in enumerate(places):
        value = values[chunk * FOUR + 2 * output + row]
        if olds:
            value = block.compute("add.rn.f32", value, olds[number])
        stored = block.store16(block.at(out, chunk, row, output), value, where)
        if not product.norms_next:
            continue
        scaled = block.compute("mul.rn.f32", stored, weights[output])
        block.store16(block.at(normed, chunk, row, output), scaled, where)
        if where is not None:  # what a thread has of a row that is not there is not counted
            block.emit(f"@!{where} mov.b32 {stored}, 0")
        key = chunk, row
        if key not in squares:
            squares[key] = block.compute("mov.b32", 0)
        block.emit(f"fma.rn.f32 {squares[key]}, {stored}, {stored}, {squares[key]}")
    if product.norms_next:
        _store_squares(block, squares)


def _store_squares(block: _Finish, squares: dict[tuple[int, int], str]) -> None:
    """Write each row's sum of squares of this half's outputs, float32 [outputs / HALF, rows]; 0 for rows that are not there."""
    width, scratch = block.chain.padded_rows, _own_scratch(block)
    leads = block.compute("setp.lt.u32", block.lane, 4, kind="pred")
    at = block.compute("mad.lo.u32", block.warp, width, block.row)
    block.emit(f"mad.lo.u32 {at}, {at}, 4, {scratch}")
    for chunk in range(width // CHUNK):
        for row in range(2):
            total = squares.get((chunk, row)) or block.compute("mov.b32", 0)
            _add_groups(block, total)
            block.emit(f"@{leads} st.shared.b32 [{at}+{16 + (CHUNK * chunk + row) * 4}], {total}")
    block.meet()
    writes = block.compute("setp.lt.u32", block.thread, width, kind="pred")
    own = block.compute("mad.lo.u32", block.thread, 4, scratch)
    total, *others = [block.compute("mov.b32", 0) for _ in range(WARPS)]
    for warp, word in enumerate((total, *others)):
        block.emit(f"@{writes} ld.shared.b32 {word}, [{own}+{16 + warp * width * 4}]")
    block.emit(*(f"add.rn.f32 {total}, {total}, {other}" for other in others))
    place = block.compute("mad.lo.u32", block.own_half, width, block.thread)
    block.emit(guarded(writes, f"st.global.b32 [{block.pointer('own_squares', place, 4)}], {total}"))

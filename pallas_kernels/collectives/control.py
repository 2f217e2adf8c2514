"""The PTX of what the host does with a workspace: to read and write its header, to clear it."""

from collections.abc import Sequence

from pallas_kernels.collectives.exchange import COUNTERS, EMPTY, HEADER_WORDS, SLOTS, STATE, WORKSPACE_BYTES
from pallas_kernels.collectives.plans import VECTOR_BYTES
from pallas_kernels.collectives.ptx import Block, vector


def read_state(operands: Sequence[str]) -> str:
    """Operands: workspace, after (not read), out."""
    block = Block(operands)
    state = block.compute("ld.relaxed.sys.global.b32", f"[{block.operand('workspace')}+{STATE}]")
    block.emit(f"st.global.b32 [{block.operand('out')}], {state}")  # by every thread, the same
    return block.text()


def write_header(operands: Sequence[str]) -> str:
    """Operands: workspace, header, out (the state)."""
    block = Block(operands)
    thread = block.compute("mov.u32", "%tid.x")
    writes = block.compute("setp.lt.u32", thread, HEADER_WORDS, kind="pred")
    last = block.compute("setp.eq.u32", thread, HEADER_WORDS - 1, kind="pred")
    source, target = (block.compute("mul.wide.u32", thread, 4, kind="b64") for _ in range(2))
    block.emit(f"add.s64 {source}, {source}, {block.operand('header')}")
    block.emit(f"add.s64 {target}, {target}, {block.operand('workspace')}")
    word = block.reg()
    block.emit(f"@{writes} ld.global.b32 {word}, [{source}]", f"@{writes} st.global.b32 [{target}], {word}")
    block.emit(f"@{last} st.global.b32 [{block.operand('out')}], {word}")
    return block.text()


def clear(operands: Sequence[str], *, ctas: int, threads: int, slots: int = SLOTS, end: int = WORKSPACE_BYTES) -> str:
    """All slots empty, all counters 0. Operands: workspace, out (0). slots, end: bytes."""
    block = Block(operands)
    thread, cta = block.compute("mov.u32", "%tid.x"), block.compute("mov.u32", "%ctaid.x")
    offset = block.compute("mad.lo.u32", cta, threads, thread)
    block.emit(f"mul.lo.u32 {offset}, {offset}, {VECTOR_BYTES}")
    at = block.compute("cvt.u64.u32", offset, kind="b64")
    block.emit(f"add.s64 {at}, {at}, {block.operand('workspace')}")
    zero, empty = block.compute("mov.b32", 0), block.compute("mov.b32", EMPTY)
    first = block.compute("setp.eq.u32", offset, 0, kind="pred")
    block.emit(f"@{first} st.global.b32 [{block.operand('out')}], {zero}")
    in_counters, more = block.regs(2, "pred")
    block.emit(
        f"setp.lt.u32 {in_counters}, {offset}, {slots - COUNTERS}",
        f"@{in_counters} st.global.v4.b32 [{at}+{COUNTERS}], {vector([zero] * 4)}",
    )
    stride = ctas * threads * VECTOR_BYTES
    assert slots - COUNTERS <= stride and (end - slots) % stride == 0
    again = block.label()
    block.place(again)
    block.emit(
        f"st.global.v4.b32 [{at}+{slots}], {vector([empty] * 4)}",
        f"add.s64 {at}, {at}, {stride}",
        f"add.u32 {offset}, {offset}, {stride}",
        f"setp.lt.u32 {more}, {offset}, {end - slots}",
        f"@{more} bra {again}",
    )
    return block.text()

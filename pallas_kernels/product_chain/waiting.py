"""The PTX by which CTAs wait for each other's results, and by which memory does not wait in the meantime.

*Order.* A warpgroup writes, then each of its threads fences and they meet, then one adds to a counter with release. Who reads has seen the
counter with acquire. What TMA copies was written by plain stores: both sides have a proxy fence, too. All that other CTAs wrote is read
with relaxed loads of GPU scope, past the first-level cache.

*Counters* are 0 before and after a kernel: who comes last in place resets them. XLA may take their array for a constant.

*Waiting is bounded.* After WAIT_SECONDS a thread ends the program.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pallas_kernels.collectives.ptx import Block, guarded
from pallas_kernels.product_chain.plan import Chain

THREADS = 128
"""Threads of a warpgroup."""
WARP = 32
WAIT_SECONDS = 10.0
POLLS_PER_LOOK = 4096
"""Polls between two looks at the clock."""
_LINE_BYTES, COUNTER_BYTES = 128, 32
"""Bytes from one counter to the next: of those that all CTAs poll, and of the others."""
UPCOMING_BYTES = 16 << 20
"""Bytes that are brought into the cache for later kernels: about as many as memory gives until the next one reads (an estimate)."""
_PREFETCHED_AT_ONCE = 16 << 10


@dataclass(frozen=True)
class Counters:
    """Where in the workspace a chain's counters lie, in bytes."""

    chain: Chain

    LEFT = 0
    """CTAs that wait for nothing any more."""

    def done(self, product: int) -> int:
        """Warpgroups' results of a product that are there."""
        return _LINE_BYTES * (1 + product)

    def parts(self, product: int) -> int:
        """The first of a product's counters of parts: one for each half of a block."""
        before = sum(2 * each.num_blocks * COUNTER_BYTES for each in self.chain.products[:product])
        return self.done(len(self.chain.products)) + before

    @property
    def num_words(self) -> int:
        return self.parts(len(self.chain.products)) // 4


class Warpgroup(Block):
    """A block of PTX that knows its thread's place."""

    def __init__(self, operands: Sequence[str]):
        super().__init__(operands)
        thread = self.compute("mov.u32", "%tid.x")
        self.number, self.thread = self.compute("shr.u32", thread, 7), self.compute("and.b32", thread, THREADS - 1)
        self.first = self.compute("setp.eq.u32", self.thread, 0, kind="pred")
        self._barrier = self.compute("add.u32", self.number, 1)  # that of the warpgroup in Mosaic GPU

    def rejoin(self) -> None:
        """The threads of each warp go on together."""
        self.emit(f"bar.warp.sync {(1 << WARP) - 1:#x}")

    def meet(self) -> None:
        """The warpgroup's threads wait for each other."""
        self.emit(f"bar.sync {self._barrier}, {THREADS}")


def await_product(operands: Sequence[str], chain: Chain, index: int) -> str:
    """By a warpgroup: wait until all of product `index` is there, and may be read by TMA. Operands: workspace."""
    block = Warpgroup(operands)
    target = 2 * chain.products[index].num_blocks
    at = f"[{block.operand('workspace')}+{Counters(chain).done(index)}]"
    num_done, polls, look = block.reg(), block.compute("mov.b32", 0), block.reg()
    since, now = block.compute("mov.u64", "%globaltimer", kind="b64"), block.reg("b64")
    is_done, soon, late = block.regs(3, "pred")
    again, done = block.label(), block.label()
    # One warp polls: more would hinder those that count.
    others = block.compute("setp.ge.u32", block.thread, WARP, kind="pred")
    block.emit(f"@{others} bra {done}")
    block.place(again)
    block.emit(
        f"ld.acquire.gpu.global.b32 {num_done}, {at}",
        f"setp.ge.u32 {is_done}, {num_done}, {target}",
        f"@{is_done} bra {done}",
        f"add.u32 {polls}, {polls}, 1",
        f"and.b32 {look}, {polls}, {POLLS_PER_LOOK - 1}",
        f"setp.ne.u32 {soon}, {look}, 0",
        f"@{soon} bra {again}",
        f"mov.u64 {now}, %globaltimer",
        f"sub.u64 {now}, {now}, {since}",
        f"setp.ge.u64 {late}, {now}, {int(WAIT_SECONDS * 1e9)}",
        f"@{late} trap",
        f"bra {again}",
    )
    block.place(done)
    block.rejoin()
    block.meet()
    block.emit("fence.proxy.async")
    return block.text()


def prefetch(sizes: Mapping[str, int], num_ctas: int) -> str:
    """By a warpgroup of each CTA: ask the cache for the first UPCOMING_BYTES of arrays. sizes: bytes by operand, in their order."""
    block = Warpgroup(list(sizes))
    cta, left = block.compute("mov.u32", "%ctaid.x"), UPCOMING_BYTES
    for name, size in sizes.items():
        share = min(size, left) // num_ctas // _LINE_BYTES * _LINE_BYTES
        left -= min(size, left)
        start = block.compute("mul.wide.u32", cta, share, kind="b64")
        block.emit(f"add.s64 {start}, {start}, {block.operand(name)}")
        for offset in range(0, share, _PREFETCHED_AT_ONCE):
            count = min(_PREFETCHED_AT_ONCE, share - offset)
            block.emit(guarded(block.first, f"cp.async.bulk.prefetch.L2.global [{start}+{offset}], {count}"))
    return block.text()


def leave(operands: Sequence[str], chain: Chain, num_ctas: int) -> str:
    """By the warpgroup that waited, after its last wait: the last CTA resets what they waited for. Operands: workspace."""
    block = Warpgroup(operands)
    workspace, counters = block.operand("workspace"), Counters(chain)
    end = block.label()
    others = block.compute("setp.ne.u32", block.thread, 0, kind="pred")
    num_before = block.reg()
    block.emit(
        f"@{others} bra {end}",
        f"atom.acq_rel.gpu.global.add.u32 {num_before}, [{workspace}+{counters.LEFT}], 1",
        f"setp.ne.u32 {others}, {num_before}, {num_ctas - 1}",
        f"@{others} bra {end}",
    )
    zero = block.compute("mov.b32", 0)
    for at in (counters.LEFT, *(counters.done(index) for index in range(len(chain.products) - 1))):
        block.emit(f"st.global.b32 [{workspace}+{at}], {zero}")
    block.place(end)
    block.rejoin()
    return block.text()

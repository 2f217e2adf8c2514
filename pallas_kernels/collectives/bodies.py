"""The PTX of each collective: what the threads of one CTA do, from the loads of the own input to the stores of the results."""

from collections.abc import Sequence

from pallas_kernels.collectives.arithmetic import ITEMSIZE, add_up, norm_rows
from pallas_kernels.collectives.exchange import Exchange, Words
from pallas_kernels.collectives.plans import VECTOR_BYTES, Plan
from pallas_kernels.collectives.ptx import Block, guarded, vector

VECTORS_AT_ONCE = 8
"""A thread waits for about so many vectors together: with more it makes fewer round trips to the cache, and keeps more registers."""


class _Share:
    """This thread's vectors of one member of each group: a number, or a register with one."""

    def __init__(self, block: Exchange, plan: Plan, member: int | str = 0):
        self.block, self.plan = block, plan
        self.member = member if isinstance(member, int) else 0
        self.first = block.compute("mad.lo.u32", block.cta, plan.group * plan.width, block.thread)
        if isinstance(member, str):
            block.emit(f"mad.lo.u32 {self.first}, {member}, {plan.width}, {self.first}")
        self.where = [self._where(i, k) for i, k in plan.pieces()]
        """Of each piece the predicate of the threads that have it; None: all."""

    def _where(self, i: int, k: int) -> str | None:
        plan, block = self.plan, self.block
        in_row = in_array = None
        if (k + 1) * plan.threads > plan.width:
            in_row = block.compute("setp.lt.u32", block.thread, plan.width - k * plan.threads, kind="pred")
        if plan.ctas * plan.groups * plan.group * plan.width > plan.total:
            left = max(0, plan.total - plan.offset(i, k, self.member))
            in_array = block.compute("setp.lt.u32", self.first, left, kind="pred")
        return block.both(in_row, in_array)

    def address(self, operand: str) -> str:
        """Of the operand's vector of the first piece, of member 0 or that of the register."""
        at = self.block.compute("mul.wide.u32", self.first, VECTOR_BYTES, kind="b64")
        self.block.emit(f"add.s64 {at}, {at}, {self.block.operand(operand)}")
        return at

    def at(self, address: str, piece: int) -> str:
        i, k = divmod(piece, self.plan.per_thread)
        return f"[{address}+{self.plan.offset(i, k, self.member) * VECTOR_BYTES}]"

    def load(self, operand: str) -> list[Words]:
        """All pieces; zeros in threads that do not have one."""
        address = self.address(operand)
        return [_load(self.block, self.at(address, j), where) for j, where in enumerate(self.where)]

    def store(self, address: str, piece: int, words: Sequence[str]) -> None:
        self.block.emit(guarded(self.where[piece], f"st.global.v4.b32 {self.at(address, piece)}, {vector(words)}"))


def _load(block: Block, at: str, where: str | None = None) -> Words:
    words = block.regs(4)
    if where is not None:
        block.emit(*(f"mov.b32 {word}, 0" for word in words))
    block.emit(guarded(where, f"ld.global.v4.b32 {vector(words)}, {at}"))
    return words


def _load_weights(block: Exchange, plan: Plan) -> list[Words]:
    at = block.compute("mul.wide.u32", block.thread, VECTOR_BYTES, kind="b64")
    block.emit(f"add.s64 {at}, {at}, {block.operand('weight')}")
    found = []
    for k in range(plan.per_thread):
        left = plan.width - k * plan.threads
        where = block.compute("setp.lt.u32", block.thread, left, kind="pred") if left < plan.threads else None
        found.append(_load(block, f"[{at}+{k * plan.piece_bytes}]", where))
    return found


def _ranks(block: Exchange) -> list[str]:
    """The rank of each neighbour, the own one first."""
    ranks = [block.rank]
    for neighbour in range(1, block.num_devices):
        rank = block.compute("add.u32", block.rank, neighbour)
        past = block.compute("setp.ge.u32", rank, block.num_devices, kind="pred")
        block.emit(f"@{past} sub.u32 {rank}, {rank}, {block.num_devices}")
        ranks.append(rank)
    return ranks


def one_shot(operands: Sequence[str], plan: Plan, *, num_devices: int, dtype: str, eps: float = 0.0) -> str:
    """Each device sends everything to each other and adds up everything.

    Operands: workspace, x, [residual], out, [weight, normed, scratch]; with the latter, rows of the plan are rows of the norm.
    """
    block = Exchange(operands, num_devices=num_devices, threads=plan.threads, num_pieces=plan.num_pieces)
    block.load_header()
    share = _Share(block, plan)
    own = share.load("x")
    residual = share.load("residual") if "residual" in operands else []
    weights = _load_weights(block, plan) if "normed" in operands else []
    out = share.address("out")
    block.ready()
    for j, words in enumerate(own):
        block.clamp(words)
        sending = block.both(block.active, share.where[j])
        for neighbour in range(1, num_devices):
            block.send(neighbour, j, words, sending)
    block.count_call()
    sums: list[Words] = []
    for some in _batches(plan.num_pieces, num_devices):
        where = [[share.where[j]] * num_devices for j in some]
        for j, by_rank in zip(some, block.receive(some, [own[j] for j in some], where), strict=True):
            sums.append(add_up(block, by_rank + residual[j : j + 1], dtype))
            share.store(out, j, sums[j])
    if weights:
        rows = [sums[i * plan.per_thread :][: plan.per_thread] for i in range(plan.groups)]
        normed = _norm(block, plan, rows, weights, eps, dtype)
        target = share.address("normed")
        for j, words in enumerate(words for row in normed for words in row):
            share.store(target, j, words)
    return block.text()


def two_shot(operands: Sequence[str], plan: Plan, *, num_devices: int, dtype: str, eps: float = 0.0) -> str:
    """Device r adds up row r of each group of n rows and sends the sums to the others.

    Operands as those of `one_shot`. Every device norms all rows itself: to send what is normed too would take longer.
    """
    n = num_devices
    block = Exchange(operands, num_devices=n, threads=plan.threads, num_pieces=plan.num_pieces, num_phases=2)
    block.load_header()
    neighbours = [_Share(block, plan, rank) for rank in _ranks(block)]
    mine, *theirs = neighbours
    to_send = [share.load("x") for share in theirs]
    own = mine.load("x")
    residual = mine.load("residual") if "residual" in operands else []
    weights = _load_weights(block, plan) if "normed" in operands else []
    block.ready()
    for neighbour, (share, pieces) in enumerate(zip(theirs, to_send, strict=True), 1):
        for j, words in enumerate(pieces):
            block.clamp(words)
            block.send(neighbour, j, words, block.both(block.active, share.where[j]))
    block.count_call()
    sums = []
    for j, words in enumerate(own):
        block.clamp(words)
        [by_rank] = block.receive([j], [words], [[mine.where[j]] * n])
        sums.append(add_up(block, by_rank + residual[j : j + 1], dtype))
        block.clamp(sums[j])
        sending = block.both(block.active, mine.where[j])
        for neighbour in range(1, n):
            block.send(neighbour, j, sums[j], sending, phase=1)
    members = [_Share(block, plan, r) for r in range(n)]
    out = members[0].address("out")
    rows: list[list[Words]] = [[] for _ in range(plan.groups * n)]
    for j in range(plan.num_pieces):
        [by_rank] = block.receive([j], [sums[j]], [[member.where[j] for member in members]], phase=1)
        for r, words in enumerate(by_rank):
            members[r].store(out, j, words)
            rows[j // plan.per_thread * n + r].append(words)
    if weights:
        normed = _norm(block, plan, rows, weights, eps, dtype)
        target = members[0].address("normed")
        for j in range(plan.num_pieces):
            i, k = divmod(j, plan.per_thread)
            for r in range(n):
                members[r].store(target, j, normed[i * n + r][k])
    return block.text()


def to_all(operands: Sequence[str], plan: Plan, *, num_devices: int) -> str:
    """Slice d of x goes to device d, and slice s of out came from device s. Operands: workspace, x, out; a plan of one slice."""
    block = Exchange(operands, num_devices=num_devices, threads=plan.threads, num_pieces=plan.num_pieces)
    block.load_header()
    share, ranks = _Share(block, plan), _ranks(block)
    x, out = share.address("x"), share.address("out")
    slices = []
    for rank in ranks:
        at = block.compute("mul.wide.u32", rank, plan.total * VECTOR_BYTES, kind="b64")
        block.emit(f"add.s64 {at}, {at}, {x}")
        slices.append(at)
    block.ready()
    for some in _batches(plan.num_pieces, num_devices):
        loaded = [[_load(block, share.at(at, j), share.where[j]) for j in some] for at in slices[1:]]
        for neighbour, pieces in enumerate(loaded, 1):
            for j, words in zip(some, pieces, strict=True):
                block.clamp(words)
                block.send(neighbour, j, words, block.both(block.active, share.where[j]))
    block.count_call()
    for some in _batches(plan.num_pieces, num_devices):
        own = [_load(block, share.at(slices[0], j), share.where[j]) for j in some]
        for words in own:
            block.clamp(words)
        where = [[share.where[j]] * num_devices for j in some]
        for j, by_rank in zip(some, block.receive(some, own, where), strict=True):
            for r, words in enumerate(by_rank):
                at = block.compute("add.s64", out, r * plan.total * VECTOR_BYTES, kind="b64")
                share.store(at, j, words)
    return block.text()


def gather(operands: Sequence[str], num_words: int, *, num_devices: int, threads: int) -> str:
    """out[r] = x of device r, one word a thread, of any bits. Operands: workspace, x, out.

    A word travels as its two halves in two words, neither of which can be EMPTY.
    """
    block = Exchange(operands, num_devices=num_devices, threads=threads, num_pieces=1)
    block.load_header()
    index = block.compute("mad.lo.u32", block.cta, threads, block.thread)
    where = block.compute("setp.lt.u32", index, num_words, kind="pred") if num_words % threads else None
    offset = block.compute("mul.wide.u32", index, 4, kind="b64")
    word = block.compute("mov.b32", 0)
    source = block.compute("add.s64", offset, block.operand("x"), kind="b64")
    block.emit(guarded(where, f"ld.global.b32 {word}, [{source}]"))
    block.ready()
    halves = [block.compute("and.b32", word, 0xFFFF), block.compute("shr.u32", word, 16)]
    for neighbour in range(1, num_devices):
        block.send(neighbour, 0, halves, block.both(block.active, where))
    block.count_call()
    [by_rank] = block.receive([0], [halves], [[where] * num_devices])
    target = block.compute("add.s64", offset, block.operand("out"), kind="b64")
    for rank, (low, high) in enumerate(by_rank):
        whole = block.compute("shl.b32", high, 16)
        block.emit(f"or.b32 {whole}, {whole}, {low}")
        block.emit(guarded(where, f"st.global.b32 [{target}+{rank * num_words * 4}], {whole}"))
    return block.text()


def _norm(
    block: Exchange, plan: Plan, rows: Sequence[Sequence[Words]], weights: Sequence[Words], eps: float, dtype: str
) -> list[list[Words]]:
    return norm_rows(
        block,
        rows,
        weights,
        thread=block.thread,
        scratch=block.operand("scratch"),
        threads=plan.threads,
        width=plan.width * VECTOR_BYTES // ITEMSIZE[dtype],
        eps=eps,
        dtype=dtype,
    )


def _batches(count: int, num_devices: int) -> list[range]:
    """Pieces that are waited for together."""
    size = max(1, VECTORS_AT_ONCE // num_devices)
    return [range(first, min(count, first + size)) for first in range(0, count, size)]

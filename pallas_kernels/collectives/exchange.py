"""The protocol by which CTAs of several GPUs exchange words through each other's memory, as pieces of PTX.

CTA b of a device talks to CTA b of every other device: channel b. Each device has, per channel, two sets of slots in its own
workspace, in which an empty word is EMPTY (all bits set). A call pushes words into the slots of the others with 128-bit stores
over NVLink, polls its own slots until no word is EMPTY, and empties them again.

*Why relaxed loads and stores are enough.* Every 32-bit word says by itself whether it has arrived, and nothing is concluded from
one word about another, so neither fences nor flags order anything. A word is never torn, and a store to it never seen twice.
All accesses that cross a device have system scope.

*Why slots alternate, and nothing waits at the end.* A channel counts its calls, and call g uses the set g mod 2. A device that
writes in call g + 2 has finished call g + 1, so it has received words that its partners sent in call g + 1 (in a two-shot
exchange: words of a third device, sent after that one had received theirs), and they sent them in a kernel that began after the
kernel of their call g had ended, with its slots emptied. Kernels of one stream do not overlap.

*What is never sent* is EMPTY itself: `clamp` makes it EMPTY - 1. In float32 and bfloat16 both are NaN, so only a NaN's payload
changes; for words that may be anything see `bodies.gather`.

*Waiting is bounded.* A thread that waits for more than WAIT_SECONDS writes FAILED into the state word of every device; kernels that
begin when the state is not WAITING neither send, nor wait, nor count, and give their own contribution in the place of others'.
"""

from collections.abc import Iterable, Sequence

from pallas_kernels.collectives.plans import MAX_CTAS, SLOT_BYTES, VECTOR_BYTES
from pallas_kernels.collectives.ptx import Block, guarded, vector

EMPTY = 0xFFFFFFFF
WAITING, FAILED, SILENT = 0, 1, 2
"""States: exchange; a wait took too long; do not exchange (`Communicator.set_waiting`)."""
WAIT_SECONDS = 30.0
"""How long one thread waits in one call: far more than devices of one process drift apart, less than a user's patience."""
POLLS_PER_LOOK = 4096
"""Polls between two looks at the clock; one takes about a microsecond."""

MAX_DEVICES = 8
PEERS = 0
"""Where, in bytes from the workspace's start, the addresses lie: that of device (own rank + i) mod n at 8 * i."""
RANK = 64
STATE = 68
HEADER_WORDS = STATE // 4 + 1
"""Of 32 bits: all up to here is written by the host."""
COUNTERS = 4096
"""The number of calls of each channel, in a line of its own."""
COUNTER_STRIDE = 64
SLOTS = COUNTERS + MAX_CTAS * COUNTER_STRIDE
WORKSPACE_BYTES = SLOTS + 2 * MAX_CTAS * SLOT_BYTES
"""Per device: 64 MiB."""

Words = list[str]
"""Registers of one vector."""


class Exchange(Block):
    """A block that exchanges vectors with the other devices: `load_header`, own loads, `ready`, then `send` and `receive`.

    A channel's slots of a call lie as [phase, sender, piece, thread].
    """

    def __init__(self, operands: Iterable[str], *, num_devices: int, threads: int, num_pieces: int, num_phases: int = 1):
        super().__init__(operands)
        self.num_devices = num_devices
        self.piece_bytes = threads * VECTOR_BYTES
        self.sender_bytes = num_pieces * self.piece_bytes
        assert num_phases * num_devices * self.sender_bytes <= SLOT_BYTES

    def load_header(self) -> None:
        """Read what the workspace says, all in one round trip, which the loads that follow share."""
        self.thread, self.cta = self.compute("mov.u32", "%tid.x"), self.compute("mov.u32", "%ctaid.x")
        ws = self.workspace = self.operand("workspace")
        self.peers = [self.compute("ld.global.b64", f"[{ws}+{PEERS + 8 * i}]", kind="b64") for i in range(self.num_devices)]
        self.rank = self.compute("ld.global.b32", f"[{ws}+{RANK}]")
        self._state = self.compute("ld.relaxed.sys.global.b32", f"[{ws}+{STATE}]")
        self._counter = self.compute("mul.wide.u32", self.cta, COUNTER_STRIDE, kind="b64")
        self.emit(f"add.s64 {self._counter}, {self._counter}, {ws}")
        self._count = self.compute("ld.relaxed.gpu.global.b32", f"[{self._counter}+{COUNTERS}]")

    def ready(self) -> None:
        """The first use of what was read: whether and with whom to exchange, and where the slots lie."""
        # Kernels know their workspace by its address. One that XLA copied has none of the words that others send: end the program.
        copied = self.compute("setp.ne.b64", self.peers[0], self.workspace, kind="pred")
        self.emit(f"@{copied} trap")
        self.active = self.compute("setp.eq.u32", self._state, WAITING, kind="pred")
        self.others = [self.compute("setp.ne.and.u32", self.rank, r, self.active, kind="pred") for r in range(self.num_devices)]
        parity = self.compute("and.b32", self._count, 1)
        channel = self.compute("mad.lo.u32", parity, MAX_CTAS, self.cta)
        at_thread = self.compute("mad.lo.u32", self.thread, VECTOR_BYTES, SLOTS)
        offset = self.compute("mad.lo.u32", channel, SLOT_BYTES, at_thread)
        self._inbox = self._address(self.workspace, offset)
        own = self.compute("mad.lo.u32", self.rank, self.sender_bytes, offset)
        self._outboxes = [None, *(self._address(peer, own) for peer in self.peers[1:])]
        self._since = self.compute("mov.b64", 0, kind="b64")
        self._polls = self.compute("mov.b32", 0)
        self._sentinel = self.compute("mov.b32", EMPTY)

    def _address(self, base: str, offset: str) -> str:
        """Of a thread's first slot on the device whose workspace is at `base`."""
        address = self.compute("cvt.u64.u32", offset, kind="b64")
        self.emit(f"add.s64 {address}, {address}, {base}")
        return address

    def clamp(self, words: Sequence[str]) -> None:
        """What is sent is never EMPTY."""
        for word in words:
            self.emit(f"min.u32 {word}, {word}, {EMPTY - 1}")

    def send(self, neighbour: int, piece: int, words: Sequence[str], where: str | None, phase: int = 0) -> None:
        """Push a vector (or half of one) to the device `neighbour` ranks further; `where`: a predicate that includes `active`."""
        offset = phase * self.num_devices * self.sender_bytes + piece * self.piece_bytes
        target = f"[{self._outboxes[neighbour]}+{offset}]"
        self.emit(guarded(where, f"st.relaxed.sys.global.v{len(words)}.b32 {target}, {vector(words)}"))

    def count_call(self) -> None:
        """All threads have read the channel's count: raise it."""
        next_count = self.compute("add.u32", self._count, 1)
        first = self.compute("setp.eq.and.u32", self.thread, 0, self.active, kind="pred")
        self.emit("bar.sync 0", f"@{first} st.global.b32 [{self._counter}+{COUNTERS}], {next_count}")

    def receive(
        self, pieces: Sequence[int], own: Sequence[Words], where: Sequence[Sequence[str | None]], phase: int = 0
    ) -> list[list[Words]]:
        """[piece][rank]: what each device sent for these pieces, the own words in the own place. Empties the slots.

        where[piece][rank]: a predicate of the threads that get something, None for all; the others find the own words there too.
        """
        received: list[list[Words]] = []
        slots: list[tuple[str | None, str, Words]] = []
        for piece, mine, having in zip(pieces, own, where, strict=True):
            received.append([])
            for rank, other in enumerate(self.others):
                words = [self.compute("mov.b32", word) for word in mine]
                offset = (phase * self.num_devices + rank) * self.sender_bytes + piece * self.piece_bytes
                slots.append((self.both(other, having[rank]), f"[{self._inbox}+{offset}]", words))
                received[-1].append(words)
        self._wait(slots)
        for predicate, slot, words in slots:
            empty = vector([self._sentinel] * len(words))
            self.emit(guarded(predicate, f"st.global.v{len(words)}.b32 {slot}, {empty}"))
        return received

    def _wait(self, slots: Sequence[tuple[str | None, str, Words]]) -> None:
        """Load the slots again and again until no word is EMPTY, or for WAIT_SECONDS."""
        largest, now, waited = self.reg(), self.reg("b64"), self.reg("b64")
        arrived, soon, late = self.regs(3, "pred")
        again, done = self.label(), self.label()
        self.place(again)
        for predicate, slot, words in slots:
            self.emit(guarded(predicate, f"ld.relaxed.sys.global.v{len(words)}.b32 {vector(words)}, {slot}"))
        first, *rest = [word for _, _, words in slots for word in words]
        self.emit(f"mov.b32 {largest}, {first}", *(f"max.u32 {largest}, {largest}, {word}" for word in rest))
        self.emit(
            f"setp.ne.u32 {arrived}, {largest}, {EMPTY}",
            f"@{arrived} bra {done}",
            f"add.u32 {self._polls}, {self._polls}, 1",
            f"and.b32 {largest}, {self._polls}, {POLLS_PER_LOOK - 1}",
            f"setp.ne.u32 {soon}, {largest}, 0",
            f"@{soon} bra {again}",
            f"mov.u64 {now}, %globaltimer",
            f"setp.eq.u64 {soon}, {self._since}, 0",
            f"@{soon} mov.b64 {self._since}, {now}",
            f"sub.u64 {waited}, {now}, {self._since}",
            f"setp.lt.u64 {late}, {waited}, {int(WAIT_SECONDS * 1e9)}",
            f"@{late} bra {again}",
            f"mov.b32 {largest}, {FAILED}",
            *(f"st.relaxed.sys.global.b32 [{peer}+{STATE}], {largest}" for peer in self.peers),
        )
        self.place(done)

"""How the vectors of an array are dealt out to the threads of a kernel; a vector is 16 bytes, what a thread moves at once."""

from collections.abc import Iterator
from dataclasses import dataclass

VECTOR_BYTES = 16
MAX_CTAS = 128
"""All CTAs of a call must be resident at once, because each waits for its partners: an H100 or H200 has 132 multiprocessors."""
MAX_THREADS = 512
MAX_VECTORS = 16
"""A thread keeps its vectors in registers: 4 each, out of 128 with 512 threads."""
SLOT_BYTES = 256 << 10
"""What all partners together can send to one CTA in one call."""


@dataclass(frozen=True)
class Plan:
    """Rows of `width` vectors; with `group` > 1, rows are dealt out in groups of so many.

    CTA b takes the groups b, b + ctas, b + 2 ctas ...; thread t of it takes the vectors t, t + threads ... of each row.
    """

    threads: int
    ctas: int
    width: int
    per_thread: int
    """Vectors of a row per thread."""
    groups: int
    """Groups of rows per CTA."""
    group: int
    total: int
    """Vectors of the whole array; the last row may be shorter, or rows missing in the last group."""

    def __post_init__(self) -> None:
        assert self.threads % 128 == 0 and self.per_thread * self.threads >= self.width
        assert self.ctas * self.groups * self.group * self.width >= self.total

    def pieces(self) -> Iterator[tuple[int, int]]:
        """(group, vector of a row) of each piece of work of a thread that is received at once."""
        yield from ((i, k) for i in range(self.groups) for k in range(self.per_thread))

    @property
    def num_pieces(self) -> int:
        return self.groups * self.per_thread

    @property
    def piece_bytes(self) -> int:
        """Of one piece of all threads."""
        return self.threads * VECTOR_BYTES

    def offset(self, i: int, k: int, member: int = 0) -> int:
        """Where a piece lies, in vectors from that of thread 0 in the first group of the CTA."""
        return (i * self.ctas * self.group + member) * self.width + k * self.threads


def plan_rows(num_rows: int, width: int, *, group: int = 1, phases: int = 1, num_devices: int = 8) -> Plan | None:
    """Whole rows to CTAs; None if they do not fit."""
    if num_rows < 1 or width < 1:
        return None
    per_thread = -(-width // MAX_THREADS)
    threads = 128 * -(-width // (128 * per_thread))
    groups = -(-num_rows // (group * MAX_CTAS))
    ctas = -(-num_rows // (group * groups))
    plan = Plan(threads, ctas, width, per_thread, groups, group, num_rows * width)
    return plan if _fits(plan, phases, num_devices) else None


def plan_vectors(total: int, *, group: int = 1, phases: int = 1, num_devices: int = 8) -> Plan | None:
    """Vectors without rows to CTAs: few threads first, so that many CTAs share the work; None if they do not fit."""
    if total < 1:
        return None
    for threads, per_thread in ((128, 1), (256, 1), (512, 1), (512, 2), (512, 4), (512, 8)):
        width = threads * per_thread
        ctas = -(-total // (width * group))
        if ctas <= MAX_CTAS:
            plan = Plan(threads, ctas, width, per_thread, 1, group, total)
            return plan if _fits(plan, phases, num_devices) else None
    return None


def _fits(plan: Plan, phases: int, num_devices: int) -> bool:
    received = phases * num_devices * plan.num_pieces * plan.piece_bytes
    return plan.num_pieces * plan.group <= MAX_VECTORS and received <= SLOT_BYTES

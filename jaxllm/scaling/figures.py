"""Speed-up and efficiency: what the times of several tensor-parallel sizes say beside each other.

Strong scaling: the same work on more devices. Speed-up is the time on the fewest devices over the time on n; ideal is the ratio of the
numbers of devices. Weak scaling: the same work for each device. A decode of b requests per device is b·n requests on n devices; its
speed-up is the ratio of tokens per second, ideal is again the ratio of devices. Efficiency is speed-up over ideal.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxllm.scaling.plan import STRONG, WEAK, Plan
from jaxllm.scaling.rows import DECODE, Row


@dataclass(frozen=True)
class Point:
    """A row beside the same work on the fewest devices that it was measured on."""

    scaling: str
    """One of SCALINGS."""
    row: Row
    base: Row
    num_requests: int
    """Of strong scaling the row's, of weak scaling those of each device."""

    @property
    def ideal(self) -> float:
        return self.row.tensor_parallel_size / self.base.tensor_parallel_size

    @property
    def speed_up(self) -> float:
        """By tokens per second, which for the same work is the ratio of times."""
        return self.row.tokens_per_second / self.base.tokens_per_second

    @property
    def efficiency(self) -> float:
        return self.speed_up / self.ideal


def points(plan: Plan, rows: Iterable[Row]) -> list[Point]:
    """Of strong scaling for each row, of weak scaling for each decode that belongs to it, if the plan asks for them."""
    rows = sorted(rows, key=lambda row: row.tensor_parallel_size)
    found = []
    if STRONG in plan.scalings:
        found += _strong(plan, rows)
    if WEAK in plan.scalings:
        found += _weak(plan, rows)
    return found


def _strong(plan: Plan, rows: list[Row]) -> list[Point]:
    bases: dict[tuple[str, int], Row] = {}
    found = []
    for row in rows:
        if row.work == DECODE and row.num_requests not in plan.batch_sizes:
            continue  # measured for weak scaling alone
        base = bases.setdefault((row.work, row.num_requests), row)
        found.append(Point(STRONG, row, base, row.num_requests))
    return found


def _weak(plan: Plan, rows: list[Row]) -> list[Point]:
    bases: dict[int, Row] = {}
    found = []
    for row in rows:
        for_each, rest = divmod(row.num_requests, row.tensor_parallel_size)
        if row.work != DECODE or rest or for_each not in plan.batch_sizes:
            continue
        base = bases.setdefault(for_each, row)
        found.append(Point(WEAK, row, base, for_each))
    return found

"""Speed-up and efficiency: the times of several tensor-parallel sizes compared.

Strong scaling: the same work on more devices. Weak scaling: the same work for each device; a decode of b requests per device is b·n
requests on n devices. Speed-up is the ratio of tokens per second to those on the fewest devices, ideal is the ratio of devices, and
efficiency is speed-up over ideal.
"""

from collections.abc import Iterable
from typing import NamedTuple

from jaxllm.scaling.plan import STRONG, WEAK, Plan
from jaxllm.scaling.rows import DECODE, Row


class Point(NamedTuple):
    """A row compared with the same work on the fewest devices that it was measured on."""

    scaling: str
    """One of SCALINGS."""
    row: Row
    base: Row
    num_requests: int
    """The row's for strong scaling, those of each device for weak scaling."""

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
    """Points of strong scaling for each row, and of weak scaling for each decode that belongs to it, if the plan asks for them."""
    bases: dict[tuple[str, str, int], Row] = {}
    found = []
    for row in sorted(rows, key=lambda row: row.tensor_parallel_size):
        per_device, rest = divmod(row.num_requests, row.tensor_parallel_size)
        is_decode = row.work == DECODE
        # Some decodes are measured for one kind of scaling alone.
        applies = {
            STRONG: not is_decode or row.num_requests in plan.batch_sizes,
            WEAK: is_decode and not rest and per_device in plan.batch_sizes,
        }
        for scaling, count in ((STRONG, row.num_requests), (WEAK, per_device)):
            if scaling in plan.scalings and applies[scaling]:
                found.append(Point(scaling, row, bases.setdefault((scaling, row.work, count), row), count))
    return found

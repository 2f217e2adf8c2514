"""Which work the experiment measures at which tensor-parallel size. A plan is plain values, sent to the processes as JSON."""

import dataclasses
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.scaling.rows import DECODE, MIXED, WORKS, from_json

STRONG, WEAK = SCALINGS = ("strong", "weak")
SAME_IN_ALL = ("model", "input_len", "output_len", "prefill_prompts", "requests", "options")
"""Settings that must be equal for results to share a report."""


@dataclass(frozen=True)
class Plan:
    """One experiment."""

    model: str
    tensor_parallel_sizes: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    input_len: int
    """Tokens of each prompt of decode and prefill."""
    output_len: int
    """A decode's stretch has one step less: the first token is the prompt's."""
    works: tuple[str, ...] = WORKS
    scalings: tuple[str, ...] = SCALINGS
    prefill_prompts: int = 64
    requests: tuple[tuple[int, int], ...] = ()
    """(prompt, output) tokens of each request of the mixed work."""
    repeats: int = 2
    """Runs that count of each piece of work; the fastest is the result."""
    trace_steps: int = 8
    """Steps that are traced for each breakdown; 0: no traces."""
    options: dict[str, Any] = field(default_factory=dict)
    """Explicitly set engine options."""

    def decode_batches(self, tensor_parallel_size: int) -> list[int]:
        """Batch sizes to measure at a size, for strong and for weak scaling, in ascending order."""
        if DECODE not in self.works:
            return []
        factors = [1] * (STRONG in self.scalings) + [tensor_parallel_size] * (WEAK in self.scalings)
        return sorted({batch * factor for batch in self.batch_sizes for factor in factors})

    def largest_batch(self) -> int:
        """The largest batch of decode over all sizes; 1 without decode."""
        return max((batch for size in self.tensor_parallel_sizes for batch in self.decode_batches(size)), default=1)

    def joined(self, other: "Plan") -> "Plan":
        """Merge two plans. Raises ConfigError if their results cannot share a report."""
        compared = [name for name in SAME_IN_ALL if name != "requests" or (MIXED in self.works and MIXED in other.works)]
        values = [(name, getattr(self, name), getattr(other, name)) for name in compared]
        if found := [f"{name} is {mine!s:.120} here and {its!s:.120} there" for name, mine, its in values if mine != its]:
            raise ConfigError(f"the earlier results are of another experiment: {'; '.join(found)}")
        return dataclasses.replace(
            self,
            tensor_parallel_sizes=tuple(sorted({*self.tensor_parallel_sizes, *other.tensor_parallel_sizes})),
            batch_sizes=tuple(sorted({*self.batch_sizes, *other.batch_sizes})),
            works=tuple(work for work in WORKS if work in self.works or work in other.works),
            scalings=tuple(name for name in SCALINGS if name in self.scalings or name in other.scalings),
            requests=self.requests if MIXED in self.works else other.requests,
        )

    @classmethod
    def from_json(cls, value: Any) -> "Plan":
        """A plan from JSON's values. Raises ConfigError."""
        plan = from_json(cls, value)
        if unknown := set(value) - {field.name for field in dataclasses.fields(cls)}:
            raise ConfigError(f"Plan has no {', '.join(sorted(unknown))}")
        options = {name: tuple(entry) if isinstance(entry, list) else entry for name, entry in plan.options.items()}
        return dataclasses.replace(plan, options=options)


def check_sizes(sizes: Sequence[int], num_devices: int, *, where: str) -> None:
    """Refuse sizes for which there are too few devices. Raises ConfigError that names them."""
    if too_large := [size for size in sizes if size > num_devices]:
        raise ConfigError(
            f"tensor-parallel size {', '.join(map(str, too_large))} needs more devices than the {num_devices} of {where}; "
            f"give --tensor-parallel-sizes {','.join(str(size) for size in sizes if size <= num_devices) or '1'}"
        )


def powers_of_two(limit: int) -> tuple[int, ...]:
    """1, 2, 4, … up to `limit`."""
    return tuple(2**i for i in range(int(math.log2(max(1, limit))) + 1))


def mixed_requests(count: int, input_len: int, output_len: int) -> tuple[tuple[int, int], ...]:
    """(prompt, output) lengths of a mix, the same each time: uniform from a quarter of each length to twice of it."""
    rng = random.Random(0)

    def length(middle: int) -> int:
        return rng.randint(max(1, middle // 4), max(1, middle * 2))

    return tuple((length(input_len), length(output_len)) for _ in range(count))

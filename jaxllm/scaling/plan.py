"""The plan of the experiment: the work that it measures at each tensor-parallel size."""

import random
from typing import Any

import msgspec

from jaxllm.errors import ConfigError

DECODE, PREFILL, MIXED = WORKS = ("decode", "prefill", "mixed")
STRONG, WEAK = SCALINGS = ("strong", "weak")


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One experiment, in values that JSON has."""

    model: str
    tensor_parallel_sizes: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    input_len: int
    """Tokens of each prompt of decode and prefill."""
    output_len: int
    """Tokens of each request of decode, which times one step less: the first token is the prompt's."""
    works: tuple[str, ...] = WORKS
    scalings: tuple[str, ...] = SCALINGS
    prefill_prompts: int = 64
    requests: tuple[tuple[int, int], ...] = ()
    """(prompt, output) tokens of each request of the mixed work."""
    repeats: int = 2
    """Runs that count of each piece of work; the fastest is the result."""
    trace_steps: int = 8
    """Steps that are traced for each breakdown; 0: no traces."""
    options: dict[str, Any] = {}
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
        """A plan of what both measure. Raises ConfigError if their results cannot share a report."""
        same = ["model", "input_len", "output_len", "prefill_prompts", "options"]
        if self.requests and other.requests:
            same.append("requests")
        values = [(name, getattr(self, name), getattr(other, name)) for name in same]
        if found := [f"{name} is {mine!s:.120} here and {its!s:.120} there" for name, mine, its in values if mine != its]:
            raise ConfigError(f"the earlier results are of another experiment: {'; '.join(found)}")
        together: dict[str, Any] = {
            name: tuple(sorted({*getattr(self, name), *getattr(other, name)}))
            for name in ("tensor_parallel_sizes", "batch_sizes", "works", "scalings")
        }
        return msgspec.structs.replace(self, requests=self.requests or other.requests, **together)


def mixed_requests(count: int, input_len: int, output_len: int) -> tuple[tuple[int, int], ...]:
    """(prompt, output) lengths of a mix, the same each time: uniform from a quarter of each length to twice of it."""
    rng = random.Random(0)
    middles = (input_len, output_len) * count
    lengths = [rng.randint(max(1, middle // 4), max(1, middle * 2)) for middle in middles]
    return tuple(zip(lengths[::2], lengths[1::2], strict=True))

"""How long layers need the keys and values of a token: which blocks a request holds, and which a cached prefix must have.

Counts and indices are those of one group of layers, in blocks of `block_size` tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


class CachePolicy(Protocol):
    """The rules of one kind of cache."""

    def num_blocks_for(self, num_tokens: int, block_size: int, max_step_tokens: int) -> int:
        """Most blocks that a request holds at a time while `num_tokens` tokens are computed, some of them in each step."""
        ...

    def num_expired(self, num_computed_tokens: int, block_size: int) -> int:
        """Number of leading blocks that no token from position `num_computed_tokens` on reads."""
        ...

    def longest_prefix(self, names: Sequence[bytes], is_cached: Callable[[bytes], bool], block_size: int) -> int:
        """Number of leading blocks after which computation can continue, or with their last token: the largest for which all
        blocks that are read are in the prefix cache. `names`: hashes of the blocks."""
        ...


@dataclass(frozen=True)
class FullPolicy:
    """Every token reads all before it."""

    def num_blocks_for(self, num_tokens: int, block_size: int, max_step_tokens: int) -> int:
        return -(-num_tokens // block_size)

    def num_expired(self, num_computed_tokens: int, block_size: int) -> int:
        return 0

    def longest_prefix(self, names: Sequence[bytes], is_cached: Callable[[bytes], bool], block_size: int) -> int:
        for index, name in enumerate(names):
            if not is_cached(name):
                return index
        return len(names)

    def __str__(self) -> str:
        return "full attention"


@dataclass(frozen=True)
class WindowPolicy:
    """A token reads the last `window` tokens, itself included.

    The blocks of all tokens of a step are there during the step, even if a step is longer than the window.
    """

    window: int

    def num_blocks_for(self, num_tokens: int, block_size: int, max_step_tokens: int) -> int:
        # A step and the window before it begin and end anywhere in a block.
        most = -(-(self.window - 1 + max_step_tokens) // block_size) + 1
        return min(-(-num_tokens // block_size), most)

    def num_expired(self, num_computed_tokens: int, block_size: int) -> int:
        return max(0, num_computed_tokens - self.window + 1) // block_size

    def longest_prefix(self, names: Sequence[bytes], is_cached: Callable[[bytes], bool], block_size: int) -> int:
        needed = -(-self.window // block_size)
        run = 0
        for index in reversed(range(len(names))):
            run = run + 1 if is_cached(names[index]) else 0
            if run == needed:
                return index + run
        return run

    def __str__(self) -> str:
        return f"window of {self.window} tokens"


FULL = FullPolicy()


def num_blocks_for(policies: Iterable[CachePolicy], num_tokens: int, block_size: int, max_step_tokens: int) -> int:
    """Most blocks that a request of `num_tokens` tokens holds at a time in groups of these policies."""
    return sum(policy.num_blocks_for(num_tokens, block_size, max_step_tokens) for policy in policies)

"""Names the states by row behind prefixes of prompts, which are kept in blocks of the pool (`jaxllm.cache_spec.RowState`)."""

from collections.abc import Callable, Sequence

from jaxllm.request import Request
from jaxllm.scheduler.block_hash import HASH_BYTES

_SUFFIX_BYTES = 3
_LEAST_SHARE = 1 / 8
"""See `PrefixStates.least_tokens`. In a Qwen3-Next-80B-A3B this makes 394 tokens: less than vLLM's blocks have in such models."""


class PrefixStates:
    """States sum up all tokens before them, so a request continues at a position whose states were kept, or begins anew."""

    def __init__(self, num_blocks: int, block_size: int):
        """num_blocks: that hold the states of a row; 0: layers have none, so that requests continue behind any block."""
        self.num_blocks, self._block_size = num_blocks, block_size
        self._suffixes = [b"s" + index.to_bytes(_SUFFIX_BYTES - 1, "little") for index in range(num_blocks)]
        """Suffixes to the hash of the last block before states, for the blocks that hold them."""
        self.least_tokens = max(block_size, int(_LEAST_SHARE * num_blocks * block_size))
        """Tokens that states must save beyond those before them, so as to be kept for other prompts: a share of those that their blocks
        would have room for."""

    def position(self, request: Request) -> int:
        """The last position of a prompt whose states are of use: behind whole blocks, and before its last token, which is computed for the
        first of the answer."""
        return (request.num_prompt_tokens - 1) // self._block_size * self._block_size

    def hashes(self, request: Request) -> list[bytes]:
        """The hashes of a request's blocks behind which it may continue."""
        if not self.num_blocks:
            return request.block_hashes
        return request.block_hashes[: self.position(request) // self._block_size]

    def longest(self, hashes: Sequence[bytes], is_there: Callable[[bytes], bool]) -> int:
        """Number of the first blocks among these behind which states are there; without states by row, of all."""
        if not self.num_blocks:
            return len(hashes)
        first = self._suffixes[0]
        return next(
            (
                index + 1
                for index in reversed(range(len(hashes)))
                if is_there(hashes[index] + first) and all(map(is_there, self.names(hashes[index : index + 1])))
            ),
            0,
        )

    def names(self, hashes: Sequence[bytes]) -> list[bytes]:
        """The names of the blocks with the states behind a prefix of these hashes; none if there are no states."""
        return [hashes[-1] + suffix for suffix in self._suffixes] if hashes else []

    def names_at(self, request: Request, position: int) -> list[bytes]:
        """The names of the blocks with the states of a request before its token at `position`, which begins a block."""
        return self.names(request.block_hashes[position // self._block_size - 1 : position // self._block_size])

    def names_of(self, request: Request) -> list[bytes]:
        """The names of the blocks with the last states of a request's prompt."""
        return self.names(self.hashes(request))


def is_of_states(name: bytes) -> bool:
    """Whether a name is of a block with states."""
    return len(name) == HASH_BYTES + _SUFFIX_BYTES

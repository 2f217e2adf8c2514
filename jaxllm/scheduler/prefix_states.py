"""Names the states by row behind prefixes of prompts, which engines pass to each other in blocks (`jaxllm.cache_spec.RowState`)."""

from collections.abc import Sequence

from jaxllm.request import Request
from jaxllm.scheduler.block_hash import HASH_BYTES

_SUFFIX_BYTES = 3


class PrefixStates:
    """The states of a prompt are passed on at one position. They sum up all tokens before it, so a request continues there, or begins anew,
    and no token is computed twice."""

    def __init__(self, num_blocks: int, block_size: int):
        """num_blocks: that hold the states of a row; 0: layers have none, so that requests continue behind any block."""
        self.num_blocks, self._block_size = num_blocks, block_size
        self._suffixes = [b"s" + index.to_bytes(_SUFFIX_BYTES - 1, "little") for index in range(num_blocks)]
        """Suffixes to the hash of the last block before states, for the blocks that hold them."""

    def position(self, request: Request) -> int:
        """The tokens before the states of a prompt: whole blocks, and not its last token, which is computed for the first of the answer."""
        return (request.num_prompt_tokens - 1) // self._block_size * self._block_size

    def hashes(self, request: Request) -> list[bytes]:
        """The hashes of a request's blocks behind which it may continue."""
        if not self.num_blocks:
            return request.block_hashes
        return request.block_hashes[: self.position(request) // self._block_size]

    def names(self, hashes: Sequence[bytes]) -> list[bytes]:
        """The names of the blocks with the states behind a prefix of these hashes; none if there are no states."""
        return [hashes[-1] + suffix for suffix in self._suffixes] if hashes else []

    def names_of(self, request: Request) -> list[bytes]:
        """The names of the blocks with the states behind a request's prompt."""
        return self.names(self.hashes(request))


def is_of_states(name: bytes) -> bool:
    """Whether a name is of a block with states."""
    return len(name) == HASH_BYTES + _SUFFIX_BYTES

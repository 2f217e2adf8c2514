"""A router that reconstructs a prefix cache from its events alone."""

from collections.abc import Sequence
from typing import Any

import msgspec

from jaxllm.kv_events.messages import Batch, BatchEncoder, Group
from jaxllm.scheduler.block_hash import NO_PARENT, hash_block

FULL_ONLY = (Group("full_attention"),)


class Subscriber:
    """Knows which blocks are on which medium, and their tokens."""

    def __init__(self, *, block_size: int, groups: Sequence[Group] = FULL_ONLY):
        self.block_size = block_size
        self._encoder = BatchEncoder(groups, block_size=block_size, rank=0, int_hashes=False)
        self.blocks: dict[tuple[str, bytes], tuple[Any, list[int]]] = {}
        """Parent and tokens by medium and name."""

    def on(self, medium: str) -> set[bytes]:
        """The names of blocks there."""
        return {name for place, name in self.blocks if place == medium}

    def read(self, batch: Batch) -> None:
        """Read a batch that no socket carried."""
        self.read_payload(self._encoder.encode(batch))

    def read_payload(self, payload: bytes) -> None:
        """Read a message. Raises AssertionError if it contradicts what came before."""
        _, events, _ = msgspec.msgpack.decode(payload)
        for event in events:
            getattr(self, event.pop("type"))(**event)

    def AllBlocksCleared(self) -> None:  # noqa: N802
        self.blocks.clear()

    def BlockStored(  # noqa: N802
        self,
        *,
        block_hashes: list[bytes],
        token_ids: list[int],
        group_idx: int,
        medium: str,
        parent_block_hash: Any,
        **others: Any,
    ) -> None:
        suffix, size, parent = group_idx.to_bytes(2, "little") if group_idx else b"", self.block_size, parent_block_hash
        assert others["block_size"] == size and len(token_ids) == size * len(block_hashes) == size * len(others["extra_keys"])
        for index, name in enumerate(block_hashes):
            tokens = token_ids[index * size : (index + 1) * size]
            assert (medium, name + suffix) not in self.blocks, "a block is stored twice"
            if not any(others["extra_keys"]) and not self.may_have_salts:
                assert name == hash_block(parent or NO_PARENT, tokens), "a block has other tokens, or another parent"
            self.blocks[medium, name + suffix] = parent, tokens
            parent = name

    may_have_salts = False
    """Whether hashes cover salts, which events do not have."""

    def BlockRemoved(self, *, block_hashes: list[bytes], group_idx: int, medium: str) -> None:  # noqa: N802
        suffix = group_idx.to_bytes(2, "little") if group_idx else b""
        for name in block_hashes:
            del self.blocks[medium, name + suffix]

"""The host's record of one block of the KV cache: its reference count, its content hash and its place in the free queue."""


class KVCacheBlock:
    """A fixed run of KV-cache slots. Only `BlockPool` and `FreeBlockQueue` change it."""

    __slots__ = ("block_id", "ref_count", "block_hash", "num_hits", "previous_free", "next_free")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_count = 0
        """Number of requests whose table holds the block."""
        self.block_hash: bytes | None = None
        """Hash of the content, set while the block is full and in the prefix cache."""
        self.num_hits = 0
        """How often the content was found."""
        self.previous_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    def __repr__(self) -> str:
        hashed = self.block_hash.hex()[:8] if self.block_hash else None
        return f"KVCacheBlock({self.block_id}, ref_count={self.ref_count}, block_hash={hashed})"

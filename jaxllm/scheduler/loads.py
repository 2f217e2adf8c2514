"""Records of loads: requests that wait for blocks which tiers bring."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxllm.request import Request
from jaxllm.scheduler.block import KVCacheBlock
from jaxllm.scheduler.cache_tier import CacheTier


@dataclass(eq=False)
class Copy:
    """Blocks of a load that one tier brings."""

    tier: CacheTier
    load_id: int
    blocks: list[KVCacheBlock]
    names: list[bytes]
    sources: Sequence[str]
    """See CacheTier."""
    deadline: float


@dataclass(eq=False)
class Load:
    """A request that waits for blocks of its prefix."""

    request: Request
    names: list[bytes]
    """Contents of the prefix, in the order of the sequence."""
    left: list[bytes]
    """Contents for which it has no block yet."""
    deadline: float
    """When it ends, if it could get blocks and got none."""
    held: dict[bytes, KVCacheBlock] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)
    """Copies under way."""
    is_awaiting: bool = False
    """Whether the next content is still computed by another engine, so that it needs no blocks."""

    @property
    def blocks(self) -> list[KVCacheBlock]:
        """All that it holds, in the order of the sequence."""
        return [self.held[name] for name in self.names if name in self.held]

    def stop(self) -> None:
        """Take no further blocks: what lies behind those it holds is computed."""
        self.left = []

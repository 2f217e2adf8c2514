"""An adapter that was added to an engine, with the requests that name it. Does not import JAX."""

from dataclasses import dataclass, field
from pathlib import Path

from jaxllm.request import Request
from jaxllm.scheduler.waiting_queue import PriorityQueue
from jaxllm.scheduler_output import NO_ADAPTER

Order = tuple[int, float, str]
"""See `Request.sort_key`."""
_FIRST: Order = (-(2**63) - 1, 0.0, "")


@dataclass(eq=False)
class Adapter:
    """One registration: an adapter that is added again under its name is another one. A RequestAdapter."""

    number: int
    name: str
    path: str
    cache_key: str = field(init=False)
    rank: int = 0
    directory: Path | None = None
    """Where its files are, once they were read."""
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Size and time of change of its files when it was added."""
    slot: int = NO_ADAPTER
    waiting: PriorityQueue = field(default_factory=PriorityQueue)
    """Its requests that are not admitted."""
    running: set[Request] = field(default_factory=set)
    """Its requests that are admitted."""
    is_pinned: bool = False
    passes_pin: bool = False
    """Whether the adapter that replaced it is pinned when its own last request has ended."""
    is_retired: bool = False
    """Whether it was removed or replaced: its last requests end with it."""

    def __post_init__(self) -> None:
        self.cache_key = f"{self.number}:{self.name}"

    @property
    def has_requests(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    @property
    def is_wanted(self) -> bool:
        """Whether it should have a slot."""
        return self.is_pinned or len(self.waiting) > 0

    @property
    def order(self) -> Order:
        """Order of its first waiting request: lower is sooner."""
        return self.waiting.peek().sort_key() if len(self.waiting) else _FIRST

"""Storage for contents of blocks outside the block pool, e.g. in the host's memory, on disk or at a peer."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxllm.device_ops import AnyDeviceOp
from jaxllm.request import Request
from jaxllm.scheduler.block import KVCacheBlock
from jaxllm.scheduler.cache_observer import TierListener
from jaxllm.scheduler_stats import SchedulerStats


class TierStep(NamedTuple):
    """Operations that a tier adds to a step, and its finished loads."""

    ops: Sequence[AnyDeviceOp] = ()
    """They read or write blocks before the step."""
    loaded: Sequence[tuple[int, Sequence[bool]]] = ()
    """Loads that are over, with whether each block has its content: earlier plans had the ops."""


NOTHING = TierStep()


class CacheTier(Protocol):
    """A store of block contents by name (`block_hash`). The step loop's thread calls all methods, and none may wait, but for `wait`,
    `wait_for_stores` and, for a copy that is being made, `cancel`.

    A tier touches blocks through ops alone. Devices run plans in order, so a block that is read may have another owner at once; a load
    has its blocks until it is over or `cancel` returns.
    """

    patience_seconds: float
    """A load that takes longer counts as failed. Time in which no steps are planned does not count."""
    num_cold: int
    """So many free blocks, those that are evicted next, are offered to `store_ahead`, and those that loads need."""
    load_blocks: int
    """So many blocks keep it busy: a request with more gets them a part at a time."""
    copy_blocks: int
    """Most blocks of a load: as soon as one is over, the next begins."""
    listener: TierListener | None
    """If set, called with contents that can be loaded from now on, and with those that no longer can."""
    changed: set[bytes] | None
    """If set, receives the contents for which `is_in_host` changes."""

    def match(self, names: Sequence[bytes]) -> Collection[bytes]:
        """The contents among these that it can load now."""

    def is_in_host(self, name: bytes) -> bool:
        """Whether a content can be loaded from host memory, whatever else has it."""

    def host_names(self) -> Iterable[bytes]:
        """All contents that can."""

    def awaited(self, names: Sequence[bytes]) -> Collection[bytes]:
        """The contents among these that it cannot load yet and may later, because another engine computes them: loads wait for them."""

    def choose(self, names: Sequence[bytes], num_tokens: int) -> Collection[bytes]:
        """Choose which of these contents to load instead of computing so many tokens: all, if that takes less time than to compute them;
        else those that come faster, about which it is asked again, or none."""

    def sources(self, names: Sequence[bytes]) -> Sequence[str]:
        """Where each of these contents is kept that `match` found: "host", "disk", "peer". Loaded tokens are counted by it."""

    def load(self, block_ids: Sequence[int], names: Sequence[bytes]) -> int:
        """Begin to load contents into blocks with no other user until `begin_step` reports the load. Returns its number."""

    def cancel(self, load_id: int) -> None:
        """Give a load up: from now on nothing writes its blocks, and no report comes."""

    def store(self, block_ids: Sequence[int], names: Sequence[bytes], used: Collection[bytes] = ()) -> list[AnyDeviceOp]:
        """These contents leave the pool in the step being planned. Returns what reads their blocks before that step writes them; nothing
        for contents that it has, or does not want. What it reads is right once that step is done without error. used: those that were found
        in the pool, and are likely to be asked for again."""

    def store_ahead(self, block_ids: Sequence[int], names: Sequence[bytes], used: Collection[bytes] = ()) -> list[AnyDeviceOp]:
        """As `store`, for contents that may stay for a while. Those that are not stored now are offered again."""

    def wants(self, names: Sequence[bytes]) -> Collection[bytes]:
        """The contents among these that it would store and has not, nor is it storing them: loads wait until it can."""

    @property
    def can_store(self) -> bool:
        """Whether another store can begin now. If not, one can once a copy is over."""

    def discard(self, names: Sequence[bytes]) -> None:
        """These contents were computed wrongly."""

    def begin_step(self, step_id: int, done_step_id: int) -> TierStep:
        """A step is about to be planned, and the results of all up to `done_step_id` are known. The ops run even if it has no tokens."""

    @property
    def is_storing(self) -> bool:
        """Whether contents that engines with the same store may ask for are on the way there, so that plans are needed even if there are no
        requests. Only where contents are stored as soon as they are computed."""

    def end_step(self) -> Sequence[AnyDeviceOp]:
        """The step is planned. Returns operations of the loads that began with it, which come behind all others of the step: what their
        blocks had is read first."""

    def wait_for_stores(self, num_tokens: int) -> None:
        """A step of so many tokens is computed. If earlier stores leave too little room for what the next one may evict: return when they
        are over, or after a part of the step's time."""

    def wait(self, seconds: float) -> None:
        """Return when the state of a load changed, or after this time. Called while nothing else can be done."""

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long, some of them of prompts."""

    def add_stats(self, stats: SchedulerStats) -> None:
        """Add its numbers."""

    def check_integrity(self) -> None:
        """Raise AssertionError if its state is inconsistent."""

    def forget(self, *, stored: bool, external: bool = False) -> None:
        """Drop all loads, and the stores of steps that are not done. stored: drop all contents too, because they are of other weights;
        external: also those that other engines share."""

    def close(self) -> None:
        """End its threads. Slots of host memory are given back afterwards."""


@runtime_checkable
class KeepingTier(CacheTier, Protocol):
    """A tier that keeps contents for other engines, which compute the answers to prompts of this one."""

    def keep(self, names: Iterable[bytes], find: Callable[[bytes], KVCacheBlock | None]) -> None:
        """Store these contents soon: their blocks are full once the step that is being planned has run. `find` finds a block of a content
        from the next step on, as long as there is one."""

    def announce(self, request: Request, names: Sequence[bytes], num_blocks: int, num_tokens: int) -> dict[str, Any] | None:
        """As `hand_over`, for a request that has yet to compute most of these contents: each can be fetched once it is stored. `hand_over`
        then returns the same, and `withdraw` is called in its place if the request ends otherwise."""

    def withdraw(self, request: Request) -> None:
        """A request has ended that did not compute all that was announced, if anything was: the rest will not come."""

    def hand_over(self, request: Request, names: Sequence[bytes], num_blocks: int, num_tokens: int) -> dict[str, Any] | None:
        """A request has ended, whose prompt has these contents: keep them until another engine has fetched them. Returns what that engine
        is to be sent (`EngineCoreOutput.kv_transfer_params`); None if there are none, or too many are kept. num_blocks: of each group, with
        so many tokens."""

    @property
    def is_keeping(self) -> bool:
        """Whether contents are still to be stored for another engine, so that plans are needed even if there are no requests."""

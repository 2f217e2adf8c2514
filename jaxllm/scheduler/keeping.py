"""Has tiers keep blocks of prompts for engines that compute the answers."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import Request, RequestStatus
from jaxllm.scheduler.cache_tier import CacheTier, KeepingTier

if TYPE_CHECKING:
    from jaxllm.scheduler.kv_cache_manager import KVCacheManager


class Keeping:
    """The tiers that keep blocks for other engines, if there are any."""

    def __init__(self, manager: "KVCacheManager", tiers: Sequence[CacheTier]):
        """tiers: all of the scheduler."""
        self._manager = manager
        self._tiers = [tier for tier in tiers if isinstance(tier, KeepingTier)]

    def keep(self, names: Sequence[bytes]) -> None:
        """See KeepingTier."""
        for tier in self._tiers:
            tier.keep(names, self._manager.pool.find)

    def announce(self, requests: Iterable[Request]) -> list[EngineCoreOutput]:
        """Have tiers keep the blocks of prompts with `tells_early` of which a part is computed. Returns the outputs that
        tell where. States by row come with the last block, so there is nothing to fetch before."""
        if not self._tiers or self._manager.states.num_blocks:
            return []
        due = [request for request in requests if _is_due(request)]
        answers = [(request, self._announce(request)) for request in due]
        return [
            EngineCoreOutput(request.request_id, [], kv_transfer_params=answer)
            for request, answer in answers
            if answer is not None
        ]

    def _announce(self, request: Request) -> dict[str, Any] | None:
        """The parameters for the engine that continues a prompt; None: no tier keeps it."""
        manager = self._manager
        request.is_announced = True
        num_blocks = manager.num_blocks_of_prompt(request)
        given = request, manager.names_of_prompt(request), num_blocks, num_blocks * manager.block_size
        return next((answer for tier in self._tiers if (answer := tier.announce(*given)) is not None), None)

    def withdraw(self, request: Request) -> None:
        """See KeepingTier."""
        for tier in self._tiers:
            tier.withdraw(request)

    def hand_over(self, request: Request) -> dict[str, Any] | None:
        """Keep the blocks of a prompt whose request has ended, in the first tier that does. See KeepingTier."""
        manager = self._manager
        num_blocks = manager.num_blocks_of_prompt(request)
        names = manager.names_of_prompt(request)
        answers = (
            tier.hand_over(request, names, num_blocks, num_blocks * manager.block_size)
            for tier in self._tiers
            if self._has_states(request, tier)
        )
        return next((answer for answer in answers if answer is not None), None)

    def _has_states(self, request: Request, tier: CacheTier) -> bool:
        """Whether the pool or a tier has the states behind a prompt, as far as layers have some: blocks alone are of no use."""
        absent = [name for name in self._manager.states.names_of(request) if not self._manager.pool.is_cached(name)]
        return not (absent and tier.wants(absent))

    @property
    def is_keeping(self) -> bool:
        """Whether contents are still to be stored for other engines."""
        return any(tier.is_keeping for tier in self._tiers)


def _is_due(request: Request) -> bool:
    """Whether a part of a prompt is computed that tiers are to tell of early, and have not."""
    transfer = request.options.kv_transfer
    tells_early = transfer is not None and transfer.tells_early
    return tells_early and not request.is_announced and request.status is RequestStatus.RUNNING

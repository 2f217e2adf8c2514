"""Tiers of the prefix cache: where contents of blocks stay when the devices have no room for them. Does not import JAX."""

from typing import TYPE_CHECKING, Any

from jaxllm.config import EngineConfig
from jaxllm.device_ops import GatherBlocks
from jaxllm.kv_tiers.host_tier import STEPS_AHEAD, HostTier
from jaxllm.kv_tiers.rates import Rates
from jaxllm.log import logger

if TYPE_CHECKING:
    from jaxllm.scheduler.cache_tier import CacheTier

MIN_LOAD_TOKENS = 64
"""Fewer are computed."""


class KVTiers:
    """The tiers that an engine's options ask for."""

    def __init__(self, config: EngineConfig):
        self._config = config

    def new_tiers(self, executor: Any, num_blocks: int) -> "tuple[CacheTier, ...]":
        """Make the tiers of a scheduler whose pool has so many blocks. executor: a `ModelRunner`."""
        copies, block_size = executor.op_runner(GatherBlocks), self._config.block_tokens
        num_cold = min(STEPS_AHEAD * self._config.scheduler.max_step_tokens // block_size, num_blocks // 2)
        num_tokens = copies.num_slots * block_size // len(executor.shapes.cache.groups)
        fits = "host memory: %d blocks of %.1f KiB fit, %d tokens"
        logger.info(fits, copies.num_slots, copies.block_bytes / 1024, num_tokens)
        return (HostTier(copies, Rates(copies.block_bytes), num_cold=num_cold, min_tokens=MIN_LOAD_TOKENS),)

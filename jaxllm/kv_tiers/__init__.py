"""Tiers of the prefix cache: where contents of blocks stay when the devices have no room for them. Does not import JAX."""

from typing import TYPE_CHECKING, Any

from jaxllm.config import EngineConfig
from jaxllm.device_ops import GatherBlocks
from jaxllm.hub import resolve_model
from jaxllm.kv_connectors import KVTransferConfig
from jaxllm.kv_tiers.contents import PROTECTED_SHARES
from jaxllm.kv_tiers.host_tier import HostTier
from jaxllm.kv_tiers.rates import Rates
from jaxllm.log import logger
from jaxllm.model_config import ModelConfig

if TYPE_CHECKING:
    from jaxllm.kv_tiers.slot_store import SlotStore
    from jaxllm.scheduler.cache_tier import CacheTier

MIN_LOAD_TOKENS = 64
"""Fewer are computed."""
_STEPS_AHEAD = 2
"""Contents are stored when so many of the largest steps may evict them."""


def check_own_store(transfer: KVTransferConfig) -> None:
    """Import the class that a kv_transfer_config names. Raises ConfigError if it is no store."""
    from jaxllm.kv_tiers.own import load_class

    load_class(transfer)


class KVTiers:
    """The tiers that an engine's options ask for."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig):
        self._config, self._model_config = config, model_config
        self._transfer = KVTransferConfig.of(config.cache.kv_transfer_config)

    def new_tiers(self, executor: Any, num_blocks: int) -> "tuple[CacheTier, ...]":
        """Make the tiers of a scheduler whose pool has so many blocks. executor: a `ModelRunner`."""
        copies, block_size = executor.op_runner(GatherBlocks), self._config.block_tokens
        num_cold = min(_STEPS_AHEAD * self._config.scheduler.max_step_tokens // block_size, num_blocks // 2)
        logger.info("host memory: %d blocks of %.1f KiB", copies.num_slots, copies.block_bytes / 1024)
        rates = Rates(block_size, copies.block_bytes)
        return (
            HostTier(
                copies,
                rates,
                num_cold=num_cold,
                min_blocks=-(-MIN_LOAD_TOKENS // block_size),
                protected_share=PROTECTED_SHARES[self._transfer.host_tier().eviction_policy],
                stores=self._new_stores(executor, copies),
            ),
        )

    def _new_stores(self, executor: Any, copies: Any) -> "list[SlotStore]":
        """Make what stands behind host memory. copies: the executor's `BlockCopier`."""
        stores: list[SlotStore] = []
        if self._transfer.is_own:
            from jaxllm.kv_tiers.own import load_class
            from jaxllm.kv_tiers.own.own_store import OwnStore

            fingerprint = self._fingerprint(executor, copies)
            stores.append(OwnStore(load_class(self._transfer), self._transfer, copies.arena, fingerprint, copies.wake))
        return stores

    def _fingerprint(self, executor: Any, copies: Any) -> bytes:
        from jaxllm.kv_tiers.fingerprint import describe, digest

        model = self._config.model
        model_dir = resolve_model(model.model, model.revision, model.download_dir)
        return digest(describe(self._config, self._model_config, executor.shapes.cache, copies.format.arrangement, model_dir))

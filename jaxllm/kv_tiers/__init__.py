"""Tiers of the prefix cache: where contents of blocks stay when the devices have no room for them. Does not import JAX."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.config import EngineConfig
from jaxllm.device_ops import GatherBlocks
from jaxllm.kv_tiers import fingerprint
from jaxllm.kv_tiers.contents import PROTECTED_SHARES
from jaxllm.kv_tiers.host_tier import STEPS_AHEAD, HostTier
from jaxllm.kv_tiers.rates import Rates
from jaxllm.kv_tiers.slot_store import SlotStore
from jaxllm.kv_transfer import KVTransfer
from jaxllm.log import logger
from jaxllm.options.kv_transfer import KVTransferOptions
from jaxllm.vllm_compat.kv_connectors import KVTransferConfig

if TYPE_CHECKING:
    from jaxllm.kv_tiers.peers.remote_prefills import RemotePrefills
    from jaxllm.kv_tiers.peers.role import Role
    from jaxllm.scheduler.cache_tier import CacheTier

MIN_LOAD_TOKENS = 64
"""Fewer are computed."""


def check_own_store(transfer: KVTransferConfig) -> None:
    """Import the class that a kv_transfer_config names. Raises ConfigError if it is no store."""
    from jaxllm.kv_tiers.own import load_class

    load_class(transfer)


def check_address(options: KVTransferOptions) -> None:
    """Raise ConfigError if a prefill engine cannot listen at its address."""
    from jaxllm.kv_tiers.peers.server import listener_at

    listener_at(options.kv_host, options.kv_port).close()


class KVTiers:
    """The tiers that an engine's options ask for."""

    def __init__(self, config: EngineConfig):
        """Raises ConfigError for a directory that cannot be used, before weights are loaded."""
        self._config = config
        self._transfer = KVTransferConfig.of(config.cache.kv_transfer_config)
        self.preparations: Sequence[RemotePrefills] = ()
        """Preparations that requests may wait for before their blocks are loaded, once there are tiers."""
        self._role: Role | None = None
        self._disk_root: Path | None = None
        if config.cache.kv_offloading_disk is not None:
            from jaxllm.kv_tiers.disk import open_root

            self._disk_root = open_root(Path(config.cache.kv_offloading_disk))

    def end_lease(self, transfer: KVTransfer) -> None:
        """See `jaxllm.engine.features.KVTiers`."""
        if self._role is not None:
            self._role.end_lease(transfer)

    @property
    def prefill_address(self) -> KVTransfer | None:
        """See `jaxllm.engine.features.KVTiers`, as for the next one."""
        return None if self._role is None else self._role.prefill_address

    def meet(self, transfer: KVTransfer) -> None:
        if self._role is not None:
            self._role.meet(transfer)

    def new_tiers(self, executor: Any, num_blocks: int, model_dir: Path) -> "tuple[CacheTier, ...]":
        """Make the tiers of a scheduler whose pool has so many blocks. executor: a `ModelRunner`. model_dir: where the weights are. Raises
        ConfigError."""
        copies, block_size = executor.op_runner(GatherBlocks), self._config.block_tokens
        num_cold = min(STEPS_AHEAD * self._config.scheduler.max_step_tokens // block_size, num_blocks // 2)
        num_tokens = copies.num_slots * block_size // len(executor.shapes.cache.groups)
        fits = "host memory: %d blocks of %.1f KiB fit, %d tokens"
        logger.info(fits, copies.num_slots, copies.block_bytes / 1024, num_tokens)
        shapes, arrangement = executor.shapes, copies.format.arrangement
        describe = partial(fingerprint.describe, self._config, shapes.model, shapes.cache, arrangement, model_dir)
        new_tier: Callable[..., HostTier] = HostTier
        of_role: Sequence[SlotStore] = ()
        if self._config.kv_transfer.kv_role is not None:
            from jaxllm.kv_tiers.peers.role import Role

            self._role = role = Role(self._config, copies, describe)
            new_tier, self.preparations, of_role = role.new_tier, role.preparations, role.stores
        policy = self._transfer.host_tier().eviction_policy
        options = {"num_cold": num_cold, "min_tokens": MIN_LOAD_TOKENS, "protected_share": PROTECTED_SHARES[policy]}
        options["writes_at_once"] = self._config.cache.kv_offloading_write == "full"
        with ExitStack() as failing:  # their threads end if what follows cannot be made
            stores: list[SlotStore] = []
            for store in chain(of_role, self._stores(copies, describe)):
                stores.append(store)
                failing.callback(store.close)
            tier = new_tier(copies, Rates(copies.block_bytes), stores=stores, **options)
            failing.pop_all()
        return (tier,)

    def _stores(self, copies: Any, describe: Callable[[], dict[str, Any]]) -> Iterator[SlotStore]:
        """Make the stores behind host memory, the nearest first. copies: the executor's `BlockCopier`. describe: see `fingerprint`."""
        if self._disk_root is not None:
            from jaxllm.kv_tiers.disk import make

            yield make(self._config, self._disk_root, copies, describe)
        if self._transfer.is_own:
            from jaxllm.kv_tiers.own import make as make_own

            yield make_own(self._transfer, copies, describe)

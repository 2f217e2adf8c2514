"""The parts that an engine with a role has in addition to a host tier."""

import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from msgspec.structs import replace

from jaxllm.config import EngineConfig
from jaxllm.kv_tiers.copies import Worth
from jaxllm.kv_tiers.host_tier import HostTier
from jaxllm.kv_tiers.peers.identity import Identity, facts_of, signature
from jaxllm.kv_tiers.peers.leases import SHARE, Leases
from jaxllm.kv_tiers.peers.peer_store import PeerStore
from jaxllm.kv_tiers.peers.prefill_tier import PrefillTier, answered
from jaxllm.kv_tiers.peers.remote_prefills import RemotePrefills
from jaxllm.kv_tiers.peers.server import Server
from jaxllm.kv_tiers.slot_store import SlotStore
from jaxllm.kv_transfer import KVTransfer
from jaxllm.log import logger
from jaxllm.options.kv_transfer import token


class Role:
    """The parts of one engine. copies: a `BlockCopier`, whose arena is open. describe: see `fingerprint`; raises its errors."""

    def __init__(self, config: EngineConfig, copies: Any, describe: Callable[[], Mapping[str, Any]]):
        self._config = config
        self._own = Identity(uuid.uuid4().hex, lambda: facts_of(describe()), copies.arena.block_bytes, token())
        logger.debug("blocks depend on %s", self._own.facts)  # now, as files may be missing
        self._leases: Leases | None = None
        self.prefill_address: KVTransfer | None = None
        """See `jaxllm.engine.features.KVTiers`."""
        self.stores: tuple[SlotStore, ...] = ()
        self.preparations: tuple[RemotePrefills, ...] = ()
        options = config.kv_transfer
        if options.is_decode:
            # An engine that also keeps contents for others needs them in its own memory.
            regions = None if options.is_prefill else copies
            timeout = options.kv_pull_timeout
            store = PeerStore(self._own, copies.arena, copies.wake, options.kv_peers, timeout, regions)
            prefills = RemotePrefills(store, self._own.token, options.kv_pull_timeout, options.kv_load_failure_policy)
            self.stores, self.preparations = (store,), (prefills,)

    def end_lease(self, transfer: KVTransfer) -> None:
        """Blocks that this engine or another keeps for a request will not be fetched."""
        if self._leases is not None and transfer.remote_engine_id == self._own.engine_id:
            self._leases.end(str(transfer.lease_id))
        else:
            for prefills in self.preparations:
                prefills.end_lease(transfer)

    def meet(self, transfer: KVTransfer) -> None:
        """See `jaxllm.engine.features.KVTiers`."""
        for prefills in self.preparations:
            prefills.meet(transfer)

    def new_tier(self, copies: Any, worth: Worth, **options: Any) -> HostTier:
        """See HostTier. A prefill engine listens from now on. Raises ConfigError if it cannot."""
        transfer = self._config.kv_transfer
        if not transfer.is_prefill:
            tier = HostTier(copies, worth, **options)
        else:
            tier = self._serving_tier(copies, worth, **options)
        if transfer.is_decode:  # the last block may come as late as the option allows
            tier.patience_seconds = max(tier.patience_seconds, transfer.kv_pull_timeout)
        return tier

    def _serving_tier(self, copies: Any, worth: Worth, **options: Any) -> PrefillTier:
        transfer = self._config.kv_transfer
        self._leases = leases = Leases(int(SHARE * copies.num_slots))
        server = Server(self._own, leases, copies.arena)
        server.open(transfer.kv_host, transfer.kv_port)
        address = KVTransfer(remote_engine_id=self._own.engine_id, host=transfer.kv_host, port=server.port)
        self.prefill_address = replace(address, signature=signature(self._own.token, address) if self._own.token else None)
        size = self._config.parallel.tensor_parallel_size
        answer = partial(answered, own=self._own, host=transfer.kv_host, port=server.port, tensor_parallel=size)
        return PrefillTier(copies, worth, leases, server, answer, **options)

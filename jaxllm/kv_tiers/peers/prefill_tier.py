"""The host tier of a prefill engine, which also keeps contents for decode engines."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxllm.device_ops import AnyDeviceOp
from jaxllm.kv_tiers.contents import Content
from jaxllm.kv_tiers.copies import Copies, Worth
from jaxllm.kv_tiers.host_tier import HostTier
from jaxllm.kv_tiers.peers.identity import Identity, signature
from jaxllm.kv_tiers.peers.leases import LEASE_SECONDS, Lease, Leases
from jaxllm.kv_tiers.peers.server import Server
from jaxllm.kv_transfer import KVTransfer
from jaxllm.request import Request
from jaxllm.scheduler.block import KVCacheBlock
from jaxllm.scheduler.cache_tier import TierStep
from jaxllm.scheduler_stats import SchedulerStats

Answer = Callable[[Request, Lease, int, int], dict[str, Any]]


class PrefillTier(HostTier):
    """See KeepingTier. A lease holds its contents in their slots as soon as they are ready, until it ends."""

    def __init__(self, copies: Copies, worth: Worth, leases: Leases, server: Server, answer: Answer, **options: Any):
        """server: gives decode engines what is kept; the tier closes it. answer: makes what these engines are to be sent, see `answered`.
        options: those of HostTier."""
        super().__init__(copies, worth, **options)
        self._leases, self._server, self._answer = leases, server, answer
        self._wanted: dict[bytes, None] = {}
        """Contents to store in the next plans."""
        self._find: Callable[[bytes], KVCacheBlock | None] = lambda name: None
        self._held: dict[Lease, list[Content]] = {}
        self._pending: list[Lease] = []
        """Leases with contents that are not ready."""
        self._announced: dict[str, tuple[Lease, dict[str, Any]]] = {}
        """Leases of requests that are not over, and what decode engines were sent, by request."""

    # See KeepingTier

    def keep(self, names: Iterable[bytes], find: Callable[[bytes], KVCacheBlock | None]) -> None:
        self._find = find
        self._wanted.update(dict.fromkeys(names))

    def announce(self, request: Request, names: Sequence[bytes], num_blocks: int, num_tokens: int) -> dict[str, Any] | None:
        if not names or (lease := self._open(names, is_computing=True)) is None:
            return None
        self._hold_ready(lease)
        answer = self._answer(request, lease, num_blocks, num_tokens)
        self._announced[request.request_id] = lease, answer
        return answer

    def withdraw(self, request: Request) -> None:
        lease, _ = self._announced.pop(request.request_id, (None, None))
        if lease is not None:
            self._leases.end_computing(lease)

    def hand_over(self, request: Request, names: Sequence[bytes], num_blocks: int, num_tokens: int) -> dict[str, Any] | None:
        lease, answer = self._announced.pop(request.request_id, (None, None))
        if lease is not None and (lease.is_over or lease not in self._held):
            return None  # it has been ended
        if lease is None and (not names or (lease := self._open(names)) is None):
            return None
        assert lease is not None
        self._wanted.update(dict.fromkeys(name for name in lease.pending if name not in self.contents))
        self._leases.end_computing(lease)
        self._hold_ready(lease)
        return answer or self._answer(request, lease, num_blocks, num_tokens)

    def _open(self, names: Sequence[bytes], *, is_computing: bool = False) -> Lease | None:
        lease = self._leases.open(names, is_computing=is_computing)
        if lease is not None:
            self._held[lease] = []
            self._pending.append(lease)
        return lease

    @property
    def is_keeping(self) -> bool:
        return bool(self._pending)

    # See CacheTier

    def begin_step(self, step_id: int, done_step_id: int) -> TierStep:
        loaded = super().begin_step(step_id, done_step_id).loaded
        for lease in self._leases.take_ended():
            self.contents.release_all(self._held.pop(lease))
        ops = self._store_wanted()
        self._pending = [lease for lease in self._pending if lease in self._held]
        for lease in self._pending:
            self._hold_ready(lease)
        self._pending = [lease for lease in self._pending if lease.pending and not lease.is_over]
        return TierStep(ops, loaded)

    def discard(self, names: Sequence[bytes]) -> None:
        super().discard(names)
        self._leases.lose(set(names))

    def forget(self, *, stored: bool, external: bool = False) -> None:
        super().forget(stored=stored, external=external)
        self._wanted.clear()
        if stored:
            self._leases.end_all()
            self._server.reset()
        else:
            for lease in self._pending:
                self._leases.note(lease, (), lost=set(lease.pending))
        self._pending.clear()

    def add_stats(self, stats: SchedulerStats) -> None:
        super().add_stats(stats)
        stats.num_leasable_blocks += self._leases.max_blocks
        stats.num_kv_leases += len(self._leases)
        stats.num_expired_kv_leases += self._leases.num_expired
        stats.num_refused_kv_leases += self._leases.num_refused

    def close(self) -> None:
        self._server.close()
        super().close()

    def _lasting_uses(self) -> Counter[Content]:
        return super()._lasting_uses() + Counter(content for held in self._held.values() for content in held)

    def _store_wanted(self) -> list[AnyDeviceOp]:
        blocks = {name: block for name in self._wanted if name not in self.contents and (block := self._find(name))}
        ops, _ = self._store([block.block_id for block in blocks.values()], list(blocks), used=())
        self._wanted = {name: None for name in blocks if name not in self.contents}
        return ops

    def _hold_ready(self, lease: Lease) -> None:
        """Hold the contents of a lease that are ready by now."""
        stored, lost = [], set()
        for name in lease.pending:
            content = self.contents.get(name)
            if content is not None and content.is_ready:
                self.contents.hold(content)
                self._held[lease].append(content)
                stored.append((name, content.slot))
            elif content is None and name not in self._wanted and not lease.is_computing:
                lost.add(name)
        if stored or lost:
            self._leases.note(lease, stored, lost)


def answered(
    request: Request,
    lease: Lease,
    num_blocks: int,
    num_tokens: int,
    *,
    own: Identity,
    host: str,
    port: int,
    tensor_parallel: int,
) -> dict[str, Any]:
    """The `kv_transfer_params` that a decode engine is to be sent with the prompt, whose first tokens are kept in so many blocks."""
    transfer = KVTransfer(
        remote_engine_id=own.engine_id,
        lease_id=lease.number,
        host=host,
        port=port,
        num_blocks=num_blocks,
        num_tokens=num_tokens,
        num_cached_tokens=max(0, request.num_cached_tokens),
    )
    found = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": transfer.remote_engine_id,
        "remote_request_id": transfer.lease_id,
        "remote_host": transfer.host,
        "remote_port": transfer.port,
        "remote_block_ids": [list(range(num_blocks))],
        "remote_num_tokens": transfer.num_tokens,
        "remote_prefill_cached_tokens": transfer.num_cached_tokens,
        "remote_blocks_expiry_time": time.time() + LEASE_SECONDS,
        "tp_size": tensor_parallel,
        "dcp_size": 1,
        "pp_size": 1,
        "transfer_mode": "pull",
    }
    return {**found, "jaxllm_signature": signature(own.token, transfer)} if own.token else found

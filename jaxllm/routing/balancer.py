"""Chooses a replica for each request: by cached prefixes and queued work, or by a policy to compare with."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from itertools import tee
from typing import Literal, NamedTuple, get_args

import numpy as np

from jaxllm.cache_events import CacheEvents
from jaxllm.errors import EngineDeadError, InvalidRequestError
from jaxllm.request import EngineCoreRequest
from jaxllm.routing.loads import QUEUE_TOKENS, Loads
from jaxllm.routing.prefix_index import PrefixIndex, keys_of
from jaxllm.scheduler.block_hash import HashAlgorithm, extra_keys_of, hashes_of
from jaxllm.scheduler_stats import SchedulerStats

RoutingPolicy = Literal["cache_aware", "least_loaded", "round_robin"]
"""How a replica is chosen. least_loaded: by vLLM's score of requests."""
_RANK = "data_parallel_rank"
HOST_SHARE = 0.15
"""A token that a replica has in host memory counts as so much of one that it computes."""
MAX_SESSIONS = 100_000
"""Sessions whose replica is remembered, the latest ones."""


class _Cached(NamedTuple):
    """Tokens of a prompt that each replica has: int [replicas]."""

    on_devices: np.ndarray
    in_host: np.ndarray
    """Further tokens in host memory: computed ones need as many blocks on the devices."""


class Balancer:
    """Replicas as one API server knows them. Every replica is down until `set_up`. Not thread safe."""

    def __init__(
        self,
        num_replicas: int,
        *,
        block_size: int,
        max_num_seqs: int,
        hash_algorithm: HashAlgorithm = "sha256",
        prefix_caching: bool = True,
        policy: RoutingPolicy = "cache_aware",
        num_api_servers: int = 1,
        max_indexed_blocks: int = 4_000_000,
    ):
        """block_size, hash_algorithm, prefix_caching, max_num_seqs: the options of each engine. num_api_servers: API servers that
        send to these replicas. max_indexed_blocks: most blocks of all prefix caches that are remembered, of about 150 bytes each."""
        assert policy in get_args(RoutingPolicy), policy
        self.num_replicas = num_replicas
        self.policy = policy
        self.index = PrefixIndex(num_replicas, max_indexed_blocks)
        self.index_with_host: PrefixIndex | None = None
        """Blocks on devices or in host memory, once a replica has published some."""
        self._max_indexed_blocks = max_indexed_blocks
        self.loads = Loads(num_replicas, block_size=block_size, max_num_seqs=max_num_seqs, num_api_servers=num_api_servers)
        self._block_size = block_size
        self._hash_algorithm: HashAlgorithm = hash_algorithm
        self._reads_caches = prefix_caching and policy == "cache_aware"
        self._adapter_keys: list[Mapping[str, str]] = [{}] * num_replicas
        self._replica_of: dict[str, int] = {}
        self._sessions: OrderedDict[str, int] = OrderedDict()
        """The replica of each session's latest request."""
        self._stalled = np.zeros(num_replicas, bool)
        self._draining = np.zeros(num_replicas, bool)
        self._last = -1

    # Replicas come and go

    def is_up(self, replica: int) -> bool:
        """Whether a replica has requests, or may have."""
        return bool(self.loads.is_up[replica])

    def set_up(self, replica: int) -> None:
        """A replica serves, with empty caches and no requests."""
        self.set_down(replica)
        self.loads.set_up(replica)

    def set_stalled(self, replica: int, is_stalled: bool) -> None:
        """Whether a replica seems to hang: others are preferred as long as it does."""
        self._stalled[replica] = is_stalled

    def set_draining(self, replica: int) -> None:
        """A replica gets no more requests, and goes on with those that it has."""
        self._draining[replica] = True

    def set_down(self, replica: int) -> list[str]:
        """A replica serves no longer. Returns the ids of its unfinished requests, which are forgotten."""
        self.loads.set_down(replica)
        self._stalled[replica] = self._draining[replica] = False
        self.index.forget(replica)
        if self.index_with_host is not None:
            self.index_with_host.forget(replica)
        self._adapter_keys[replica] = {}
        lost = self.requests_of(replica)
        for request_id in lost:
            del self._replica_of[request_id]
        return lost

    # What replicas publish

    def note_load(self, replica: int, stats: SchedulerStats, num_received: int | None = None) -> None:
        """Record the load of a replica. num_received: requests of this API server that it had received since `set_up`; None: all."""
        if self.is_up(replica):
            self.loads.note(replica, stats, num_received)

    def note_events(self, replica: int, events: CacheEvents) -> None:
        """Apply events of a replica's prefix cache, or a snapshot."""
        if self._reads_caches and self.is_up(replica):
            self.index.apply(replica, events)
            if events.with_host is not None:
                if self.index_with_host is None:
                    self.index_with_host = PrefixIndex(self.num_replicas, self._max_indexed_blocks)
                self.index_with_host.apply(replica, events.with_host)

    def set_adapters(self, replica: int, cache_keys: Mapping[str, str]) -> None:
        """The adapters that requests may name at a replica, with the `cache_key` of each.

        An engine numbers its adapters, so the key of one name, and with it the hashes of its blocks, may differ between replicas.
        """
        self._adapter_keys[replica] = dict(cache_keys)

    # Requests

    def choose(
        self,
        request: EngineCoreRequest,
        rank: int | None = None,
        *,
        among: np.ndarray | None = None,
        near: np.ndarray | None = None,
        is_prefilled: bool = False,
    ) -> int:
        """Choose the replica for a request and count the request as sent there, until `ended`. rank: the replica, if it is chosen already.
        among: bool [replicas], those that it may go to; None: all. is_prefilled: its prompt is computed already, elsewhere. near: bool
        [replicas], with is_prefilled those that reach its blocks sooner; None: all alike.

        A request of a session goes where the one before it went, unless it would wait there for a seat or for blocks.

        Raises InvalidRequestError for a rank that does not exist, EngineDeadError if it is down or all are.
        """
        cached = self._cached_of(request) if self._reads_caches else None
        num_tokens, options = len(request.prompt_token_ids), request.options
        return self._choose(
            request.request_id,
            num_tokens,
            cached,
            options.adapter,
            rank,
            options.session_id,
            among,
            near,
            is_prefilled=is_prefilled,
        )

    def fewest_uncached(self, request: EngineCoreRequest, among: np.ndarray) -> int:
        """Prompt tokens that the replica computes, of those it may go to, that has most of the prompt, on its devices or in host memory."""
        num_tokens = len(request.prompt_token_ids)
        cached = self._cached_of(request) if self._reads_caches else None
        found = 0 if cached is None else int(np.where(self._taking(among), cached.on_devices + cached.in_host, 0).max())
        return num_tokens - min(found, num_tokens - 1)

    def takes_requests(self, among: np.ndarray) -> bool:
        """Whether any of these replicas takes requests."""
        return bool(self._taking(among).any())

    def _taking(self, among: np.ndarray | None) -> np.ndarray:
        takes = self.loads.is_up & ~self._draining
        return takes if among is None else takes & among

    def choose_by_keys(self, request_id: str, num_tokens: int, keys: Iterable[int], rank: int | None = None) -> int:
        """Choose for a prompt of `num_tokens` tokens whose blocks have these keys."""
        cached = self._cached_tokens(keys) if self._reads_caches else None
        return self._choose(request_id, num_tokens, cached, None, rank)

    def choose_by_cached(
        self, request_id: str, num_tokens: int, cached: np.ndarray, rank: int | None = None, session_id: str | None = None
    ) -> int:
        """Choose where the caller knows how many of a prompt's `num_tokens` tokens each replica has in its prefix cache."""
        found = _Cached(cached, np.zeros_like(cached)) if self._reads_caches else None
        return self._choose(request_id, num_tokens, found, None, rank, session_id)

    def replica_of(self, request_id: str) -> int | None:
        """The replica of an unfinished request."""
        return self._replica_of.get(request_id)

    def requests_of(self, replica: int) -> list[str]:
        """The ids of a replica's unfinished requests."""
        return [request_id for request_id, owner in self._replica_of.items() if owner == replica]

    def num_requests(self, replica: int) -> int:
        """How many unfinished requests a replica has."""
        return self.loads.replicas[replica].num_in_flight

    def has_seat(self, replica: int) -> bool:
        """Whether a request sent to a replica now would be admitted at once."""
        return self.is_up(replica) and not self._draining[replica] and bool(self.loads.seats[replica] > 0)

    def ended(self, request_id: str) -> None:
        """A request has ended, for whatever reason. Unknown ids are ignored."""
        replica = self._replica_of.pop(request_id, None)
        if replica is not None:
            self.loads.ended(replica)

    def _cached_of(self, request: EngineCoreRequest) -> "_Cached | None":
        """Tokens of a prompt that each replica has; None: it is to compute all of them."""
        if not request.reads_prefix_cache:
            return None
        adapter = request.options.adapter
        if adapter is None:
            return self._cached_tokens(self._keys(request, None))
        cached = _Cached(np.zeros(self.num_replicas, np.int64), np.zeros(self.num_replicas, np.int64))
        adapter_keys = [keys.get(adapter) for keys in self._adapter_keys]
        for adapter_key in {key for key in adapter_keys if key is not None}:
            found = self._cached_tokens(self._keys(request, adapter_key))
            has_key = np.array([key == adapter_key for key in adapter_keys])
            for tokens, of_key in zip(cached, found, strict=True):
                tokens[has_key] = of_key[has_key]
        return cached

    def _cached_tokens(self, keys: Iterable[int]) -> "_Cached":
        """Tokens of a prompt whose blocks have these keys."""
        if self.index_with_host is None:
            on_devices = self.index.prefixes(keys)
            return _Cached(on_devices * self._block_size, np.zeros_like(on_devices))
        first, second = tee(keys)  # which hash no more of the prompt than is needed
        on_devices, anywhere = self.index.prefixes(first), self.index_with_host.prefixes(second)
        return _Cached(on_devices * self._block_size, np.maximum(0, anywhere - on_devices) * self._block_size)

    def _keys(self, request: EngineCoreRequest, adapter_key: str | None) -> Iterable[int]:
        extra_keys = extra_keys_of(request, adapter_key, self._block_size)
        return keys_of(hashes_of(request.prompt_token_ids, self._block_size, self._hash_algorithm, extra_keys))

    def _choose(
        self,
        request_id: str,
        num_tokens: int,
        cached: "_Cached | None",
        adapter: str | None,
        rank: int | None,
        session_id: str | None = None,
        among: np.ndarray | None = None,
        near: np.ndarray | None = None,
        *,
        is_prefilled: bool = False,
    ) -> int:
        loads = self.loads
        takes = self._taking(among)
        allowed = takes & ~self._stalled
        allowed = allowed if allowed.any() else takes
        to_compute = uncached = np.full(self.num_replicas, num_tokens)
        if cached is not None:
            uncached = num_tokens - np.minimum(cached.on_devices, num_tokens - 1)
            to_compute = uncached - ((1 - HOST_SHARE) * np.minimum(cached.in_host, uncached - 1)).astype(np.int64)
        if rank is not None:
            replica = self._checked(rank)
        elif not takes.any():
            raise EngineDeadError("no replica of the engine takes requests")
        elif (own := self._of_session(session_id, uncached, allowed)) is not None:
            replica = own
        elif self.policy == "cache_aware" and is_prefilled:
            replica = self._least_held(num_tokens, allowed, near)
        elif self.policy == "cache_aware":
            replica = self._best(uncached, to_compute, adapter, allowed)
        elif self.policy == "least_loaded":
            replica = self._lowest(loads.vllm_score, allowed)
        else:
            replica = self._lowest(np.zeros(self.num_replicas), allowed)
        if session_id is not None:
            self._remember(session_id, replica)
        self._last = replica
        self._replica_of[request_id] = replica
        num_left = int(to_compute[replica])
        loads.sent(replica, min(num_left, self._block_size) if is_prefilled else num_left, adapter, int(uncached[replica]))
        return replica

    def _of_session(self, session_id: str | None, uncached: np.ndarray, allowed: np.ndarray) -> int | None:
        """The replica of a session, if a request with so many tokens to compute would be admitted there at once."""
        replica = None if session_id is None else self._sessions.get(session_id)
        if replica is None:
            return None
        is_free = allowed & (self.loads.seats > 0) & (self.loads.room >= uncached)
        return replica if is_free[replica] else None

    def _remember(self, session_id: str, replica: int) -> None:
        self._sessions[session_id] = replica
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.num_replicas:
            raise InvalidRequestError(f"{_RANK} is {rank}, must be 0 to {self.num_replicas - 1}", _RANK)
        if not self.is_up(rank):
            raise EngineDeadError(f"replica {rank} is down; leave out {_RANK} to let another serve")
        if self._draining[rank]:
            raise EngineDeadError(f"replica {rank} is being stopped; leave out {_RANK} to let another serve")
        return rank

    def _best(self, uncached: np.ndarray, to_compute: np.ndarray, adapter: str | None, allowed: np.ndarray) -> int:
        """The replica of the lowest cost: the prompt tokens that are queued there, and twice those of this prompt that must be computed,
        of which tokens in host memory count as a part.

        All take the same time on the device. Those that are queued delay this request; its own delay it, and whoever comes to the
        replica after it, as they would not where they are cached. So a cached prefix is worth a queue of twice its length. Requests that
        run count as `ROW_TOKENS`: they slow this one down as long as it lives. Where a request would have to wait for a seat or for
        blocks until others end, no cached prefix helps: such replicas are only taken if all are like that, and then waiting requests
        count as `QUEUE_TOKENS`.
        """
        loads = self.loads
        cost = loads.work + 2 * to_compute
        is_free = allowed & (loads.seats > 0) & (loads.room >= uncached)
        if adapter is not None:
            load_tokens, has_slot = loads.adapter_tokens(adapter)
            cost += load_tokens
            is_free &= has_slot
        if not is_free.any():
            return self._lowest(cost + QUEUE_TOKENS * loads.waiting, allowed)
        return self._lowest(cost, is_free)

    def _least_held(self, num_tokens: int, allowed: np.ndarray, near: np.ndarray | None) -> int:
        """The replica whose requests have the fewest tokens, for one whose prompt is computed: each step reads all tokens of the requests
        that it continues. One where it would wait for a seat or for blocks is taken only if all are like that. A near one may have as many
        more as the prompt has."""
        loads = self.loads
        is_free = allowed & (loads.seats > 0) & (loads.room >= num_tokens)
        if not is_free.any():
            return self._lowest(loads.held + QUEUE_TOKENS * loads.waiting, allowed)
        replica = self._lowest(loads.held, is_free)
        if near is None or not (is_free & near).any():
            return replica
        nearest = self._lowest(loads.held, is_free & near)
        return nearest if loads.held[nearest] <= loads.held[replica] + num_tokens else replica

    def _lowest(self, cost: np.ndarray, allowed: np.ndarray) -> int:
        """The allowed replica of the lowest cost; among equals the next in turn."""
        cost = np.where(allowed, cost, np.inf)
        lowest = np.flatnonzero(cost == cost.min())
        return int(lowest[np.searchsorted(lowest, self._last, "right") % len(lowest)])

"""The requests of a scheduler: which run, wait or are held, and what they hold. Plans nothing."""

import time
from collections.abc import Iterable, Sequence
from functools import partial

from jaxllm.cache_policy import FULL, CachePolicy
from jaxllm.config import CacheOptions, SchedulerOptions
from jaxllm.errors import ConfigError, InvalidRequestError, OverloadedError
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import ErrorKind, Request, RequestStatus
from jaxllm.scheduler.admission import AdmissionRoom, ChunkRoom, Fit, fit_all
from jaxllm.scheduler.block_hash import block_hasher
from jaxllm.scheduler.cache_observer import CacheObserver
from jaxllm.scheduler.cache_tier import CacheTier
from jaxllm.scheduler.deadlines import Deadlines, describe_expiry
from jaxllm.scheduler.draft_control import DraftControl
from jaxllm.scheduler.in_flight import InFlight
from jaxllm.scheduler.kv_cache_manager import KVCacheManager
from jaxllm.scheduler.limits import check_items, check_options, check_room, check_servable
from jaxllm.scheduler.results import last_output
from jaxllm.scheduler.scheduling_policies import Turns, make_waiting_queue
from jaxllm.scheduler.state_checkpoints import StateCheckpoints
from jaxllm.scheduler.step_limits import StepLimits
from jaxllm.scheduler.totals import Totals

_COMPLETED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_REPETITION)


class ScheduledRequests:
    """Requests between their arrival and their end, with their blocks and places in rooms. A subclass admits those that wait."""

    def __init__(
        self,
        options: SchedulerOptions,
        cache: CacheOptions,
        *,
        num_blocks: int,
        max_model_len: int,
        policies: Sequence[CachePolicy] = (FULL,),
        drafts: DraftControl | None = None,
        rooms: Sequence[AdmissionRoom] = (),
        num_stages: int = 1,
        block_size: int | None = None,
        tiers: Sequence[CacheTier] = (),
        observer: CacheObserver | None = None,
        num_state_blocks: int = 0,
        token_sizes: Sequence[int] = (),
    ):
        """policies: one for each group of layers with separate block tables. drafts: how many each request gets; None: none.
        rooms: needs of a request other than blocks. num_stages: so many steps in a row are of different requests, because
        the first stage of a pipeline would wait for a token that the last one has yet to draw. block_size: tokens of a block over
        all devices that split it; None: the option's. tiers: where blocks are kept outside the pool. observer: is told what the
        pool has. num_state_blocks: see KVCacheManager; 0: no states by row are kept. token_sizes: see StepLimits."""
        block_size = block_size or cache.block_size
        check_options(options, max_model_len)
        self.options = options
        self.max_model_len = max_model_len
        self.drafts = drafts
        self.num_stages = num_stages
        self._states: StateCheckpoints | None = None
        if num_state_blocks and cache.enable_prefix_caching:
            interval = -(-cache.prefix_cache_retention_interval // block_size) * block_size
            self._states = StateCheckpoints(lambda: self.cache_manager, interval, stores=options.enable_chunked_prefill)
        self.rooms = rooms = rooms if self._states is None else (self._states, *rooms)
        self.chunk_rooms = tuple(room for room in rooms if isinstance(room, ChunkRoom))
        if any(room.item_kinds for room in self.chunk_rooms) and not options.enable_chunked_prefill:
            raise ConfigError("enable_chunked_prefill is off, but prompts with items are computed in chunks; leave it on")
        min_chunk = max((room.min_chunk for room in self.chunk_rooms), default=1)
        self.limits = StepLimits(options, min_chunk=min_chunk, token_sizes=token_sizes)
        self._new_cache_manager = partial(
            KVCacheManager,
            cache,
            num_blocks,
            block_size=block_size,
            policies=policies,
            max_step_tokens=options.max_step_tokens,
            num_lookahead=0 if drafts is None else drafts.num_lookahead,
            tiers=tiers,
            observer=observer,
            num_state_blocks=num_state_blocks,
        )
        self.cache_manager = self._new_cache_manager()
        self.running: list[Request] = []
        """Running requests in order of admission."""
        self.waiting = make_waiting_queue(options.scheduling_policy)
        self._turns = Turns() if options.scheduling_policy == "fair" else None
        self.held: dict[str, Request] = {}
        """Requests that are neither running nor waiting until `release_requests`."""
        self.requests: dict[str, Request] = {}
        """All unfinished requests by id."""
        self._deadlines = Deadlines()
        self._num_left_waiting = 0
        """Requests that did not fit into the latest step."""
        self._num_deferred = 0
        """Requests among them that need something else than a place: `Fit.LATER`."""
        self._extend_hashes = block_hasher(block_size, cache.prefix_caching_hash_algo) if cache.enable_prefix_caching else None
        self._num_watermark_blocks = int(options.watermark * num_blocks)
        self._in_flight = InFlight()
        self._finished_ids: list[str] = []
        self._preempted_ids: list[str] = []
        self._totals = Totals()

    def add_request(self, request: Request) -> None:
        """Add a request to the waiting queue.

        Raises InvalidRequestError if it can never be served, OverloadedError if the queue is full.
        """
        if request.request_id in self.requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use; choose another", "request_id")
        check_servable(request, self.cache_manager, self.max_model_len)
        if request.spec.items:
            check_items(request, self.chunk_rooms)
        # Requests added since the latest step can still get a seat, if that step left no request waiting for one.
        has_seats = self.num_left_waiting <= self._num_deferred
        num_seats = self.limits.max_num_seqs - len(self.running) if has_seats else 0
        try:
            check_room(request, self.waiting, self.requests.values(), self.options, num_seats)
        except OverloadedError as error:
            self._totals.num_rejected[error.limit] += 1
            raise
        if request.pooling_params is None:
            request.max_num_tokens = min(request.max_num_tokens, self.max_model_len)
        if self._extend_hashes is not None:
            request.extend_hashes = self._extend_hashes
            self._extend_hashes(request)
        request.queued_at = time.monotonic()
        self.requests[request.request_id] = request
        self.waiting.add(request)
        self._deadlines.add(request, request.queued_at)

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens of a new request that the prefix cache has, as far as it may read them. Changes nothing."""
        if self._extend_hashes is not None:
            request.extend_hashes = self._extend_hashes
            self._extend_hashes(request)
        return self.cache_manager.get_computed_blocks(request).num_computed_tokens

    @property
    def num_left_waiting(self) -> int:
        """Requests that did not fit into the latest step and still wait."""
        return min(self._num_left_waiting, len(self.waiting))

    def has_room_for(self, request: Request) -> bool:
        """Whether a request that waits elsewhere could be admitted here in the next step, as far as that is known before it."""
        has_seat = len(self.running) + len(self.waiting) < self.limits.max_num_seqs
        num_blocks = self.cache_manager.num_blocks_for(request.num_tokens) + self._num_watermark_blocks
        return has_seat and num_blocks <= self.cache_manager.pool.num_free_blocks and fit_all(self.rooms, request) is Fit.NOW

    def computes_for(self, request: Request) -> bool:
        """Whether steps compute an item that a waiting request waits for."""
        return any(room.is_begun(request) for room in self.chunk_rooms)

    def hand_over(self, request: Request, other: "ScheduledRequests") -> None:
        """Let another scheduler of the same options have a request that waits and was never admitted."""
        self.waiting.remove(request)
        del self.requests[request.request_id]
        self._num_left_waiting -= 1
        other.requests[request.request_id] = request
        other.waiting.add(request)
        other._deadlines.add(request, request.queued_at)

    def hold_requests(self, request_ids: Iterable[str]) -> None:
        """Give the places and blocks of requests to others until they are released; their tokens in flight still come. Ignores ids that
        are unknown or held."""
        held = [self.requests[name] for name in request_ids if name in self.requests and name not in self.held]
        running = {request.request_id for request in held if request.status == RequestStatus.RUNNING}
        self.running = [request for request in self.running if request.request_id not in running]
        for request in held:
            self.held[request.request_id] = request
            if request.request_id in running:
                self._vacate(request)
            else:
                self.cache_manager.loading.end(request)
                self.waiting.remove(request)

    def release_requests(self, request_ids: Iterable[str]) -> None:
        """Let held requests wait for a place again, first in line if they had one. Ignores ids that are not held."""
        for request in [self.held.pop(name) for name in request_ids if name in self.held]:
            (self.waiting.put_back if request.status == RequestStatus.PREEMPTED else self.waiting.add)(request)

    # The end of requests

    def finish_requests(self, request_ids: str | Iterable[str], status: RequestStatus) -> list[str]:
        """End requests from outside (abort, stop string, failure); drop late tokens. Returns the ids that were unfinished."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        return [request.request_id for request in self._end(ids, status)]

    def abort_requests(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """End requests on the engine's initiative. Returns the outputs of those that were unfinished."""
        return [last_output(request) for request in self._end(request_ids, RequestStatus.FINISHED_ABORTED)]

    def fail_requests(self, request_ids: Iterable[str], kind: ErrorKind, message: str) -> list[EngineCoreOutput]:
        """End requests with an error. Returns the outputs of those that were unfinished."""
        failed = self._end(request_ids, RequestStatus.FINISHED_ERROR)
        for request in failed:
            request.stop_reason, request.error_kind = message, kind
        return [last_output(request) for request in failed]

    def _end(self, request_ids: Iterable[str], status: RequestStatus) -> list[Request]:
        ended = [self.requests[request_id] for request_id in dict.fromkeys(request_ids) if request_id in self.requests]
        for request in ended:
            self._finish(request, status)
        if ended:
            self._drop_finished_from_running()
        return ended

    def fail_expired(self) -> list[EngineCoreOutput]:
        """End the requests that exceeded a deadline. Returns their outputs."""
        expired = self._deadlines.expired(time.monotonic()) if len(self._deadlines) else ()
        for request, kind in expired:
            request.error_kind = kind
        failed = (self.fail_requests([request.request_id], kind, describe_expiry(request, kind)) for request, kind in expired)
        return [output for outputs in failed for output in outputs]

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """End a request. The caller removes it from `running`, for all ended requests at once."""
        if request.status == RequestStatus.RUNNING:
            # After an error, keep nothing that the request computed in the prefix cache; a request that took too long computed it right.
            is_wrong = status == RequestStatus.FINISHED_ERROR and request.error_kind is not ErrorKind.TIMEOUT
            num_valid = 0 if is_wrong else request.num_computed_tokens
            self.cache_manager.free(request, num_valid)
        elif self.held.pop(request.request_id, None) is None:
            self.cache_manager.loading.end(request)
            self.waiting.remove(request)
        request.status = status
        if request.is_kept_for_decode:
            keeping = self.cache_manager.loading.keeping
            if status in _COMPLETED:
                request.kv_transfer_params = keeping.hand_over(request)
            else:
                keeping.withdraw(request)
        self.waiting.note_end(request)
        self._release(request)
        self._totals.num_not_finite += request.error_kind is ErrorKind.NOT_FINITE
        del self.requests[request.request_id]
        self._finished_ids.append(request.request_id)
        if self.drafts is not None:
            self.drafts.forget(request.request_id)

    # Leaving the running requests

    def _preempt(self, request: Request) -> None:
        """Return a request that left `running` to the waiting queue."""
        self._vacate(request)
        self.waiting.put_back(request)

    def _vacate(self, request: Request) -> None:
        """Free the blocks of a request that left `running`. It is recomputed after readmission.

        Its placeholders stay: tokens in flight remain valid, and the request is not readmitted before they arrive.
        """
        self.cache_manager.free(request, request.num_computed_tokens)
        request.status = RequestStatus.PREEMPTED
        self._release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._totals.num_preemptions += 1
        self._preempted_ids.append(request.request_id)

    def _release(self, request: Request) -> None:
        for room in self.rooms:
            room.release(request)

    def _drop_finished_from_running(self) -> None:
        self.running = [request for request in self.running if not request.status.is_finished]
        self._deadlines.prune(len(self.requests))

    # The state of all

    def has_requests(self) -> bool:
        """Whether any request runs or waits, or steps must store blocks of one that has ended."""
        return len(self.requests) > len(self.held) or self.cache_manager.loading.is_storing

    @property
    def finished_ids(self) -> list[str]:
        """Requests that ended and whose rows the next step will free."""
        return [*self._finished_ids, *self._preempted_ids]

    @property
    def holds_blocks(self) -> bool:
        """Whether a request holds blocks."""
        pool = self.cache_manager.pool
        return pool.num_free_blocks != pool.num_usable_blocks

    @property
    def num_contenders(self) -> int:
        """Most requests that the next step may have."""
        return min(len(self.running) + len(self.waiting), self.limits.max_num_seqs)

    @property
    def decodes(self) -> bool:
        """Whether a running request is past its prompt."""
        return any(map(_decodes, self.running))


def _decodes(request: Request) -> bool:
    """Whether the request computes its last token next, or once that is known."""
    num_known = len(request.token_ids) + request.num_output_placeholders
    if request.num_output_placeholders:
        return num_known < request.max_num_tokens
    return num_known - request.num_computed_tokens == 1

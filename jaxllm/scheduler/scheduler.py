"""Decides how many tokens each request computes in the next step. Uses no arrays and no devices.

There are no separate prefill and decode phases. Every request has a number of known tokens and a number of computed tokens;
each step distributes a budget of tokens to bring the second up to the first.

The counts run ahead of the device. `schedule` counts the tokens of its step as computed at once, and the tokens that the step
will sample as placeholders, so that the next step can be planned before this one's tokens arrive. `update_from_output` replaces
the placeholders by tokens. Steps reach the device in the order in which they were planned, so a block that is freed here can be
used by the next step even while other steps are in flight.
"""

import time
from collections.abc import Collection, Iterable, Sequence
from functools import partial

import msgspec

from jaxllm.cache_events import CacheEvents
from jaxllm.device_ops import AnyDeviceOp
from jaxllm.log import logger
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import Request, RequestStatus
from jaxllm.scheduler.admission import Fit, fit_all, limit_all
from jaxllm.scheduler.cache_events import EventCollector, PoolAndHost, keys_of
from jaxllm.scheduler.errors import PlanError, UpdateError
from jaxllm.scheduler.fair_queue import FairQueue
from jaxllm.scheduler.integrity import check_integrity
from jaxllm.scheduler.kv_cache_manager import CachedPrefix
from jaxllm.scheduler.refusal import Refusal
from jaxllm.scheduler.requests import ScheduledRequests
from jaxllm.scheduler.results import Share, take_in
from jaxllm.scheduler.scheduling_policies import Turns, choose_victim, make_waiting_queue
from jaxllm.scheduler.unwritten import readers_of_unwritten, readers_of_wrong
from jaxllm.scheduler_output import NO_ADAPTER, ModelRunnerOutput, NewRequestData, RowStep, SchedulerOutput
from jaxllm.scheduler_stats import SchedulerStats


class Scheduler(ScheduledRequests):
    """Schedules running requests first, then waiting ones, within a budget of tokens per step. Preempts when blocks run out."""

    _refusal: Refusal | None = None

    # Planning a step

    def schedule(
        self, *, masked_wait: bool = False, most_drafts: int | None = None, others_decode: bool = False
    ) -> SchedulerOutput:
        """Plan the next step. masked_wait: requests with a grammar whose last tokens are in flight leave the step to others, if there
        are any. most_drafts: of a request; None: as many as `drafts` chooses. others_decode: requests of another rank wait for the step.

        A plan with neither tokens nor ops need not run and may be dropped: every plan repeats the finished and preempted ids until one
        has tokens. The runner must therefore accept ids that it has already dropped, and must apply them before the new
        requests, which may have the same ids.
        Raises PlanError on failure; `start_over` must follow.
        """
        cap = self.limits.chunk(len(self.requests))
        if self._turns is not None and self.num_left_waiting:
            self._give_way(self._turns)
        if self.chunk_rooms:
            decodes = others_decode or self.decodes
            for room in self.chunk_rooms:
                room.begin_step(decodes=decodes)
        loading = self.cache_manager.loading
        if loading.has_tiers:
            loading.begin_step(self._in_flight.latest_id + 1, self._in_flight.done_id, others_run=bool(self.running))
        num_preemptions = self._totals.num_preemptions
        if most_drafts is None:
            most_drafts = 0 if self.drafts is None else self.drafts.most(self.num_contenders, self.running)
        masked_wait = self.num_stages > 1 or (masked_wait and any(request.matcher is None for request in self.running))
        shares, budget = self._schedule_running(cap, most_drafts, masked_wait=masked_wait)
        new_requests: list[NewRequestData] = []
        self._num_deferred = 0
        # A step never both preempts and admits: the admitted request would be preempted next.
        if self.waiting and self._totals.num_preemptions == num_preemptions:
            if loading.is_loading:
                num_watermark = self._num_watermark_blocks if self.running else 0
                loading.go_on(self._num_promised(shares) + num_watermark, others_run=bool(self.running))
            if budget > 0:
                new_requests = self._schedule_waiting(shares, cap, budget, most_drafts)
        self._num_left_waiting = len(self.waiting)
        return self._commit(shares, new_requests, most_drafts)

    def _schedule_running(self, cap: int, most_drafts: int, *, masked_wait: bool) -> tuple[list[Share], int]:
        """Returns the shares of the running requests, none above `cap` tokens or `most_drafts` drafts, and the rest of the token budget."""
        budget = self._most_tokens(most_drafts)
        allocate_slots, running, chunk_rooms = self.cache_manager.allocate_slots, self.running, self.chunk_rooms
        loading = self.cache_manager.loading
        run_ahead, latest_step = self.options.async_scheduling, self._in_flight.latest_id + 1 - self.num_stages
        num_decodes, most_decodes = 0, -(-len(running) // self.num_stages)
        shares: list[Share] = []
        index = 0
        try:
            while index < len(running) and budget > 0:
                request = running[index]
                index += 1
                num_known = len(request.token_ids)
                if request.num_output_placeholders:
                    num_known += request.num_output_placeholders
                    if not run_ahead or num_known >= request.max_num_tokens or (masked_wait and request.matcher is not None):
                        continue  # it waits for its token, or will end with it
                    if request.last_step_id > latest_step:
                        continue  # its token is on its way through the stages
                num_drafts = 0
                num_wanted = num_known - request.num_computed_tokens
                if num_wanted > 1:
                    if not shares:
                        budget = self._most_tokens(most_drafts, min(num_wanted, cap))
                    num_tokens = min(num_wanted, cap, budget)
                elif num_decodes == most_decodes:
                    continue  # the next steps need requests too
                elif most_drafts and request.may_have_drafts:
                    num_drafts = self._num_drafts(request, min(most_drafts, budget - 1, request.max_num_tokens - num_known - 1))
                    num_tokens = num_wanted = 1 + num_drafts
                else:
                    num_tokens = 1
                if chunk_rooms and (start := request.num_computed_tokens) < request.num_prompt_tokens:
                    num_tokens = limit_all(chunk_rooms, request, start, num_tokens)
                    if not num_tokens:
                        continue
                while (new_block_ids := allocate_slots(request, num_tokens)) is None:
                    if num_drafts:
                        num_drafts, num_tokens, num_wanted = 0, 1, 1
                        continue
                    if loading.end_latest():
                        continue  # it loses copies alone
                    victim_index = choose_victim(self.options.scheduling_policy, running)
                    victim = running.pop(victim_index)
                    if victim_index < index:
                        index -= 1
                        budget += _withdraw(shares, victim)
                    self._preempt(victim)
                    if victim is request:
                        break
                if new_block_ids is not None:
                    num_samples = 1 + num_drafts if num_tokens == num_wanted else 0
                    row = RowStep(request.request_id, request.num_computed_tokens, num_tokens, num_drafts, new_block_ids)
                    shares.append((request, num_samples, row))
                    budget -= num_tokens
                    num_decodes += num_wanted == 1
        except Exception as error:
            raise PlanError(request.request_id) from error
        return shares, budget

    def _most_tokens(self, most_drafts: int, num_wanted: int = 0) -> int:
        """Most tokens of a step whose first request is to compute so many: more for a long prompt if no request decodes, fewer with
        decodes if prompts have few left."""
        usual = self.limits.max_num_batched_tokens
        if num_left := self._num_left():
            if self.decodes:
                return self.limits.beside_decodes(len(self.running) * (1 + most_drafts), num_left)
            if num_wanted > usual:
                return self.limits.max_num_prefill_tokens
        return usual

    def _num_left(self) -> int:
        """Tokens of prompts that are to be computed, of those that wait and of the latest that run."""
        num_left = self.waiting.num_prompt_tokens
        for request in reversed(self.running):
            num_missing = request.num_tokens - request.num_computed_tokens
            if num_missing <= 1:
                break
            num_left += num_missing
        return num_left

    def _num_drafts(self, request: Request, most: int) -> int:
        """Number of drafts that the request computes behind its last token, at most `most`."""
        assert self.drafts is not None
        if request.thinking is not None and not request.thinking.is_over:
            return 0  # the budget counts single tokens
        return max(0, min(most, self.drafts.of(request)))

    def _give_way(self, turns: Turns) -> None:
        """Preempt a request for the next one in line, if that is another client's turn and it has waited long enough."""
        now = time.monotonic()
        if not turns.are_due(now):
            return
        for request in self.running:
            self.waiting.note_output(request)
        request = self.waiting.peek()
        if request.num_output_placeholders or request.status is RequestStatus.WAITING_FOR_BLOCKS:
            return
        if not turns.may_end(request, now):
            return
        if (fit := fit_all(self.rooms, request)) is Fit.LATER:
            return
        by_rows = len(self.running) >= self.limits.max_num_seqs or fit is Fit.IN_TURN
        index = turns.choose(request, self.running, by_rows=by_rows)
        if index is not None:
            victim = self.running.pop(index)
            self._vacate(victim)
            assert isinstance(self.waiting, FairQueue)
            self.waiting.give_way(victim)

    def _schedule_waiting(self, shares: list[Share], cap: int, budget: int, most_drafts: int) -> list[NewRequestData]:
        """Admit waiting requests in order, up to the first that others may not overtake. Appends their shares to `shares`."""
        manager, whole = self.cache_manager, self.options.scheduler_reserve_full_isl
        loading = manager.loading
        num_promised = self._num_promised(shares)
        new_requests: list[NewRequestData] = []
        skipped: list[Request] = []
        try:
            while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
                request = self.waiting.peek()
                if request.num_output_placeholders:
                    break  # preempted, with tokens in flight: later requests must not take the blocks that it freed
                fit = fit_all(self.rooms, request)
                if fit is Fit.IN_TURN:
                    break
                if fit is Fit.LATER:
                    self._num_deferred += 1
                    skipped.append(self.waiting.pop())
                    continue
                if loading.is_under_way(request):
                    skipped.append(self.waiting.pop())
                    continue
                loading.end(request)
                num_reserved = self._num_reserved(num_promised)
                num_spare = manager.pool.num_free_blocks - num_reserved
                if self._still_refused(request, num_spare):
                    break
                prefix = manager.get_computed_blocks(request)
                if self._states is not None:
                    self._states.begin(request, prefix)
                if loading.begin(request, prefix.num_cached_tokens, num_reserved):
                    self._refusal = None  # the load can be ended for the request that was refused
                    skipped.append(self.waiting.pop())
                    continue
                num_wanted = request.num_tokens - prefix.num_computed_tokens
                num_tokens = min(num_wanted, cap)
                if not shares:
                    budget = self._most_tokens(most_drafts, num_tokens)
                if num_tokens > budget and not self.options.enable_chunked_prefill:
                    break
                num_tokens = min(num_tokens, budget)
                if self.chunk_rooms and prefix.num_computed_tokens < request.num_prompt_tokens:
                    num_tokens = limit_all(self.chunk_rooms, request, prefix.num_computed_tokens, num_tokens)
                    if not num_tokens:
                        if budget < self.limits.min_chunk:
                            break  # running requests take too much: those behind it would take it for ever
                        skipped.append(self.waiting.pop())
                        continue
                allocate = partial(manager.allocate_slots, request, num_tokens, prefix, whole_sequence_must_fit=whole)
                new_block_ids = allocate(num_reserved_blocks=num_reserved)
                while new_block_ids is None and loading.end_latest(but=skipped):
                    new_block_ids = allocate(num_reserved_blocks=self._num_reserved(num_promised))
                if new_block_ids is None:
                    if whole:  # otherwise its need also depends on the step's budget
                        self._refusal = Refusal(request, prefix, num_spare, manager)
                    break
                self.waiting.pop()
                new_requests.append(self._admit(request, prefix))
                row = RowStep(request.request_id, prefix.num_computed_tokens, num_tokens, 0, [])
                share: Share = (request, int(num_tokens == num_wanted), row)
                shares.append(share)
                budget -= num_tokens
                num_promised += self._num_promised([share])
        except Exception as error:
            raise PlanError(request.request_id) from error
        for request in reversed(skipped):
            self.waiting.put_back(request)
        return new_requests

    def _num_reserved(self, num_promised: int) -> int:
        """Free blocks that a request must leave to admitted prompts, to loads, and to those that run."""
        return (
            num_promised + self.cache_manager.loading.num_blocks_to_come + (self._num_watermark_blocks if self.running else 0)
        )

    def _num_promised(self, shares: Iterable[Share]) -> int:
        """Blocks that admitted prompts have yet to allocate: they count as used."""
        return sum(map(self._num_blocks_to_come, shares)) if self.options.scheduler_reserve_full_isl else 0

    def _num_blocks_to_come(self, share: Share) -> int:
        """Number of blocks that the rest of a prompt will take after this step."""
        request, num_samples, _ = share
        if num_samples:
            return 0
        return self.cache_manager.num_blocks_for(request.num_tokens) - self.cache_manager.num_blocks_of(request.request_id)

    def _still_refused(self, request: Request, num_spare_blocks: int) -> bool:
        return self._refusal is not None and self._refusal.holds(request, num_spare_blocks)

    def _admit(self, request: Request, prefix: CachedPrefix) -> NewRequestData:
        if self._refusal is not None and self._refusal.request is request:
            self._refusal = None
        self.running.append(request)
        for room in self.rooms:
            room.take(request)
        return NewRequestData(
            request_id=request.request_id,
            token_ids=request.token_ids.copy(),
            num_prompt_tokens=request.num_prompt_tokens,
            sampling_params=request.sampling_params,
            eos_token_ids=request.spec.eos_token_ids,
            block_ids=self.cache_manager.block_ids(request.request_id),
            num_computed_tokens=prefix.num_computed_tokens,
            num_cached_tokens=prefix.num_cached_tokens,
            is_masked=request.matcher is not None,
            pooling_params=request.pooling_params,
            adapter_slot=NO_ADAPTER if request.adapter is None else request.adapter.slot,
            items=tuple(msgspec.structs.replace(item, payload=b"") for item in request.spec.items),
            second_text_start=request.spec.second_text_start,
        )

    def _note_admission(self, request: Request, data: NewRequestData) -> None:
        """Update a request once the plan that admits it is complete."""
        if self.cache_manager.reads_cache(request):
            self._totals.note_prefix(request, data)
            if self.cache_manager.loading.has_tiers:
                self._totals.note_loaded(request, data, self.cache_manager.block_size)
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = data.num_cached_tokens
            request.scheduled_at = time.monotonic()
        request.num_computed_tokens = data.num_computed_tokens
        request.admission_step_id = self._in_flight.latest_id + 1
        request.status = RequestStatus.RUNNING

    def _commit(self, shares: list[Share], new_requests: list[NewRequestData], most_drafts: int) -> SchedulerOutput:
        """Build the plan and count its tokens as computed. The shares of the new requests come last."""
        num_known = len(shares) - len(new_requests)
        for (request, _, _), data in zip(shares[num_known:], new_requests, strict=True):
            self._note_admission(request, data)
        num_step_tokens, num_step_drafts, step_id = 0, 0, self._in_flight.latest_id + 1
        has_drafts = most_drafts > 0 or (self.drafts is not None and self.drafts.fits_rows)
        masked_ids: list[str] = []
        for request, num_samples, (_, _, count, num_drafts, _) in shares:
            if num_samples and _may_be_masked(request):
                masked_ids.append(request.request_id)
            num_step_tokens += count
            request.num_computed_tokens += count
            request.num_output_placeholders += num_samples
            request.last_step_id = step_id
            request.may_have_drafts = num_samples > 0 and has_drafts
            if num_drafts:
                request.num_drafts_in_flight += num_drafts
                num_step_drafts += num_drafts
        self._in_flight.latest_id = step_id
        plan = SchedulerOutput(
            new_requests=new_requests,
            rows=[row for _, _, row in shares],
            num_tokens=num_step_tokens,
            finished_request_ids=self._finished_ids.copy(),
            preempted_request_ids=self._preempted_ids.copy(),
            step_id=step_id,
            masked_request_ids=tuple(masked_ids),
            num_drafts=self._room_for_drafts(shares, most_drafts),
            ops=self._ops(shares),
        )
        if shares:
            self._totals.step_tokens.add(num_step_tokens)
            self._in_flight.add(shares, num_step_tokens - num_step_drafts - len(shares))
            self._finished_ids.clear()
            self._preempted_ids.clear()
        return plan

    def _room_for_drafts(self, shares: list[Share], most_drafts: int) -> int:
        """`SchedulerOutput.num_drafts` of a step."""
        if self.drafts is None or not self.drafts.fits_rows:
            return most_drafts
        return max((row.num_drafts for _, _, row in shares), default=0)

    def _ops(self, shares: list[Share]) -> tuple[AnyDeviceOp, ...]:
        """Operations that tiers and rooms add before the step."""
        ops = self.cache_manager.loading.take_ops()
        for room in self.chunk_rooms:
            ops += room.step_ops()
            for request, _, row in shares:
                if row.start < request.num_prompt_tokens:
                    ops += room.ops(request, row.start, row.num_tokens)
        return tuple(ops)

    def tokens_are_known(self, plan: SchedulerOutput) -> bool:
        """Whether a step in flight is the only one that samples tokens for any of its masked requests."""
        return self._in_flight.tokens_are_known(plan)

    # Processing the results of a step

    def update_from_output(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Process the tokens of a step: end requests that are done, and report new tokens.

        Steps must be passed in the order in which they were planned. Requests that have ended meanwhile are skipped. A failure
        while processing one request ends that request. Raises UpdateError if that is impossible; `start_over` must follow.
        """
        outputs: list[EngineCoreOutput] = []
        try:
            shares = self._in_flight.done(plan.step_id)
            if result.errors:
                self._restart(readers_of_unwritten(plan, result, shares, self._in_flight.steps()), shares)
            if result.not_finite:
                self._try_again(readers_of_wrong(result, shares), shares)
            if self.drafts is not None:
                self.drafts.note(shares, result)
            if take_in(shares, result, outputs, self._finish):
                self._drop_finished_from_running()
            if result.errors or result.not_finite:
                self._discard_failed(shares, result)
            outputs += self.cache_manager.loading.keeping.announce(request for request, _, _ in shares)
        except Exception as error:
            raise UpdateError(outputs) from error
        return outputs

    def _restart(self, requests: Collection[Request], shares: list[Share]) -> None:
        """Compute requests again that read what nothing has written. Their tokens in this step, whose shares these are, and in those in
        flight are dropped, and so is all that they computed."""
        self._in_flight.drop(requests, also=(shares,))
        for request in requests:
            request.num_output_placeholders = request.num_drafts_in_flight = 0
        for request in [request for request in reversed(self.running) if request in requests]:
            self.running.remove(request)
            self._preempt(request)
        for request in requests:
            self.cache_manager.discard_computed(request)

    def _try_again(self, requests: Collection[Request], shares: list[Share]) -> None:
        """Compute requests again, without what they had found: it may have NaN."""
        self._restart(requests, shares)
        for request in requests:
            request.may_try_again = request.loads_blocks = False
            request.num_cached_tokens, request.loaded_tokens = -1, None
            self.cache_manager.discard_all(request)
            logger.warning(
                "request %s: NaN behind tokens that it had found in the prefix cache; they are computed again",
                request.request_id,
            )

    def _discard_failed(self, shares: Iterable[Share], result: ModelRunnerOutput) -> None:
        """Find nothing any more that failed requests computed, and nothing that those read which drew NaN: they may have been preempted, or
        have ended, before the step was over."""
        for request, _, row in shares:
            if row.request_id in result.not_finite:
                self.cache_manager.discard_all(request)
            elif row.request_id in result.errors:
                self.cache_manager.discard_computed(request)

    def note_seconds(self, plan: SchedulerOutput, seconds: float) -> None:
        """Record how long a step took that began when the step before it ended."""
        if self.drafts is not None and plan.rows and plan.num_tokens == sum(1 + row.num_drafts for row in plan.rows):
            self.drafts.note_seconds(len(plan.rows), plan.num_drafts, seconds)
        if plan.num_tokens > len(plan.rows):  # decodes alone take as long with few
            self.cache_manager.loading.note_step(plan.num_tokens, seconds)

    def wait_for_blocks(self, seconds: float) -> None:
        """Wait, for at most so long, for blocks that tiers load. Call it when there is nothing else to do."""
        self.cache_manager.loading.wait(seconds)

    def wait_for_stores(self, num_tokens: int) -> None:
        """See CacheTier."""
        self.cache_manager.loading.wait_for_stores(num_tokens)

    # Operations on the whole state

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_external: bool = False) -> bool:
        """Discard all cached content, e.g. after a change of weights. Returns False and changes nothing while blocks are used.

        With `reset_running_requests` it always succeeds: it first preempts all running requests; the tokens of steps in flight
        are dropped and sampled again. reset_external: see CacheTier.forget.
        """
        if reset_running_requests:
            while self.running:
                self._preempt(self.running.pop())
            for request in self.waiting:
                self.cache_manager.loading.end(request)
            self._in_flight.clear()
            for request in (*self.waiting, *self.held.values()):
                request.num_output_placeholders = request.num_drafts_in_flight = 0
        was_reset = self.cache_manager.reset_prefix_cache()
        if was_reset:
            self._forget(stored=True, external=reset_external)
        return was_reset

    def discard(self, names: Sequence[bytes]) -> None:
        """Find these contents no more: another engine computed them wrongly. Requests that wait for more blocks do without them."""
        self.cache_manager.discard(names)

    def _forget(self, *, stored: bool, external: bool = False) -> None:
        """Drop what devices hold in addition to the blocks of requests. stored, external: see CacheTier."""
        for room in self.chunk_rooms:
            room.forget()
        self.cache_manager.loading.forget(stored=stored, external=external)

    # Updates of the prefix cache, for API servers that choose among several engines

    def publish_cache_events(self) -> None:
        """Collect changes of the prefix cache from now on. The first update is a snapshot. None follow from an engine that passes states by
        row on, or gets some: there blocks alone do not say what a prompt costs."""
        if self._passes_states:
            return
        pool = self.cache_manager.pool
        tiers = self.cache_manager.loading.tiers
        pool.events = EventCollector(pool.cached_hashes(), PoolAndHost(pool, tiers) if tiers else None)

    def take_cache_events(self) -> CacheEvents | None:
        """The changes since the last call; None if there are none or `publish_cache_events` was not called."""
        events = self.cache_manager.pool.events
        return None if events is None else events.take()

    def cache_snapshot(self) -> CacheEvents:
        """Everything that can be found in the prefix cache. Updates that are taken later may follow it."""
        pool = self.cache_manager.pool
        stored = () if self._passes_states else pool.cached_hashes()
        host = None if pool.events is None else pool.events.with_host
        return CacheEvents(cleared=True, stored=keys_of(stored), with_host=None if host is None else host.snapshot())

    @property
    def _passes_states(self) -> bool:
        return self._states is not None and self.cache_manager.loading.has_tiers

    def start_over(self) -> None:
        """Return every request to the waiting queue, with no blocks, no computed tokens and no step in flight.

        For use after a failure that may have left inconsistent state: relies only on the requests themselves. Keeps their
        tokens so far. The runner's rows become invalid.
        """
        publishes_events = self.cache_manager.pool.events is not None
        self.cache_manager = self._new_cache_manager()
        if publishes_events:
            self.publish_cache_events()
        self.waiting = make_waiting_queue(self.options.scheduling_policy)
        self.running = []
        self._in_flight.clear()
        self._finished_ids.clear()
        self._preempted_ids.clear()
        self._refusal = None
        for request in self.requests.values():  # in order of arrival, which is also the order of admission
            if request.status == RequestStatus.RUNNING:
                request.num_preemptions += 1
                self._totals.num_preemptions += 1
            request.status = request.waiting_status
            request.num_computed_tokens = request.num_output_placeholders = request.num_drafts_in_flight = 0
            self._release(request)
            if request.request_id not in self.held:
                self.waiting.add(request)
        self._forget(stored=False)

    def limit_steps(self, divisor: int) -> None:
        """See `StepLimits.divide`."""
        self.limits.divide(divisor)

    def limit_tokens(self, most: int | None) -> None:
        """See StepLimits."""
        self.limits.limit_tokens(most)

    @property
    def num_queued_tokens(self) -> int:
        """See `SchedulerStats`."""
        left = [request.num_prompt_tokens - request.num_computed_tokens for request in self.running]
        return (
            self.waiting.num_prompt_tokens
            + sum([count for count in left if count > 0])
            + self._in_flight.num_prompt_tokens // 2
        )

    def stats(self) -> SchedulerStats:
        """The load now and the totals so far."""
        pool = self.cache_manager.pool
        stats = SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            cache_usage=pool.usage,
            num_cache_blocks=pool.num_usable_blocks,
            max_concurrency=pool.num_usable_blocks / self.cache_manager.num_blocks_for(self.max_model_len),
            num_queued_tokens=self.num_queued_tokens,
            **self._totals.stats(self.drafts),
        )
        for room in self.chunk_rooms:
            room.add_stats(stats)
        self.cache_manager.loading.add_stats(stats)
        return stats

    def check_integrity(self) -> None:
        """Raise AssertionError if requests, queues, counts and blocks disagree."""
        check_integrity(self, self._in_flight.steps())


def _withdraw(shares: list[Share], request: Request) -> int:
    """Remove a request's share, if it has one, from the step. Returns its number of tokens."""
    for index, (sharer, _, row) in enumerate(shares):
        if sharer is request:
            del shares[index]
            return row.num_tokens
    return 0


def _may_be_masked(request: Request) -> bool:
    """Whether a mask may be needed for the token that the request samples next."""
    thinking = request.thinking
    return request.matcher is not None or (thinking is not None and thinking.may_force(request.num_output_placeholders))

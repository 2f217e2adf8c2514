"""Random loads against the fake runner: every request ends with exactly its tokens, and everything stays consistent.

The fake runner checks in each step that every position read holds the keys of the right tokens.
"""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.cache_events import KEY_BYTES, CacheEvents
from jaxllm.cache_policy import FULL, CachePolicy, WindowPolicy, num_blocks_for
from jaxllm.data_parallel.scheduler import RanksScheduler
from jaxllm.device_ops import LoadState, StoreState
from jaxllm.kv_events.messages import Batch, Group
from jaxllm.kv_events.recorder import Recorder
from jaxllm.outputs import EngineCoreOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.request import FinishReason, PromptItem, Request, RequestStatus
from jaxllm.scheduler.block_hash import HASH_BYTES
from jaxllm.scheduler.cache_tier import CacheTier
from jaxllm.scheduler.prefix_states import is_of_states
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler.scheduling_policies import Turns
from jaxllm.scheduler_output import SchedulerOutput
from tests.helpers.fake_items import PLACEHOLDER, effective_prompt, encoder, image
from tests.helpers.fake_runner import FakeEngine, FakeRanksEngine, RandomDrafts, digests, oracle_tokens
from tests.helpers.fake_tier import FakeTier
from tests.helpers.kv_subscriber import Subscriber
from tests.helpers.scheduling import make_request, make_scheduler
from tests.helpers.slow import slow_except

VOCAB, END, STOP = 12, 3, 5


@dataclass
class _Reader:
    """A reader that knows a prefix cache by its events alone."""

    known: set[bytes] = field(default_factory=set)
    with_host: "_Reader | None" = None
    """A reader of what can be found there or in host memory."""

    def read(self, events: CacheEvents) -> None:
        if events.with_host is not None:
            self.with_host = self.with_host or _Reader()
            self.with_host.read(events.with_host)
        assert not len(events.stored) % KEY_BYTES and not len(events.removed) % KEY_BYTES
        stored, removed = (_cut(keys) for keys in (events.stored, events.removed))
        assert not stored & removed
        self.known = (set() if events.cleared else self.known) - removed | stored


class _Routers:
    """Subscribers to a scheduler's events. They miss batches at times, as their queue is short."""

    def __init__(self, rng: random.Random, policies: Sequence[CachePolicy], *, has_tiers: bool):
        groups = [Group("any", getattr(policy, "window", None)) for policy in policies]
        self.subscriber = Subscriber(block_size=4, groups=groups)
        self.subscriber.may_have_salts = True
        self.recorder = Recorder(self, 4, has_tiers=has_tiers)
        self.scheduler: Scheduler | None = None
        self._rng, self._queue = rng, list[Batch]()

    def has_room(self) -> bool:
        return len(self._queue) < 2

    def put(self, batch: Batch) -> bool:
        if not self.has_room():
            return False
        self._queue.append(batch)
        return True

    def has_lost(self) -> bool:
        return False

    def check(self, tiers: Sequence[CacheTier]) -> None:
        """Publish; now and then read all, and compare."""
        self.recorder.publish()
        if self._rng.random() < 0.5:
            return
        while self._queue:
            self.read()
        self.recorder.publish()
        while self._queue:
            self.read()
        assert self.scheduler is not None
        cached = self.scheduler.cache_manager.pool.cached_hashes()
        assert self.subscriber.on("GPU") == {name for name in cached if not is_of_states(name)}
        hosts: list[Any] = [tier for tier in tiers if not isinstance(tier, FakeTier)]
        assert self.subscriber.on("CPU") == {name for tier in hosts for name in tier.contents.ready_names()}
        stores = [store for tier in hosts for store in tier._stores._stores if store.tells]
        assert self.subscriber.on("STORAGE") == {name for store in stores for name in store.names}

    def read(self) -> None:
        self.subscriber.read(self._queue.pop(0))


def _cut(keys: bytes) -> set[bytes]:
    return {keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)}


@dataclass
class _Load:
    """A random series of events, with what each request has received."""

    engine: FakeEngine
    rng: random.Random
    max_model_len: int
    reuse_ids: bool
    live: dict[str, Request] = field(default_factory=dict)
    received: dict[str, list[int]] = field(default_factory=dict)
    num_ended: int = 0
    num_made: int = 0
    share_again: float = 0.0
    """Part of the prompts that were asked before."""
    num_prompts: int = 1_000_000
    """So many of the latest prompts are asked again."""
    share_start_over: float = 0.0
    """See `run_load`."""
    asked: list[list[int]] = field(default_factory=list)
    max_item_tokens: int = 0
    with_items: list[tuple[list[int], tuple[PromptItem, ...]]] = field(default_factory=list)
    """Prompts so far that have items."""
    readers: list[_Reader] = field(default_factory=list)
    """Readers from the start; more come later."""
    check_routers: Callable[[], None] = lambda: None

    def event(self) -> None:
        if self.share_start_over and self.rng.random() < self.share_start_over:
            self.engine.start_over()
        kind = self.rng.random()
        if kind < 0.25:
            self.add()
        elif kind < 0.29 and self.live:
            chosen = self.rng.sample(sorted(self.live), min(len(self.live), self.rng.randint(1, 3)))
            assert sorted(self.engine.scheduler.finish_requests(chosen, RequestStatus.FINISHED_ABORTED)) == sorted(chosen)
            for request_id in chosen:
                self.end(request_id)
        elif kind < 0.30:
            self.engine.scheduler.reset_prefix_cache(reset_running_requests=self.rng.random() < 0.5)
        elif kind < 0.32 and self.engine.in_flight and self.engine.in_flight[0][0].rows:
            self.fail_one()
        elif kind < 0.325:
            self.hold_some()
        elif kind < 0.33:
            self.engine.start_over()
            self.engine.scheduler.limit_steps(self.rng.choice([1, 2, 64]))
        elif kind < 0.7:
            self.engine.dispatch()
        else:
            self.engine.dispatch()
            self.collect()
        if kind < 0.33:  # the engine checks whatever it plans and collects
            self.engine.scheduler.check_integrity()
        if self.readers:
            self.publish()
        self.check_routers()

    def publish(self) -> None:
        """The readers know what can be found, even if they read seldom or begin in the middle."""
        scheduler, rng = self.engine.scheduler, self.rng
        if rng.random() < 0.1:
            self.readers.append(_Reader())
            self.readers[-1].read(scheduler.cache_snapshot())
        if rng.random() < 0.5:
            events = scheduler.take_cache_events()
            for reader in self.readers if events else ():
                reader.read(events)
            manager = scheduler.cache_manager
            # The hashes of groups after the first are longer.
            found = {name[:KEY_BYTES] for name in manager.pool.cached_hashes() if len(name) == HASH_BYTES}
            assert all(reader.known == found for reader in self.readers)
            if tiers := manager.loading.tiers:
                in_host = {name[:KEY_BYTES] for tier in tiers for name in tier.host_names() if len(name) == HASH_BYTES}
                assert all(reader.with_host is not None for reader in self.readers)
                assert all(reader.with_host.known == found | in_host for reader in self.readers)

    def add(self) -> None:
        rng = self.rng
        base = [rng.randrange(2)] * rng.choice([0, 4, 8, 9, 16, 24])
        prompt = base + [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 3, 12]))] or [1]
        if self.share_again and self.asked and rng.random() < self.share_again:
            prompt = rng.choice(self.asked[-self.num_prompts :]).copy()
        self.asked.append(prompt.copy())
        self.num_made += 1
        request_id = f"r{rng.randrange(6)}" if self.reuse_ids else f"r{self.num_made}"
        if request_id in self.live:
            return
        pooling = PoolingParams(skip_reading_prefix_cache=rng.random() < 0.3) if rng.random() < 0.2 else None
        if pooling is not None and rng.random() < 0.3:
            prompt = (prompt * self.max_model_len)[: self.max_model_len]
        items = self.items(prompt)
        if self.with_items and rng.random() < 0.4:
            prompt, items = rng.choice(self.with_items)  # again, so that cached prefixes end inside items
        elif items and len(prompt) < self.max_model_len:
            self.with_items.append((prompt, items))
        request = make_request(
            request_id,
            prompt,
            items=items,
            pooling=pooling,
            eos=(END, STOP) if rng.random() < 0.7 else (),
            max_tokens=rng.choice([1, 2, 7, 20]),
            priority=rng.randrange(3),
            arrival=rng.randrange(3),
            cache_salt=rng.choice([None, None, None, "x"]),
            prompt_logprobs=rng.choice([None, None, None, 0]),
            client=rng.choice("ab"),
        )
        for runner in self.engine.runners:
            if items:
                runner.device.requests[request_id] = request
            else:
                runner.device.requests.pop(request_id, None)
        self.engine.scheduler.add_request(request)
        self.live[request_id], self.received[request_id] = request, []

    def items(self, prompt: list[int]) -> tuple[PromptItem, ...]:
        """Put items into a prompt, as far as an encoder computes some: a few that are often equal."""
        rng, found, start = self.rng, list[PromptItem](), 0
        while self.max_item_tokens and rng.random() < 0.6:
            start += rng.choice([0, 0, 1, 3, 4, 9])
            count = found[0].num_tokens if found and rng.random() < 0.3 else rng.randint(1, self.max_item_tokens)
            if start + count > len(prompt):
                break
            prompt[start : start + count] = [PLACEHOLDER] * count
            found.append(image(bytes([rng.randrange(3)]), start, count, has_breaks=rng.random() < 0.2))
            start += count
        return tuple(found)

    def prompt_of(self, request: Request) -> list[int]:
        return effective_prompt(request.spec.prompt_token_ids, request.spec.items)

    def hold_some(self) -> None:
        """Hold some requests, and release others."""
        names = [*self.live, "unknown"]
        scheduler = self.engine.scheduler
        for call in (scheduler.hold_requests, scheduler.release_requests):
            call(self.rng.sample(names, self.rng.randint(0, min(3, len(names)))))

    def fail_one(self) -> None:
        plan, result = self.engine.in_flight[0]
        request_id = self.rng.choice(list(plan.num_scheduled_tokens))
        sampled = {key: tokens for key, tokens in result.sampled_token_ids.items() if key != request_id}
        errors = {**result.errors, request_id: "it broke"}
        self.engine.in_flight[0] = (plan, replace(result, sampled_token_ids=sampled, errors=errors))

    def collect(self) -> None:
        for output in self.engine.collect():
            request_id = output.request_id
            if self.live[request_id].pooling_params is not None:
                self.check_vector(request_id, output)
                continue
            self.received[request_id] += output.new_token_ids
            num_new, has_failed = len(output.new_token_ids), output.finish_reason == FinishReason.ERROR
            assert (num_new == 0) == has_failed and (num_new <= 1 or self.engine.scheduler.drafts is not None)
            if output.finish_reason not in (None, FinishReason.ERROR):
                self.check_whole(request_id, output.finish_reason)
            if output.finish_reason is not None:
                self.end(request_id)

    def check_vector(self, request_id: str, output: EngineCoreOutput) -> None:
        assert output.new_token_ids == [] and output.finish_reason in (FinishReason.STOP, FinishReason.ERROR)
        assert (output.pooled is None) == (output.finish_reason == FinishReason.ERROR)
        if output.pooled is not None:
            assert output.pooled.tolist() == digests(self.prompt_of(self.live[request_id]))
        self.end(request_id)

    def check_whole(self, request_id: str, reason: FinishReason) -> None:
        request = self.live[request_id]
        ends = frozenset((END, STOP)) if request.eos_token_id is not None else frozenset()
        room = self.max_model_len - request.num_prompt_tokens
        limit = min(request.sampling_params.max_tokens, room)
        expected = oracle_tokens(self.prompt_of(request), limit, VOCAB, ends)
        assert self.received[request_id] == expected == request.output_token_ids
        assert reason == (FinishReason.STOP if expected[-1] in ends else FinishReason.LENGTH)

    @property
    def is_loading(self) -> bool:
        return any(scheduler.cache_manager.loading.holders() for scheduler in self.engine.schedulers)

    def end(self, request_id: str) -> None:
        del self.live[request_id]
        self.num_ended += 1

    def finish(self) -> None:
        self.engine.scheduler.release_requests(list(self.live))
        for _ in range(3000):
            if not self.live:
                break
            self.engine.dispatch()
            assert self.engine.in_flight or self.is_loading, "requests wait and nothing runs"
            self.collect()
        assert not self.live, "a request never ends"
        for _ in range(3000):
            if not self.engine.in_flight and not self.engine.scheduler.has_requests():
                break
            self.engine.dispatch()
            assert self.engine.collect() == []


def watch(scheduler: Scheduler, *, may_overtake: bool) -> None:
    """Fail where a request overtakes another, or where one that would fit is not looked at."""
    schedule, still_refused, hold = scheduler.schedule, scheduler._still_refused, scheduler.hold_requests
    moved: set[str] = set()
    """Requests that were held, and lost their place in the order of arrival."""

    def place(request: Request) -> Any:
        by_priority = scheduler.options.scheduling_policy == "priority"
        return request.sort_key() if by_priority else list(scheduler.requests).index(request.request_id)

    def places(requests: Iterable[Request], client: str) -> list[Any]:
        return [
            place(request) for request in requests if client in ("", request.options.client) and request.request_id not in moved
        ]

    def watched_schedule() -> SchedulerOutput:
        plan = schedule()
        for client in "ab" if scheduler.options.scheduling_policy == "fair" else [""]:
            admitted = places((scheduler.requests[data.request_id] for data in plan.new_requests), client)
            waiting = places(scheduler.waiting, client)
            assert may_overtake or not admitted or not waiting or max(admitted) < min(waiting), "a request was overtaken"
        return plan

    def watched_hold(request_ids: Iterable[str]) -> None:
        moved.update(request_ids)
        hold(request_ids)

    def watched_refusal(request: Request, num_spare_blocks: int) -> bool:
        refused = still_refused(request, num_spare_blocks)
        # Where old blocks are freed while a request runs, a waiting one may become smaller without being looked at.
        if refused and scheduler.cache_manager.policies == (FULL,):
            prefix = scheduler.cache_manager.get_computed_blocks(request)
            num_reserved = scheduler.cache_manager.pool.num_free_blocks - num_spare_blocks
            options = {"num_reserved_blocks": num_reserved, "whole_sequence_must_fit": True}
            assert scheduler.cache_manager.allocate_slots(request, 1, prefix, **options) is None, "a request that fits waits"
        return refused

    scheduler.schedule, scheduler._still_refused, scheduler.hold_requests = watched_schedule, watched_refusal, watched_hold


POLICIES = [(FULL,), (WindowPolicy(8),), (FULL, WindowPolicy(6)), (FULL, *[WindowPolicy(9)] * 3, WindowPolicy(1))]
"""Full attention, windows, and both."""


def run_load(
    *,
    seed: int,
    policies: Sequence[CachePolicy],
    depth: int,
    num_blocks: int,
    reuse_ids: bool,
    drafts: tuple[int, int, float] | None,
    num_stages: int,
    item_sizes: tuple[int, int, int] | None = None,
    decode_step: int = 0,
    whole_items: bool = False,
    tiers: tuple[dict[str, Any], ...] = (),
    num_ranks: int = 1,
    make_tier: Callable[[random.Random], tuple[CacheTier, Any]] | None = None,
    share_again: float = 0.0,
    num_prompts: int = 1_000_000,
    num_events: int = 80,
    num_state_blocks: int = 0,
    share_rowless: float = 0.0,
    share_start_over: float = 0.0,
    **options: Any,
) -> int:
    """Run a random load to its end. Returns the number of steps.

    num_blocks: for each group; 0: as few as possible. drafts: most of a row, how many positions behind them a drafter writes to, and
    how often one is right. item_sizes: most embeddings of an item, most that a step encodes, pages. decode_step: most that a step encodes
    in which requests decode; 0: as in others. whole_items: a step must compute all that is left of an item. tiers: arguments of fake
    tiers. num_prompts: see `_Load`. num_ranks: data-parallel ranks. make_tier: makes a further tier, and what runs its
    operations on the fake device. share_again: part of the prompts that were asked before. num_state_blocks: blocks of a row's state;
    0: there are no states. share_rowless: part of the admissions whose request gets no row. share_start_over: part of the events
    before which the engine starts over, in addition to those that do.
    """
    max_model_len = 46
    control = None
    if drafts is not None and num_stages == 1:
        num_drafts, num_lookahead, share_right = drafts
        rng = random.Random(seed + 1)
        control = RandomDrafts(
            rng, num_drafts=num_drafts, num_lookahead=num_lookahead, share_right=share_right, fits_rows=seed % 2 == 1
        )
    options["max_num_prefill_tokens"] = options["max_num_batched_tokens"] + options.pop("more_for_prompts")
    least = num_blocks_for(policies, max_model_len, 4, options["max_num_prefill_tokens"])
    num_blocks = 1 + ((num_blocks - 1) * len(policies) if num_blocks else least)
    tier_rng = random.Random(seed + 2)
    all_tiers: list[CacheTier] = [FakeTier(tier_rng, **arguments) for arguments in tiers]
    copies: Any = None
    if make_tier is not None:
        tier, copies = make_tier(tier_rng)
        all_tiers.append(tier)
    max_item_tokens, max_step_embeddings, num_pages = item_sizes or (0, 0, 0)
    if whole_items:
        max_item_tokens = min(options["max_num_batched_tokens"], max_item_tokens)
    whole_tokens = max_item_tokens if whole_items else 0
    room_sizes = {"item": max_item_tokens, "step": max_step_embeddings, "pages": num_pages, "whole_tokens": whole_tokens}
    room_sizes["decode_step"] = decode_step

    routers: list[_Routers] = []
    passes_states = bool(num_state_blocks and all_tiers)

    def new_scheduler() -> Scheduler:
        routers.append(_Routers(random.Random(seed + 3), policies, has_tiers=bool(all_tiers)))
        for each in all_tiers:
            each.listener = routers[-1].recorder.note_tier
        routers[-1].scheduler = scheduler = make_scheduler(
            num_blocks=num_blocks,
            block_size=4,
            max_model_len=max_model_len,
            async_scheduling=depth > 1,
            long_prefill_token_threshold_adaptive=seed % 2 == 0,
            policies=policies,
            drafts=control,
            num_stages=num_stages,
            tiers=all_tiers,
            rooms=() if item_sizes is None else (encoder(**room_sizes),),
            observer=None if passes_states else routers[-1].recorder,
            num_state_blocks=num_state_blocks,
            **options,
        )
        return scheduler

    depth += num_stages - 1
    if num_ranks == 1:
        engine = FakeEngine(new_scheduler(), vocab_size=VOCAB, depth=depth)
        watch(engine.scheduler, may_overtake=item_sizes is not None or bool(all_tiers))
    else:
        engine = FakeRanksEngine(RanksScheduler(new_scheduler, num_ranks), vocab_size=VOCAB, depth=depth)
    scheduler = engine.scheduler
    for each in engine.schedulers if options["scheduling_policy"] == "fair" else ():
        each._turns = Turns(patience_seconds=0)
    load = _Load(engine, random.Random(seed), max_model_len, reuse_ids)
    load.max_item_tokens, load.share_again, load.num_prompts = max_item_tokens, share_again, num_prompts
    load.share_start_over = share_start_over
    for runner in engine.runners:
        runner.device.whole_items, runner.device.copies = whole_items, copies
        if share_rowless:
            runner.gets_no_row = lambda request_id: load.rng.random() < share_rowless
    if seed % 3 and num_ranks == 1 and not passes_states:
        scheduler.publish_cache_events()
        load.readers.append(_Reader())
    else:
        assert scheduler.take_cache_events() is None
    if not passes_states:
        load.check_routers = lambda: [each.check(all_tiers) for each in routers]
    for _ in range(num_events):
        load.event()
    load.finish()
    assert not scheduler.has_requests()
    for each in engine.schedulers:
        assert not each.running and not len(each.waiting)
        assert each.cache_manager.pool.num_free_blocks == num_blocks - 1
        assert each.stats().num_used_item_pages == 0
    assert scheduler.reset_prefix_cache()
    return len(engine.plans)


CHOICES: dict[str, list[Any]] = {
    "policies": [(FULL,), *POLICIES],
    "scheduling_policy": ["fcfs", "priority", "fair"],
    "depth": [1, 2, 3],
    "num_stages": [1, 1, 2, 4],
    "drafts": [None, (1, 0, 0.5), (3, 0, 0.8), (3, 2, 0.7), (5, 4, 0.5)],
    "caching": [True, False],
    "num_blocks": [0, 13, 16, 30, 100],
    "max_num_seqs": [1, 3, 8],
    "max_num_batched_tokens": [1, 5, 16, 64],
    "more_for_prompts": [0, 11],
    "long_prefill_token_threshold": [0, 0, 4],
    "watermark": [0.0, 0.1],
    "scheduler_reserve_full_isl": [True, False],
    "reuse_ids": [True, False],
    "item_sizes": [None, None, (4, 4, 2), (9, 9, 3), (9, 5, 4), (30, 16, 8), (30, 64, 20)],
    "decode_step": [0, 1, 3, 7],
    "whole_items": [False, True],
    "share_rowless": [0.0, 0.0, 0.15],
    "tiers": [
        (),
        ({},),
        ({"max_steps": 8, "share_bad": 0.2, "num_cold": 9, "copy_blocks": 1},),
        ({"capacity": 5}, {"max_steps": 0, "share_bad": 0.1}),
    ],
}


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), **{name: st.sampled_from(values) for name, values in CHOICES.items()})
def test_random_schedules(**load):
    run_load(**load)


TIMES = int(os.environ.get("RANDOM_SCHEDULES", "1"))
"""How many times as many random schedules as in CI."""


@pytest.mark.slow
@pytest.mark.parametrize("policies", POLICIES[1:], ids=str)
def test_many_random_schedules_with_windows(policies):
    rng = random.Random(1)
    num_steps = 0
    while num_steps < 1_500 * TIMES:
        chosen = {name: rng.choice(values) for name, values in CHOICES.items()}
        num_steps += run_load(**{**chosen, "seed": rng.randrange(2**32), "policies": policies})


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "least"), [(1, 8_000), (2, 3_000)])
def test_many_random_schedules_with_items(num_ranks, least):
    rng = random.Random(num_ranks)
    num_steps = 0
    while num_steps < least * TIMES:
        chosen = {name: rng.choice(values) for name, values in CHOICES.items()}
        chosen["item_sizes"] = rng.choice([sizes for sizes in CHOICES["item_sizes"] if sizes])
        if num_ranks > 1:
            chosen |= {"num_ranks": num_ranks, "num_stages": 1, "tiers": ()}
        num_steps += run_load(**{**chosen, "seed": rng.randrange(2**32)})


@pytest.mark.parametrize("least", slow_except([1_000], [1_000, 5_000]))
def test_random_schedules_with_states_by_row(least, monkeypatch):
    """Each row has the state of its tokens alone, whether computed or loaded."""
    rng, ops, plan = random.Random(least), Counter(), Scheduler._ops

    def count(scheduler, shares):
        found = plan(scheduler, shares)
        ops.update(type(op) for op in found)
        return found

    monkeypatch.setattr(Scheduler, "_ops", count)
    num_steps = 0
    while num_steps < least * TIMES:
        chosen = {name: rng.choice(values) for name, values in CHOICES.items()}
        chosen |= {"num_stages": 1, "tiers": (), "share_again": 0.8, "caching": rng.random() < 0.8}
        chosen["prefix_cache_retention_interval"] = rng.choice([0, 0, 4, 10])
        num_steps += run_load(**chosen, seed=rng.randrange(2**32), num_state_blocks=rng.choice([1, 2, 5]), num_events=200)
    assert min(ops[StoreState], ops[LoadState]) > num_steps // 60, ops

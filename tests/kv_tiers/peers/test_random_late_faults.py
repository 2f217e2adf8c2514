"""Random loads of a decode engine: contents come one by one while a prefill engine computes them. Some are damaged on the way, some turn
out to be NaN after they were loaded, some never come, and at times the prefill engine ends before it can tell. No token is wrong."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from jaxllm.kv_tiers.host_tier import HostTier
from jaxllm.request import ErrorKind, Request
from jaxllm.scheduler.kv_cache_manager import KVCacheManager
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler_output import NOT_FINITE, ModelRunnerOutput, SchedulerOutput
from tests.helpers import fake_runner
from tests.helpers.fake_copies import AlwaysWorth, FakeCopies
from tests.helpers.fake_runner import MISLED, FakeRunner, digests
from tests.helpers.slow import slow_except
from tests.kv_tiers.fake_store import FakeStore
from tests.kv_tiers.test_random_tiers import HOST_CHOICES, OTHERS, take_sizes
from tests.scheduler import test_random_schedules

BLOCK = 4
NAN = MISLED
"""Rows that read it write the same."""
UNUSED = ("item_sizes", "share_rowless", "writes_at_once")
CHOICES = {name: values for name, values in {**OTHERS, **HOST_CHOICES}.items() if name not in UNUSED}
CHOICES |= {"num_blocks": [13, 30, 60], "num_slots": [4, 15, 60]}
CHOICES["stores"] = [{}, {"lends": True}, {"share_lost": 0.1, "share_damaged": 0.1}, {"lends": True, "share_damaged": 0.2}]


@dataclass(eq=False)
class Lease:
    """The contents of a prompt."""

    coming: dict[bytes, Any]
    """Contents that are still being computed, in order."""
    is_nan: bool
    stored: list[bytes] = field(default_factory=list)


class Prefills(FakeStore):
    """Prefill engines as a decode engine sees them. They learn that a prompt is NaN with its last content."""

    def __init__(self, rng: random.Random, slots: list[Any], **arguments: Any):
        super().__init__(rng, slots, writes=False, **arguments)
        self.leases: list[Lease] = []
        self.told: set[bytes] = set()
        """Names of contents that were withdrawn as wrong. Not checked once a prefill engine has ended first: readers write NaN then."""
        self.counts: Counter[str] = Counter()

    def open(self, request: Request, manager: KVCacheManager) -> None:
        """A prefill engine computes a prompt, unless one has a part of it already."""
        names, tokens = manager.names_of_prompt(request), digests(request.spec.prompt_token_ids)
        if any(name in lease.coming or name in lease.stored for lease in self.leases for name in names):
            return
        place = {
            name + suffix: (index * BLOCK, group)
            for index, name in enumerate(request.block_hashes)
            for group, suffix in enumerate(manager._suffixes)
        }
        lease = Lease({}, is_nan=self.rng.random() < 0.4)
        for name in names:
            start, group = place[name]
            block = [NAN if lease.is_nan else (group, token) for token in tokens[start : start + BLOCK]]
            lease.coming[name] = block, block
        self.leases.append(lease)
        self.told.difference_update(names)

    def awaited(self, names: Any) -> list[bytes]:
        coming = {name for lease in self.leases for name in lease.coming}
        return [name for name in names if name in coming and name not in self.contents]

    def grow(self, scheduler: Scheduler) -> None:
        """Between two steps: a content of each lease may come, all may be withdrawn as wrong, or the prefill engine may end."""
        for lease in list(self.leases):
            chance = self.rng.random()
            if chance < 0.5 and (len(lease.coming) > 1 or (lease.coming and not lease.is_nan)):
                name = next(iter(lease.coming))
                self.contents[name] = lease.coming.pop(name)
                lease.stored.append(name)
            elif chance < 0.6 and lease.is_nan and len(lease.coming) == 1:
                self.counts["told"] += bool(lease.stored)
                self._drop(lease)
                scheduler.discard(lease.stored)
                self.told.update(lease.stored)
            elif chance < (0.56 if lease.coming else 0.6):
                self.counts["untold"] += lease.is_nan and bool(lease.stored)
                self._drop(lease)

    def _drop(self, lease: Lease) -> None:
        self.leases.remove(lease)
        for name in lease.stored:
            self.contents.pop(name, None)

    def reset(self, *, external: bool) -> None:
        super().reset(external=external)
        self.leases.clear()


class NanRunner(FakeRunner):
    """A row that reads NaN draws NaN, and leaves NaN behind."""

    def _check_reads(self, row: Any, count: int) -> None:
        if not row.is_misled:
            slots = (self._slot(row, group, at) for group, at in self._read_by(row, count))
            row.is_misled = any(block[offset] == NAN for block, offset in slots)
        if not row.is_misled:
            super()._check_reads(row, count)

    def _read_by(self, row: Any, count: int) -> list[tuple[int, int]]:
        """The groups and positions that the next tokens of a row read."""
        windows = [getattr(policy, "window", row.num_computed + 1) for policy in self.policies]
        firsts = [max(0, row.num_computed + 1 - window) for window in windows]
        return [(group, at) for group, first in enumerate(firsts) for at in range(first, row.num_computed + count)]

    def check_block(self, row: Any, index: int) -> None:
        if not row.is_misled:
            super().check_block(row, index)

    def dispatch(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        result = super().dispatch(plan)
        nan = {name for name in (*result.sampled_token_ids, *result.pooled) if self.rows[name].is_misled}
        drawn = {name: [NOT_FINITE] if name in nan else tokens for name, tokens in result.sampled_token_ids.items()}
        pooled = {name: vector for name, vector in result.pooled.items() if name not in nan}
        return replace(result, sampled_token_ids=drawn, pooled=pooled, not_finite=nan)


def run(seed: int, chosen: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often what happened."""
    sizes, of_store, of_tier = take_sizes(chosen)
    stores: list[Prefills] = []
    made: list[Request] = []

    @dataclass
    class Load(test_random_schedules._Load):
        def __post_init__(self) -> None:
            dispatch = self.engine.dispatch

            def grow_and_dispatch() -> None:
                scheduler, store = self.engine.scheduler, stores[0]
                store.grow(scheduler)
                told = () if store.counts["untold"] else store.told
                blocks = filter(None, map(scheduler.cache_manager.pool.find, told))
                assert not any(NAN in self.engine.runner.memory[each.block_id] for each in blocks), "what is wrong is found"
                dispatch()

            self.engine.dispatch = grow_and_dispatch  # type: ignore[method-assign]

        def event(self) -> None:
            self.check_routers = lambda: None  # which know no tokens of what other engines computed
            super().event()

        def add(self) -> None:
            before = set(self.live)
            super().add()
            for name in self.live.keys() - before:
                made.append(self.live[name])
                if self.rng.random() < 0.7:
                    stores[0].open(made[-1], self.engine.scheduler.cache_manager)

    def make_tier(rng: random.Random) -> tuple[HostTier, FakeCopies]:
        copies = FakeCopies(rng, **sizes)
        stores.append(Prefills(rng, copies.slots, **of_store))
        return HostTier(copies, AlwaysWorth(), **of_tier, stores=stores), copies

    with monkeypatch.context() as patched:
        patched.setattr(test_random_schedules, "_Load", Load)
        patched.setattr(fake_runner, "FakeRunner", NanRunner)
        test_random_schedules.run_load(seed=seed, caching=True, make_tier=make_tier, num_events=200, **chosen)
    assert not stores[0].lent, "lent slots were not given back"
    stores[0].counts["second tries"] = sum(not request.may_try_again for request in made)
    stores[0].counts["failed"] = sum(request.error_kind is ErrorKind.NOT_FINITE for request in made)
    stores[0].counts["loaded"] = stores[0].num_read
    return stores[0].counts


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_loads", slow_except([5], [5, 40]))
def test_no_token_is_wrong(num_loads: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR")
    rng, counts = random.Random(1), Counter[str]()
    for _ in range(num_loads):
        chosen = {name: rng.choice(values) for name, values in CHOICES.items()}
        counts += run(rng.randrange(2**32), {**chosen, "tiers": (), "writes_at_once": False}, monkeypatch)
    assert min(counts[each] for each in ("loaded", "told", "untold")) > num_loads, counts
    assert counts["second tries"] >= num_loads // 16 and counts["failed"] <= num_loads // 20, counts

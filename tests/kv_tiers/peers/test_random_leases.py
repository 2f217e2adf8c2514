"""Random loads of a prefill engine: while a lease lasts, its contents stay in their slots, and they are those of its names."""

import random
from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest.mock import Mock

import pytest

from jaxllm.device_ops import AnyDeviceOp, LoadState, StoreState
from jaxllm.kv_tiers.contents import Content
from jaxllm.kv_tiers.peers.leases import Lease, Leases
from jaxllm.kv_tiers.peers.prefill_tier import PrefillTier
from jaxllm.request import Request
from jaxllm.scheduler.scheduler import Scheduler
from tests.helpers.fake_copies import AlwaysWorth, FakeCopies
from tests.helpers.slow import slow_except
from tests.kv_tiers.fake_store import FakeStore
from tests.kv_tiers.test_random_tiers import HOST_CHOICES, OTHERS, take_sizes
from tests.scheduler.test_random_schedules import run_load

CHOICES = {**OTHERS, **HOST_CHOICES}
NUM_EVENTS = 250


class CheckedTier(PrefillTier):
    """Renews, ends and reads leases at random, in the order of the step loop."""

    def __init__(self, rng: random.Random, copies: FakeCopies, **options: Any):
        self.clock = 0.0
        leases = Leases(max(1, copies.num_slots // 2), lambda: self.clock)
        no_server: Any = Mock()
        super().__init__(copies, AlwaysWorth(), leases, no_server, lambda *args: {"lease": args[1]}, **options)
        self.rng, self.copies = rng, copies
        self.found: dict[Content, Any] = {}
        """Data in the slots of held contents when these became ready."""
        self.readers: list[tuple[ExitStack, Lease]] = []
        self.num_held = self.num_lost = 0

    @property
    def is_keeping(self) -> bool:
        """No: a load ends with its requests."""
        return False

    def begin_step(self, step_id: int, done_step_id: int) -> Any:
        rng, leases = self.rng, self._leases
        self.clock += rng.choice([0.1, 1.0, 8.0])
        for lease in list(leases._leases.values()):
            match rng.randrange(8):
                case 0:
                    leases.end(lease.number)
                case 1:
                    leases.renew([lease.number], "connection")
                case 2 if not lease.is_over and self.clock < lease.expires_at:
                    stack = ExitStack()
                    slot_of = stack.enter_context(leases.reading(lease.number))
                    for name in lease.names:
                        slot = slot_of(name, 0.0)
                        assert slot is None or lease.slots[name] == slot
                    self.readers.append((stack, lease))
                case 3:
                    leases.leave("connection")
        while self.readers and rng.random() < 0.5:
            self.readers.pop()[0].close()
        self.check_slots()
        step = super().begin_step(step_id, done_step_id)
        self.check_slots()
        return step

    def check_slots(self) -> None:
        held = {content for contents in self._held.values() for content in contents}
        self.found = {content: found for content, found in self.found.items() if content in held}
        for content in held:
            self.num_held += content not in self.found
            found = self.found.setdefault(content, self.copies.slots[content.slot])
            assert found is self.copies.slots[content.slot], "the slot of a content that is kept was written"
            assert found[1] not in (["empty"], ["of a failed step"]), "a content is kept that was not stored"
        for lease, contents in self._held.items():
            assert {content.name: content.slot for content in contents}.items() >= lease.slots.items()
            assert lease.pending.isdisjoint(lease.slots)
            self.num_lost += len(set(lease.names) - lease.pending - lease.slots.keys())
        assert not any(lease.is_over and lease in self._pending and lease not in self._held for lease in self._pending)


def run(seed: int, chosen: dict[str, Any], **options: Any) -> CheckedTier:
    sizes, of_stores, of_tier = take_sizes(chosen)
    made: list[CheckedTier] = []

    def make_tier(rng: random.Random) -> tuple[PrefillTier, FakeCopies]:
        copies = FakeCopies(rng, **sizes)
        stores = [FakeStore(rng, copies.slots, **arguments) for arguments in of_stores]
        made.append(CheckedTier(rng, copies, **of_tier, stores=stores))
        return made[0], copies

    run_load(seed=seed, caching=True, make_tier=make_tier, num_events=NUM_EVENTS, **chosen, **options)
    return made[0]


@pytest.mark.parametrize("num_loads", slow_except([4], [4, 40]))
def test_random_schedules(num_loads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "is_kept_for_decode", property(lambda self: self.spec.prompt_token_ids[0] % 2 == 0))
    rng = random.Random(1)
    num_held = num_lost = 0
    for _ in range(num_loads):
        tier = run(rng.randrange(2**32), {name: rng.choice(values) for name, values in CHOICES.items()})
        num_held, num_lost = num_held + tier.num_held, num_lost + tier.num_lost
    assert num_held > 2 * num_loads and num_lost > num_loads // 20


@pytest.mark.slow
def test_random_schedules_with_states_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has the state of its tokens alone, whether computed or loaded."""
    num_loads = 40
    monkeypatch.setattr(Request, "is_kept_for_decode", property(lambda self: self.spec.prompt_token_ids[0] % 2 == 0))
    rng, ops = random.Random(4), Counter[str]()
    plan = Scheduler._ops
    monkeypatch.setattr(Scheduler, "_ops", lambda self, shares: count(ops, plan(self, shares)))
    num_held = num_written = 0
    for _ in range(num_loads):
        chosen = {name: rng.choice(values) for name, values in CHOICES.items()}
        tier = run(rng.randrange(2**32), {**chosen, "drafts": None, "num_stages": 1}, num_state_blocks=rng.choice([1, 2, 5]))
        num_held, num_written = num_held + tier.num_held, num_written + tier.copies.num_written
    assert num_held > 2 * num_loads and num_written > num_loads
    assert min(ops[kind.__name__] for kind in (StoreState, LoadState)) > num_loads


def count(counts: Counter[str], ops: tuple[AnyDeviceOp, ...]) -> tuple[AnyDeviceOp, ...]:
    counts.update(type(op).__name__ for op in ops)
    return ops

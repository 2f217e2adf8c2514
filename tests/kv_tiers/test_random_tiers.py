"""Random loads with a host tier. The fake runner checks in each step that every position read holds the keys of the right tokens."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.cache_policy import FULL
from jaxllm.kv_tiers.contents import PROTECTED_SHARES
from jaxllm.kv_tiers.host_tier import HostTier
from tests.helpers.fake_copies import AlwaysWorth, FakeCopies
from tests.kv_tiers.fake_store import FakeStore
from tests.scheduler.test_random_schedules import CHOICES, TIMES, run_load

HOST_CHOICES: dict[str, list[Any]] = {
    "num_slots": [1, 4, 15, 60],
    "num_staging": [1, 2, 7],
    "max_blocks": [1, 3, 8],
    "share_damaged": [0.0, 0.0, 0.2],
    "num_cold": [0, 3, 12],
    "protected_share": list(PROTECTED_SHARES.values()),
    "writes_at_once": [False, True],
    "stores": [
        (),
        ({},),
        ({"share_lost": 0.2, "share_damaged": 0.2, "capacity": 20},),
        ({"max_transfers": 1}, {"share_lost": 0.1}),
        ({"awaits": True, "lends": True, "share_lost": 0.1},),
        ({"awaits": True, "share_damaged": 0.1}, {"share_lost": 0.1}),
        ({"share_lost": 0.1}, {"lends": True, "share_lost": 0.2, "share_damaged": 0.2}),
    ],
}
NUM_EVENTS, NUM_STEPS = 250, 5_000
OTHERS = {name: values for name, values in CHOICES.items() if name not in ("caching", "tiers")}
OTHERS |= {"num_blocks": [0, 13, 16], "share_again": [0.5, 0.8]}
LOADS: dict[str, list[Any]] = {
    **OTHERS,
    **HOST_CHOICES,
    "num_prompts": [4, 12],
    "share_again": [0.8, 0.95],
    "max_num_batched_tokens": [5, 16, 64],
    "num_slots": [1, 4, 15, 15, 15, 60],
    "policies": [*OTHERS["policies"], (FULL,)],
    "item_sizes": [None, None, *OTHERS["item_sizes"]],
    "share_damaged": [0.0, 0.2],
    "share_start_over": [0.0, 0.02, 0.05],
}
"""Few prompts, which come back when the pool has lost them: it is small, and some engines fail often."""


def take_sizes(chosen: dict[str, Any]) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """Take out the arguments of copies, of stores behind host memory, and of a HostTier. Leaves those of `run_load`."""
    of_copies = {name: chosen.pop(name) for name in HOST_CHOICES}
    of_tier = {name: of_copies.pop(name) for name in ("num_cold", "protected_share", "writes_at_once")}
    chosen["kv_offloading_write"] = "full" if of_tier["writes_at_once"] else "cold"
    return of_copies, of_copies.pop("stores"), of_tier


def run(seed: int, chosen: dict[str, Any]) -> tuple[int, int, int]:
    """The number of steps, of blocks that came from the host, and of contents that stores behind it read."""
    sizes, of_stores, of_tier = take_sizes(chosen)
    made: list[FakeCopies] = []
    stores: list[FakeStore] = []

    def make_tier(rng: random.Random) -> tuple[HostTier, FakeCopies]:
        made.append(FakeCopies(rng, **sizes))
        stores.extend(FakeStore(rng, made[0].slots, **arguments) for arguments in of_stores)
        if stores:
            stores[0].tells = True
        return HostTier(made[0], AlwaysWorth(), **of_tier, stores=stores), made[0]

    num_steps = run_load(seed=seed, caching=True, make_tier=make_tier, num_events=NUM_EVENTS, **chosen)
    assert not any(store.lent for store in stores), "lent slots were not given back"
    return num_steps, made[0].num_written, sum(store.num_read for store in stores)


@settings(max_examples=12)
@given(seed=st.integers(0, 2**32), **{name: st.sampled_from(values) for name, values in LOADS.items()})
def test_random_schedules(seed: int, **chosen: Any) -> None:
    run(seed, chosen)


def many(rng: random.Random, least: int) -> Iterator[tuple[int, int, int]]:
    """What `run` returns, of random loads until there were so many steps."""
    num_steps = 0
    while num_steps < least:
        chosen = {name: rng.choice(values) for name, values in LOADS.items()}
        chosen["tiers"] = rng.choice([(), (), ({"capacity": 3},)])
        found = run(rng.randrange(2**32), chosen)
        num_steps += found[0]
        yield found


@pytest.mark.slow
def test_many_random_schedules() -> None:
    num_steps, num_written, num_read = map(sum, zip(*many(random.Random(1), NUM_STEPS * TIMES), strict=True))
    assert num_written > num_steps // 50, "hardly anything is loaded"
    assert num_read > num_steps // 100, "hardly anything comes from stores"

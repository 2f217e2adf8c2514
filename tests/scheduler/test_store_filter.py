"""Contents that are not offered to tiers: those that too few requests had, and those behind prompts."""

import random
from typing import Any

import pytest

from tests.helpers.fake_runner import FakeEngine
from tests.helpers.fake_tier import FakeTier
from tests.helpers.scheduling import make_request, make_scheduler


class Driven:
    """An engine of 20 blocks of 4 tokens with a tier, and the keys of an offloading connector."""

    def __init__(self, **extra: object):
        transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
        transfer |= {"kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20, **extra}}
        self.tier = FakeTier(random.Random(1), max_steps=0, num_cold=8)
        options = {"block_size": 4, "num_blocks": 21, "max_model_len": 48, "kv_transfer_config": transfer}
        self.engine = FakeEngine(make_scheduler(tiers=(self.tier,), **options), vocab_size=50)
        self.num_sent = 0

    def send(self, token: int, num_tokens: int = 33, max_tokens: int = 1, **options: Any) -> list[bytes]:
        """Compute a prompt of one token. Returns the names of its blocks and those of its answer."""
        return self.send_tokens([token] * num_tokens, max_tokens, **options)

    def send_tokens(self, tokens: list[int], max_tokens: int = 1, **options: Any) -> list[bytes]:
        self.num_sent += 1
        self.last = request = make_request(str(self.num_sent), tokens, max_tokens=max_tokens, **options)
        self.engine.scheduler.add_request(request)
        self.engine.run()
        return list(request.block_hashes)

    def evict(self) -> None:
        """Have other prompts take all blocks."""
        for token in range(5):
            self.send(1000 + 10 * self.num_sent + token, 44)
        self.engine.run()

    def has(self, names: list[bytes]) -> list[bool]:
        return [name in self.tier.contents or name in self.tier.stores for name in names]


def test_all_contents_are_offered_by_default() -> None:
    driven = Driven()
    names = driven.send(1)
    driven.evict()
    assert all(driven.has(names))


@pytest.mark.parametrize("is_found", [True, False], ids=["found on the devices", "computed again"])
def test_a_threshold_counts_requests_that_had_a_content(is_found: bool) -> None:
    driven = Driven(store_threshold=2)
    names = driven.send(1)
    if not is_found:
        driven.evict()
    assert not any(driven.has(names))
    assert driven.send(1) == names
    driven.evict()
    assert all(driven.has(names))


def test_contents_are_counted_up_to_a_number() -> None:
    driven = Driven(store_threshold=2, max_tracker_size=4)
    names = driven.send(1)
    driven.evict()
    driven.send(1)
    driven.evict()
    assert not any(driven.has(names)), "other prompts were counted since"


def test_contents_behind_prompts_are_left_out_until_a_prompt_has_them() -> None:
    driven = Driven(offload_prompt_only=True)
    names = driven.send(1, num_tokens=14, max_tokens=20)
    assert len(names) == 8
    driven.evict()
    assert driven.has(names) == [True] * 3 + [False] * 5
    whole = driven.send(1, num_tokens=14, max_tokens=20)
    answer = driven.last.token_ids
    driven.send_tokens(answer[:29])
    driven.evict()
    assert driven.has(whole) == [True] * 7 + [False]


@pytest.mark.parametrize("extra", [{}, {"store_threshold": 1, "offload_prompt_only": True}], ids=str)
def test_a_request_limits_what_is_stored_of_it(extra: dict[str, Any]) -> None:
    driven = Driven(**extra)
    names = driven.send(1, max_offload_tokens=14)
    driven.send(2, max_offload_tokens=0)
    none = list(driven.last.block_hashes)
    driven.evict()
    assert driven.has(names) == [True] * 3 + [False] * 5
    assert not any(driven.has(none))
    assert driven.send(1) == names, "it has no limit"
    driven.evict()
    assert all(driven.has(names))


def test_limits_of_one_request_leave_alone_what_others_had() -> None:
    driven = Driven()
    names = driven.send(1)
    assert driven.send(1, max_offload_tokens=0) == names and driven.last.num_cached_tokens == 32
    others = driven.send(2, max_offload_tokens=0)
    assert driven.send(2) == others and driven.last.num_cached_tokens == 32
    driven.evict()
    assert all(driven.has(names)) and all(driven.has(others))

"""When the contents of leases can be fetched, whose prompts a prefill engine computes."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from jaxllm.device_ops import FinishedCopy, GatherBlocks
from jaxllm.kv_tiers.peers.leases import Leases
from jaxllm.kv_tiers.peers.prefill_tier import PrefillTier
from jaxllm.kv_tiers.rates import Rates
from tests.kv_tiers.test_host_tier import Copies


def test_a_plan_waits_for_what_decode_engines_wait_for_so_that_they_fetch_it_during_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies, rates, leases = Copies(16), Rates(1000), Leases(8)
    copies.num_staging = 8
    rates.note_step(1000, 2.0)
    no_server: Any = Mock()
    tier = PrefillTier(copies, rates, leases, no_server, lambda *args: {}, num_cold=0)
    blocks = {b"a": 5, b"b": 6}
    request: Any = SimpleNamespace(request_id="r")

    def plan(step_id: int) -> list[Any]:
        ops = list(tier.begin_step(step_id, step_id - 2).ops)  # the step before is computed
        tier.check_integrity()
        return ops

    plan(1)
    tier.keep([b"a"], lambda name: SimpleNamespace(block_id=blocks[name]))  # type: ignore[arg-type, return-value]
    tier.announce(request, [b"a", b"b"], 2, 32)
    (gather,) = plan(2)
    assert isinstance(gather, GatherBlocks) and gather.block_ids == [5]
    (other,) = tier.store([9], [b"x"])
    waits = list[float]()

    def wait(seconds: float) -> None:
        waits.append(seconds)
        copies.over.append(FinishedCopy(gather.number, (), 0.001, None))

    monkeypatch.setattr(copies, "wait", wait)
    tier.wait_for_stores(1000)
    assert len(waits) == 1 and waits[0] <= 0.5, "nobody waits for the other store"
    plan(3)
    lease = next(iter(leases._leases.values()))
    assert lease.stored == [b"a"] and lease.pending == {b"b"}, "step 2 is still computed"
    tier.wait_for_stores(1000)
    copies.over.append(FinishedCopy(other.number, (), 0.001, None))
    plan(4)
    tier.wait_for_stores(1000)
    assert len(waits) == 1

"""Events about what host memory has."""

import random

import pytest

from jaxllm.cache_spec import cache_layout, cache_specs
from jaxllm.engine.fault_points import injected
from jaxllm.kv_events import publisher
from jaxllm.kv_tiers.host_tier import HostTier
from jaxllm.models.load_config import load_model_config
from jaxllm.request import RequestStatus
from tests.helpers import goldens
from tests.helpers.core_client import Client, make_prompts
from tests.helpers.fake_copies import AlwaysWorth, FakeCopies
from tests.helpers.ports import free_ports
from tests.helpers.scheduling import make_request, make_scheduler
from tests.kv_events.test_engines import router_of
from tests.kv_events.test_kv_events import NUM_RANKS, config_of, events_of, sent
from tests.kv_tiers.test_offloading import make


@pytest.mark.slow
def test_blocks_that_come_leave_and_are_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "_PAUSE_SECONDS", 0.0)
    with router_of("qwen3", make) as router:
        core, client = router.core, Client(router.core, make_prompts(6))
        client.run()
        router.check()
        assert router.subscriber.on("GPU") and router.subscriber.on("CPU"), "blocks were evicted"
        client.run()
        router.check()
        assert core.stats().num_loaded_blocks, "blocks came back"
        core.sleep(level=1)
        router.check()
        assert router.subscriber.on("CPU") and not router.subscriber.on("GPU")
        core.wake_up()
        with injected("step:2:error"):
            client.run()
        router.check()
        with injected("kv.event:1-2:error"):
            client.run()
        client.run()
        router.check()
        assert core.reset_prefix_cache()
        router.check()
        assert not router.subscriber.blocks
        assert core.stats().num_kv_event_batches > len(router.payloads) - 1 > 10 and not core.stats().num_dropped_kv_events


def test_contents_of_host_memory_are_told_with_their_tokens() -> None:
    port, model_config = free_ports(2 * NUM_RANKS), load_model_config(goldens.FOLDER / "qwen3")
    layout = cache_layout(cache_specs(model_config), block_size=8, max_step_tokens=64)
    config = config_of(port)
    copies = FakeCopies(random.Random(0), num_slots=4, num_staging=4, max_blocks=4, share_damaged=0.0)
    tier = HostTier(copies, AlwaysWorth(), num_cold=0)
    with events_of(config) as made:
        observer = made.new_observer(config, model_config, layout, (tier,))
        scheduler = make_scheduler(block_size=8, num_blocks=4, observer=observer, tiers=(tier,))
        scheduler.add_request(make_request("a", [*range(9)]))
        scheduler.schedule()
        scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
        name = next(iter(scheduler.cache_manager.pool.cached_hashes()))
        content = tier.contents.add(name)
        assert content is not None
        tier.contents.make_ready(content)
        tier.contents.release(content)
        made.publish()
        tier.discard([name])
        made.publish()
        (_, first, _), (_, second, _) = sent(port)
    assert [(event["type"], event.get("medium")) for event in first] == [
        ("AllBlocksCleared", None),
        ("BlockStored", "GPU"),
        ("BlockStored", "CPU"),
    ]
    assert first[1]["token_ids"] == first[2]["token_ids"] == [*range(8)]
    assert second == [{"type": "BlockRemoved", "block_hashes": first[1]["block_hashes"], "medium": "CPU", "group_idx": 0}]

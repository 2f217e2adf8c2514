"""The events of an engine: addresses of ranks, groups of layers, and what tiers report."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from jaxllm.cache_spec import cache_layout, cache_specs
from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.kv_events import KVEvents, publisher
from jaxllm.models.load_config import load_model_config
from jaxllm.scheduler_stats import SchedulerStats
from tests.helpers import goldens
from tests.helpers.ports import free_ports
from tests.helpers.scheduling import make_request, make_scheduler

NUM_RANKS = 3


def config_of(port: int, **options: Any) -> EngineConfig:
    events = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{port + NUM_RANKS}"}
    return EngineConfig.from_options(kv_events_config=events, enable_prefix_caching=True, block_size=8, **options)


@contextmanager
def events_of(config: EngineConfig, replica: int = 0) -> Iterator[KVEvents]:
    made = KVEvents(config, replica)
    try:
        yield made
    finally:
        made.close()


def sent(port: int) -> list[list[Any]]:
    """All that was published so far."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger, client.rcvtimeo = 0, 10_000
        client.connect(f"tcp://127.0.0.1:{port + NUM_RANKS}")
        found = []
        client.send_multipart([b"", bytes(8)])
        while (frames := client.recv_multipart())[2] != b"\xff" * 8:
            found.append(msgspec.msgpack.decode(frames[3]))
        return found


@pytest.mark.parametrize(("model", "kinds"), [
    ("qwen3", [("full_attention", None)]),
    ("deepseek_v3", [("mla_attention", None)]),
    ("gemma3", [("full_attention", None)] + [("sliding_window", 16)]),
    ("mistral_window", [("sliding_window", 16)]),
])  # fmt: skip
def test_each_group_is_called_as_in_vllm(model: str, kinds: list[tuple[str, int | None]]) -> None:
    port, model_config = free_ports(2 * NUM_RANKS), load_model_config(goldens.FOLDER / model)
    layout = cache_layout(cache_specs(model_config), block_size=8, max_step_tokens=64)
    config = config_of(port)
    with events_of(config) as made:
        observer = made.new_observer(config, model_config, layout, ())
        scheduler = make_scheduler(block_size=8, policies=layout.policies, observer=observer)
        scheduler.add_request(make_request("a", [*range(9)]))
        plan = scheduler.schedule()
        assert plan.num_tokens == 9
        made.publish()
        made.publish()
        found = sent(port)
        stats = SchedulerStats(0, 0, 0.0, 0, 0, 0, 0, 0)
        made.add_stats(stats)
    ((_, events, rank),) = found
    assert events[0] == {"type": "AllBlocksCleared"} and rank == 0
    assert (stats.num_kv_event_batches, stats.num_dropped_kv_events) == (1, 0)
    found_kinds = {(event["kv_cache_spec_kind"], event.get("kv_cache_spec_sliding_window")) for event in events[1:]}
    assert found_kinds == set(kinds)
    assert [event["group_idx"] for event in events[1:]] == list(range(len(layout.groups)))
    assert all(event["token_ids"] == [*range(8)] for event in events[1:])


def test_replicas_and_ranks_have_ports_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    port, model_config = free_ports(2 * NUM_RANKS), load_model_config(goldens.FOLDER / "qwen3")
    layout = cache_layout(cache_specs(model_config), block_size=8, max_step_tokens=64)
    config = config_of(port, data_parallel_size=3)
    with events_of(config, replica=2) as made:
        made.new_observer(config, model_config, layout, ()).cleared()
        made.publish()
        ((_, _, rank),) = sent(port + 2)
        assert rank == 2
    config = config_of(port, data_parallel_size=3, enable_expert_parallel=True)
    with events_of(config) as made:
        for _ in range(NUM_RANKS):
            made.new_observer(config, model_config, layout, ()).cleared()
        made.publish()
        assert [sent(port + rank)[0][2] for rank in range(NUM_RANKS)] == [0, 1, 2]
        monkeypatch.setattr(publisher, "_REUSE_SECONDS", 0.1)
        with pytest.raises(
            ConfigError, match=f"kv_events_config.endpoint is 'tcp://\\*:{port + 1}', which another process uses"
        ):
            KVEvents(config_of(port + 1, data_parallel_size=3, enable_expert_parallel=True), 0)


def test_a_model_without_a_prefix_cache_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model_config = load_model_config(goldens.FOLDER / "qwen3")
    layout = cache_layout(cache_specs(model_config), block_size=8, max_step_tokens=64)
    events = {"enable_kv_cache_events": True, "endpoint": "inproc://nobody"}
    config = EngineConfig.from_options(kv_events_config=events)
    with caplog.at_level("WARNING", "jaxllm"), events_of(config) as made:
        made.new_observer(config, model_config, layout, ())
    assert "has no prefix cache, so there are no events" in caplog.text

"""Values of kv_events_config, and the errors for all others."""

from typing import Any

import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine import features
from jaxllm.errors import ConfigError
from jaxllm.options.kv_events import KVEventsConfig, endpoint_of_rank

ON = {"enable_kv_cache_events": True}


def test_defaults_are_those_of_vllm() -> None:
    config = KVEventsConfig.of({})
    assert (config.endpoint, config.replay_endpoint, config.topic) == ("tcp://*:5557", None, "")
    assert (config.buffer_steps, config.hwm, config.max_queue_size) == (10_000, 100_000, 100_000)
    assert not config.enable_kv_cache_events and not config.publishes
    assert KVEventsConfig.of(ON).publishes and KVEventsConfig.of({**ON, "publisher": "zmq"}).publishes


@pytest.mark.parametrize("raw", [None, {}, {"publisher": "zmq"}, {**ON, "publisher": "null"}])
def test_nothing_is_made_where_nothing_is_asked_for(raw: dict[str, Any] | None) -> None:
    assert features.open_kv_events(EngineConfig.from_options(kv_events_config=raw), 0) is None


def test_a_build_without_the_package_refuses_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "KV_EVENTS", None)
    with pytest.raises(ConfigError, match="kv_events_config is on, but this build publishes no events; leave it out"):
        features.open_kv_events(EngineConfig.from_options(kv_events_config=ON), 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_events_config": "zmq"}, "kv_events_config is 'zmq'"),
        ({"kv_events_config": {"enabled": True}}, "has 'enabled', which is unknown; it takes enable_kv_cache_events, publisher, endpoint"),
        ({"kv_events_config": {"enable_kv_cache_events": 1}}, "enable_kv_cache_events is 1, must be bool"),
        ({"kv_events_config": {**ON, "publisher": "kafka"}}, "publisher is 'kafka', must be one of zmq, null"),
        ({"kv_events_config": {**ON, "endpoint": None}}, "endpoint is None, must be str"),
        ({"kv_events_config": {**ON, "topic": 3}}, "topic is 3, must be str"),
        ({"kv_events_config": {**ON, "hwm": True}}, "hwm is True, must be int"),
        ({"kv_events_config": {**ON, "hwm": -1}}, "hwm is -1, must be 0 to"),
        ({"kv_events_config": {**ON, "buffer_steps": 2**31}}, "buffer_steps is 2147483648, must be 0 to 2147483647"),
        ({"kv_events_config": {**ON, "max_queue_size": 0}}, "max_queue_size is 0, must be 1 to"),
        ({"kv_events_config": {**ON, "endpoint": "udp://*:5557"}}, r"endpoint is 'udp://\*:5557', must begin with tcp://, ipc://"),
        ({"kv_events_config": {**ON, "endpoint": "ipc://"}}, "endpoint is 'ipc://', must begin with"),
        ({"kv_events_config": {**ON, "endpoint": "tcp://*"}}, "must have an address and a port of at most 65535"),
        ({"kv_events_config": {**ON, "endpoint": "tcp://:1"}}, "must have an address and a port"),
        ({"kv_events_config": {**ON, "replay_endpoint": "tcp://*:65536"}}, "replay_endpoint is .* must have an address and a port"),
        ({"kv_events_config": {**ON, "replay_endpoint": "tcp://*:5557"}}, "have the ports 5557 and 5557, must be at least 1 apart"),
        (
            {"kv_events_config": {**ON, "replay_endpoint": "tcp://*:5559"}, "data_parallel_size": 3},
            "have the ports 5557 and 5559, must be at least 3 apart, because each of 3 ranks adds its number",
        ),
        ({"kv_events_config": {**ON, "endpoint": "tcp://*:65535"}, "data_parallel_size": 2}, "adds its number to the port, at most 65535"),
        ({"kv_events_config": {**ON, "endpoint": "ipc:///tmp/x"}, "data_parallel_size": 2}, "each rank needs an address of its own"),
        ({"kv_events_config": ON, "enable_prefix_caching": False}, "events say what prefix caching keeps, which is off"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options(**options)


def test_a_port_elsewhere_is_not_that_of_the_replay() -> None:
    events = {**ON, "endpoint": "tcp://collector:5557", "replay_endpoint": "tcp://*:5557"}
    assert EngineConfig.from_options(kv_events_config=events).observe.kv_events_config == events


def test_the_endpoint_of_a_rank() -> None:
    assert [endpoint_of_rank("tcp://*:5557", rank) for rank in (0, 3)] == ["tcp://*:5557", "tcp://*:5560"]
    assert endpoint_of_rank("tcp://[::1]:5557", 1) == "tcp://[::1]:5558" and endpoint_of_rank("tcp://*:0", 1) == "tcp://*:0"
    assert endpoint_of_rank("tcp://127.0.0.1:*", 1) == "tcp://127.0.0.1:*"
    assert endpoint_of_rank("inproc://cache", 2) == "inproc://cache_dp2"

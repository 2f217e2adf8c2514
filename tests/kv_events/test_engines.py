"""Engines whose events lead a subscriber to what they have, through sockets."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from jaxllm.engine.core import EngineCore
from jaxllm.errors import ConfigError
from jaxllm.kv_events import publisher
from tests.helpers import goldens, peft_files
from tests.helpers.core_client import Client, make_prompts
from tests.helpers.engines import make_core
from tests.helpers.kv_subscriber import Subscriber
from tests.helpers.ports import free_ports
from tests.kv_events.test_kv_events import NUM_RANKS


class Router:
    """Reads all messages of an engine."""

    def __init__(self, core: EngineCore, socket: "zmq.Socket[bytes]"):
        self.core, self.socket = core, socket
        self.subscriber = Subscriber(block_size=core.config.block_tokens)
        self.payloads: list[bytes] = []

    def check(self) -> None:
        """Read what has come, and compare."""
        self.socket.send_multipart([b"", len(self.payloads).to_bytes(8, "big")])
        while (frames := self.socket.recv_multipart())[2] != b"\xff" * 8:
            assert int.from_bytes(frames[2], "big") == len(self.payloads)
            self.payloads.append(frames[3])
            self.subscriber.read_payload(frames[3])
        manager = self.core.scheduler.cache_manager
        assert self.subscriber.on("GPU") == set(manager.pool.cached_hashes())
        ready = {name for tier in manager.loading._tiers for name in tier.contents.ready_names()}
        assert self.subscriber.on("CPU") == ready


@contextmanager
def router_of(name: str, make: Callable[..., EngineCore] = make_core, **options: Any) -> Iterator[Router]:
    port = free_ports(2 * NUM_RANKS)
    events = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{port + NUM_RANKS}"}
    options = {"kv_events_config": events, "kv_events_use_int_block_hashes": False, "warmup": "lazy", **options}
    core = make(name, **options)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger, socket.rcvtimeo = 0, 10_000
        socket.connect(f"tcp://127.0.0.1:{port + NUM_RANKS}")
        try:
            yield Router(core, socket)
        finally:
            core.shutdown()


@pytest.mark.slow
def test_windows_adapters_and_salts(tmp_path: Path) -> None:
    options = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 16, "num_gpu_blocks_override": 60}
    adapter = peft_files.write(tmp_path / "sql", goldens.golden("gemma3").directory)
    with router_of("gemma3", **options) as router:
        number = router.core.add_adapter("sql", str(adapter))
        while router.core.adapter_state(number).state == "loading":
            pass
        client = Client(router.core, make_prompts(4))
        client.run()
        router.check()
        num_plain = len(router.payloads)
        client.run(adapter="sql")
        router.check()
        adapted = b"".join(router.payloads[num_plain:])
        assert b"\xa9lora_name\xa3sql" in adapted and b"\xa7lora_id" + bytes([number]) in adapted
        assert b"sliding_window" in adapted and b"full_attention" in adapted
        router.subscriber.may_have_salts = True
        client.run(cache_salt="cayenne", session_id="a session")
        router.check()
        everything = b"".join(router.payloads)
        assert b"a session" in everything and b"cayenne" not in everything


def test_a_port_that_is_taken_ends_the_start_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "_REUSE_SECONDS", 0.01)
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://*")
        events = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}"}
        with pytest.raises(ConfigError, match="which another process uses, or another engine of this one; choose another"):
            make_core("qwen3", kv_events_config=events)

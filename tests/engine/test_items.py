"""Items of prompts that a registered package computes reach schedulers and devices."""

from dataclasses import replace

import pytest

from jaxllm.device_ops import EncodeItem, UseItem
from jaxllm.engine import features
from jaxllm.engine.fault_points import injected
from jaxllm.errors import InvalidRequestError
from jaxllm.request import FinishReason
from jaxllm.runner.ops import OpRunner
from jaxllm.scheduler.encoder_cache import EncoderCache
from tests.helpers import engines
from tests.helpers.fake_items import image

pytestmark = pytest.mark.slow


def request(name: str, position: int, num_tokens: int = 6, content: bytes = b"dog"):
    return replace(engines.request(name, [7] * 20, max_tokens=2), items=(image(content, position, num_tokens),))


def test_a_registered_package_computes_items(monkeypatch):
    monkeypatch.setattr(features, "ITEMS", ("tests.helpers.fake_items:make_items",))
    core, seen = engines.make_core("llama_gqa", max_num_batched_tokens=12), []

    class Noting(OpRunner):
        ops = (EncodeItem, UseItem)

        def run(self, op):
            seen.append(op)

    core.runner.op_runners = (Noting(),)
    engines.run(core, [request("a", 9)])
    use = UseItem(0, "a", 9, pages := seen[0].pages)
    assert seen == [EncodeItem(0, b"\6dog", pages), use, use] and len(pages) == 2
    stats = core.stats()
    assert (stats.item_cache_queries, stats.num_encoded_patches, stats.num_used_item_pages) == (1, 6, 0)
    with injected("op:id=EncodeItem:error"):
        assert engines.run(core, [request("c", 2, content=b"cat")])["c"].finish_reason is FinishReason.ERROR
    seen.clear()
    assert engines.run(core, [request("d", 5)])["d"].finish_reason is FinishReason.LENGTH
    assert [op.payload for op in seen if isinstance(op, EncodeItem)] == [b"\6dog"], (
        "what was encoded before the failure is lost"
    )
    core.check_integrity()
    with pytest.raises(InvalidRequestError, match="image at position 3 has 9 patches, this engine encodes at most 8"):
        core.add_request(request("b", 3, 9))
    rooms = [room for _ in range(2) for room in core.new_rooms() if isinstance(room, EncoderCache)]
    assert len(rooms) == len({id(room) for room in rooms}) == 2, "each scheduler has its own"
    core.shutdown()


def test_an_engine_may_have_no_such_items(monkeypatch):
    monkeypatch.setattr(features, "ITEMS", ("tests.helpers.fake_items:make_items",))
    core = engines.make_core("llama_gqa", enable_prefix_caching=False)
    with pytest.raises(InvalidRequestError, match="kind 'image' at position 9; this engine computes text alone"):
        core.add_request(request("a", 9))
    core.shutdown()

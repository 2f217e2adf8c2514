"""What a registered package computes of items in prompts reaches schedulers and devices."""

from dataclasses import replace

import pytest

from jaxllm.engine import features
from jaxllm.errors import InvalidRequestError
from jaxllm.request import PromptItem
from jaxllm.runner.ops import OpRunner
from tests.helpers import engines
from tests.helpers.fake_items import Encode, Encoder, Place

pytestmark = pytest.mark.slow


def request(name: str, position: int, num_tokens: int = 6):
    item = PromptItem("image", b"dog", position, num_tokens, b"dog")
    return replace(engines.request(name, [7] * 20, max_tokens=2), items=(item,))


def test_a_registered_package_computes_items(monkeypatch):
    monkeypatch.setattr(features, "ITEMS", ("tests.helpers.fake_items:make_items",))
    core, seen = engines.make_core("llama_gqa", max_num_batched_tokens=12), []

    class Noting(OpRunner):
        ops = (Encode, Place)

        def run(self, op):
            seen.append(op)

    core.runner.op_runners = (Noting(),)
    engines.run(core, [request("a", 9)])
    assert seen == [Encode(b"dog", 6, 0), Place("a", 9, 0), Place("a", 9, 0)]
    with pytest.raises(InvalidRequestError, match="an item has 9 tokens, a step encodes 8"):
        core.add_request(request("b", 3, 9))
    rooms = [room for _ in range(2) for room in core.new_rooms() if isinstance(room, Encoder)]
    assert len(rooms) == len({id(room) for room in rooms}) == 2, "each scheduler has its own"
    core.shutdown()


def test_an_engine_may_have_no_such_items(monkeypatch):
    monkeypatch.setattr(features, "ITEMS", ("tests.helpers.fake_items:make_items",))
    core = engines.make_core("llama_gqa", enable_prefix_caching=False)
    with pytest.raises(InvalidRequestError, match="kind 'image' at position 9; this engine computes text alone"):
        core.add_request(request("a", 9))
    core.shutdown()

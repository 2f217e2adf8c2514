"""Engines over eight devices answer requests of every kind as one device does: `scripts/gpu_checks/traffic.py`, on a small model.

Over two devices the GPU's check does the same, and `tests/scripts/test_gpu_checks.py` runs it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from jaxllm import LLM
from jaxllm.engine.fault_points import injected
from scripts.gpu_checks import traffic

pytestmark = pytest.mark.slow

SIZE = traffic.TINY
# The demo model's tokenizer and two KV heads, but a single layer.
SMALL = {"hf_overrides": {"num_hidden_layers": 1}, "load_format": "dummy"}
PLAIN = ("greedy", "seeded", "long")
"""Kinds with few programs."""


@pytest.fixture(scope="module", autouse=True)
def _programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXLLM_CACHE_DIR", str(tmp_path_factory.mktemp("programs")))
        yield


@contextmanager
def engine(size: int, **options: Any) -> Iterator[LLM]:
    llm = LLM("demo", tensor_parallel_size=size, **SMALL, **SIZE.options(**options))
    yield llm
    llm.llm_engine.check_integrity()
    llm.shutdown()


@pytest.fixture(scope="module")
def one_device() -> tuple[dict[str, list[traffic.Answer]], list[Any]]:
    with engine(1) as llm:
        return traffic.answers(llm, SIZE), traffic.vectors(llm, SIZE)


def test_requests_of_every_kind_have_the_answers_of_one_device(one_device: Any) -> None:
    """Greedy and seeded, with every filter, penalty, bias, ban and form, with logprobs of tokens and prompts; mixed, preempted, from
    cached prefixes, after failed steps and after sleep; and vectors. Eight devices hold copies of two KV heads."""
    expected, vectors = one_device
    with engine(8) as llm:
        core: Any = llm.llm_engine.core
        assert core.model_config.layers[0].attention.kv_head_replicas == 4
        assert traffic.differing(traffic.answers(llm, SIZE), expected) == []
        before = core.stats()
        assert before.num_preemptions > 0
        assert traffic.differing(traffic.answers(llm, SIZE), expected) == []
        assert core.stats().prefix_cache_hits > before.prefix_cache_hits
        assert traffic.off_by(traffic.vectors(llm, SIZE), vectors) < traffic.TOLERANCE
        with injected("step:3:oom,result:7:oom,draw:2:oom"):
            assert traffic.differing(traffic.answers(llm, SIZE), expected) == []
        assert core.stats().num_retried_steps == 3
        # A less likely token is not a tie, whatever one device has answered.
        other = traffic.Answer((*expected["greedy"][0].tokens[:4], 1, *expected["greedy"][0].tokens[5:]))
        assert not traffic.is_tie(llm, SIZE, "greedy", 0, other) and traffic.is_tie(
            llm, SIZE, "greedy", 0, expected["greedy"][0]
        )
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert traffic.differing(traffic.answers(llm, SIZE, PLAIN), expected) == []


def test_fp8_weights_and_an_fp8_cache_give_the_tokens_of_one_device() -> None:
    found = []
    for size in (1, 4):
        with engine(size, quantization="fp8", kv_cache_dtype="fp8") as llm:
            found.append(traffic.answers(llm, SIZE, PLAIN))
    assert traffic.differing(*found) == []


def test_another_answer_is_noticed(one_device: Any) -> None:
    expected, _ = one_device
    greedy = expected["greedy"][0]
    other = traffic.Answer((*greedy.tokens[:-1], greedy.tokens[-1] + 1))
    scored = expected["logprobs"][0]
    moved = traffic.Answer(scored.tokens, (*scored.logprobs[:-1], scored.logprobs[-1] + 0.01), scored.reported)
    found = expected | {"greedy": [other], "logprobs": [moved]}
    assert traffic.differing(found, expected) == [("greedy", 0), ("logprobs", 0)]

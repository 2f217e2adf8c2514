"""Goldens that differ in what devices split, with tensor parallelism, in a pool so small that requests are preempted."""

import pytest

from tests.helpers import engines, goldens
from tests.helpers.parity import check

pytestmark = pytest.mark.slow


DRAFTS = {"method": "ngram", "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    ("name", "size", "drafts"),
    [
        pytest.param("llama_gqa", 2, None, marks=pytest.mark.newer),  # two KV heads, split
        ("llama_bias", 8, None),  # two KV heads, copied; a bias that is added once, after the sum over devices
        ("granite_hybrid", 2, None),  # states of one group's heads, whose vectors are copied
        ("lfm2", 2, DRAFTS),  # states by row, biases of convolutions
    ],
)
def test_tensor_parallel(name: str, size: int, drafts: dict | None) -> None:
    core = engines.make_core(name, num_gpu_blocks_override=12, tensor_parallel_size=size, speculative_config=drafts)
    check(name, core)
    assert core.stats().num_preemptions > 0
    assert (core.stats().num_accepted_tokens > 0) == (drafts is not None)
    longest = max(goldens.golden(name).results, key=lambda result: len(result.prompt))
    for again in ("computed", "found"):
        answer = engines.run(core, [engines.request(again, longest.prompt, max_tokens=8)])[again]
        assert answer.tokens == longest.tokens[:8]
    assert answer.num_cached_tokens == len(longest.prompt) // 16 * 16
    core.shutdown()

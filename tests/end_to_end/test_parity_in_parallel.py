"""Goldens that differ in what devices split, with tensor parallelism, in a pool so small that requests are preempted."""

import pytest

from tests.helpers import engines
from tests.helpers.parity import check

pytestmark = pytest.mark.slow


NUM_BLOCKS = {"mistral_window": 8, "qwen2_window": 16}
"""With 12, a request with a window preempts no other, and one with two groups of layers does not fit."""


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param("llama_gqa", 2, marks=pytest.mark.newer),  # two KV heads, split
        ("llama_mha", 8),  # a KV head for each query head, split
        ("llama_bias", 8),  # two KV heads, copied; a bias that is added once, after the sum over devices
        ("qwen2_window", 2),  # biases that are split; windows
        ("granite_hybrid", 2),  # states of one group's heads, whose vectors are copied
        ("lfm2", 2),  # states by row, biases of convolutions
        ("qwen3", 8),  # norms of heads; one table of the vocabulary for both ends
    ],
)
def test_tensor_parallel(name: str, size: int) -> None:
    core = engines.make_core(name, num_gpu_blocks_override=NUM_BLOCKS.get(name, 12), tensor_parallel_size=size)
    check(name, core)
    assert core.stats().num_preemptions > 0
    core.shutdown()

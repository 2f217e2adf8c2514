"""Goldens that differ in what devices split, with tensor parallelism, in a pool so small that requests are preempted."""

import pytest

from tests.helpers import engines
from tests.helpers.parity import check

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param("llama_gqa", 2, marks=pytest.mark.newer),  # two KV heads, split
        ("llama_bias", 8),  # two KV heads, copied; a bias that is added once, after the sum over devices
        ("granite_hybrid", 2),  # states of one group's heads, whose vectors are copied
        ("lfm2", 2),  # states by row, biases of convolutions
    ],
)
def test_tensor_parallel(name: str, size: int) -> None:
    core = engines.make_core(name, num_gpu_blocks_override=12, tensor_parallel_size=size)
    check(name, core)
    assert core.stats().num_preemptions > 0
    core.shutdown()

"""Every golden with tensor parallelism, in a pool so small that requests are preempted."""

import pytest

from tests.helpers import engines, goldens
from tests.helpers.parity import check

pytestmark = pytest.mark.slow


NUM_BLOCKS = {"mistral_window": 8, "qwen2_window": 16}
"""With 12, a request with a window preempts no other, and one with two groups of layers does not fit."""


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("name", goldens.NAMES)
def test_tensor_parallel(name: str, size: int) -> None:
    core = engines.make_core(name, num_gpu_blocks_override=NUM_BLOCKS.get(name, 12), tensor_parallel_size=size)
    check(name, core)
    assert core.stats().num_preemptions > 0
    core.shutdown()

"""Every golden with tensor parallelism, in a pool so small that requests are preempted."""

import pytest

from tests.helpers import engines, goldens
from tests.helpers.parity import check

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("name", goldens.NAMES)
def test_tensor_parallel(name: str, size: int) -> None:
    core = engines.make_core(name, num_gpu_blocks_override=12, tensor_parallel_size=size)
    check(name, core)
    assert core.stats().num_preemptions > 0
    core.shutdown()

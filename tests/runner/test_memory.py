import os

import pytest

from jaxllm.runner import memory
from jaxllm.runner.memory import countable_blocks


@pytest.mark.parametrize(
    ("gibibytes", "itemsize", "left"),
    [(1, 1, 1), (2, 1, 2), (3, 1, 2), (4, 1, 2), (5, 1, 5), (4, 2, 4), (5, 2, 5), (40, 2, 40)],
)
def test_a_layer_of_single_bytes_is_never_of_a_size_that_kernels_cannot_count(gibibytes, itemsize, left):
    values_per_block = 8 * 16 * 64
    blocks = (gibibytes << 30) // (values_per_block * itemsize)
    assert countable_blocks(blocks, values_per_block, itemsize) * values_per_block * itemsize == left << 30


@pytest.mark.parametrize(
    ("size", "total_gibibytes", "fraction"),
    [(1, 140, "0.920"), (2, 140, "0.909"), (4, 20, "0.845"), (2, None, "0.920"), (2, 1, "0.010")],
    ids=["one device takes all", "two", "a small device", "unknown memory", "too small"],
)
def test_the_pool_leaves_room_for_collectives(monkeypatch, size, total_gibibytes, fraction):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.setattr(memory.gpus, "smallest_total_bytes", lambda count: total_gibibytes and total_gibibytes << 30)
    memory.reserve_device_memory(0.92, tensor_parallel_size=size)
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == fraction

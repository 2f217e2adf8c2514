import pytest

from jaxllm.runner.memory import countable_blocks


@pytest.mark.parametrize(
    ("gibibytes", "itemsize", "left"),
    [(1, 1, 1), (2, 1, 2), (3, 1, 2), (4, 1, 2), (5, 1, 5), (4, 2, 4), (5, 2, 5), (40, 2, 40)],
)
def test_a_layer_of_single_bytes_is_never_of_a_size_that_kernels_cannot_count(gibibytes, itemsize, left):
    values_per_block = 8 * 16 * 64
    blocks = (gibibytes << 30) // (values_per_block * itemsize)
    assert countable_blocks(blocks, values_per_block, itemsize) * values_per_block * itemsize == left << 30

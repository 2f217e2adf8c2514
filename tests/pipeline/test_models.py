"""Goldens that differ in what stages divide, in stages of one and of several devices, in a pool so small that requests are
preempted."""

import pytest

from tests.helpers import engines
from tests.helpers.parity import check
from tests.helpers.slow import slow_except


@pytest.mark.parametrize(
    ("name", "num_stages", "size", "options"),
    slow_except(
        [("gpt2", 2, 1, {"num_gpu_blocks_override": 12})],
        [
            ("llama_tied", 2, 2, {"num_gpu_blocks_override": 12}),  # one table of the vocabulary, split, in both stages
            ("gpt2", 2, 1, {"num_gpu_blocks_override": 12}),  # positions are learned
            ("glm_moe_dsa", 2, 1, {"pipeline_parallel_layers": (1, 2)}),  # latents; the last layer takes the choice of tokens
            ("qwen3_next", 3, 1, {}),  # a stage keeps states by row and no blocks
        ],
    ),
)
def test_stages(name, num_stages, size, options):
    core = engines.make_core(name, pipeline_parallel_size=num_stages, tensor_parallel_size=size, **options)
    check(name, core)
    assert "num_gpu_blocks_override" not in options or core.stats().num_preemptions > 0
    core.shutdown()

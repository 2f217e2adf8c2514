"""Engines whose cache holds heads of two widths, and layers that read the keys of others."""

import pytest

from jaxllm.errors import ConfigError
from jaxllm.runner.programs.key import ProgramKey
from tests.helpers import engines
from tests.helpers.parity import check

NGRAM = {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@pytest.mark.slow
def test_drafts_in_a_small_pool():
    core = engines.make_core("gemma4", num_gpu_blocks_override=24, speculative_config=NGRAM)
    check("gemma4", core)
    assert core.stats().num_preemptions > 0
    core.shutdown()


@pytest.mark.slow
def test_views_of_caches_and_layers_that_only_read_copy_none():
    core = engines.make_core("gemma4", num_gpu_blocks_override=4000, warmup="lazy")
    assert core.memory_plan.cache.layers_per_block == 2
    temporary = core.runner.programs.get(ProgramKey("decode", 4)).memory_analysis().temp_size_in_bytes
    assert temporary < core.runner.caches[0].nbytes
    core.shutdown()


def test_such_models_are_not_divided_into_stages():
    with pytest.raises(ConfigError, match="only jaxllm's own decoder is divided into stages"):
        engines.make_core("gemma4", pipeline_parallel_size=2)

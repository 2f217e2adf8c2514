"""Chooses how large a step of a long prompt may be while no request decodes, where options leave it open."""

from jaxllm.cache_policy import FULL
from jaxllm.config import AUTO_MODEL_LEN, BIG_DEVICE_BYTES, EngineConfig
from jaxllm.kernel_policy import GPU
from jaxllm.layers.build import weight_bytes
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.topology import Topology
from jaxllm.runner.memory import estimate_work_bytes, whole_cache

PREFILL_TOKENS = 8192
MOST_OF_MEMORY = 0.05
"""Most of the memory that weights leave, for what such a step needs beyond any other."""


def with_prefill_limit(config: EngineConfig, model: ModelConfig, *, asked: EngineConfig, device_bytes: int) -> EngineConfig:
    """The config with max_num_prefill_tokens. asked: before platform defaults. device_bytes: memory that the engine may use on a device;
    0 on a CPU."""
    scheduler, parallel = config.scheduler, config.parallel
    if scheduler.max_num_prefill_tokens is not None:
        return config
    usual, wanted_len = scheduler.max_num_batched_tokens, config.model.max_model_len
    assert usual is not None
    kept = config.replace(max_num_prefill_tokens=usual)
    sizes = (parallel.pipeline_parallel_size, parallel.num_ranks, parallel.prefill_context_parallel_size, parallel.nnodes)
    is_open = asked.scheduler.max_num_batched_tokens is None and scheduler.enable_chunked_prefill
    if not is_open or device_bytes < BIG_DEVICE_BYTES or max(sizes) > 1:
        return kept
    longest = model.max_position if wanted_len in (None, AUTO_MODEL_LEN) else wanted_len
    larger = config.replace(max_num_prefill_tokens=max(usual, min(PREFILL_TOKENS, longest)))
    if larger == kept:
        return kept
    # A request holds the blocks of a whole step in each group of layers with a window.
    if any(policy != FULL for policy in whole_cache(config, model).policies):
        return kept
    left = device_bytes - weight_bytes(model) // Topology.of(parallel).tensor
    more = estimate_work_bytes(larger, model, GPU) - estimate_work_bytes(kept, model, GPU)
    return larger if more <= MOST_OF_MEMORY * left else kept

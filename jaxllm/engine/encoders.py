"""Options of engines with encoders, which compute each prompt whole in one step and keep nothing of it."""

from jaxllm.config import AUTO_MODEL_LEN, EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.log import logger
from jaxllm.model_config import ModelConfig

GPU_STEP_TOKENS = 8192
"""Tokens of a step on a GPU: encoders are small, and nothing waits for the end of a step but its own prompts."""

BLOCK_SIZE = 128
"""The largest: blocks have no bytes, and there are fewer to count."""


def check_options(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError for options that need what an encoder lacks."""
    parallel, cache = config.parallel, config.cache
    is_set = {
        "pipeline_parallel_size": parallel.pipeline_parallel_size > 1,
        "prefill_context_parallel_size": parallel.prefill_context_parallel_size > 1,
        "enable_prefix_caching": cache.enable_prefix_caching is True,
        "kv_cache_dtype": cache.kv_cache_dtype != "auto",
        "kv_offloading_size": bool(cache.kv_offloading_size),
        "kv_role": config.kv_transfer.kv_role is not None,
        "speculative_config": config.speculative.speculative_config is not None,
        "enable_lora": config.lora.enable_lora,
        "max_num_prefill_tokens": config.scheduler.max_num_prefill_tokens is not None,
        "long_prefill_token_threshold": bool(config.scheduler.long_prefill_token_threshold),
    }
    if names := [name for name, has in is_set.items() if has]:
        raise ConfigError(
            f"{' and '.join(names)} is set, but {model.architecture} is an encoder, which computes a prompt in one step on all devices "
            "alike and keeps no keys and values; leave it out"
        )


def with_whole_prompts(config: EngineConfig, model: ModelConfig, *, asked: EngineConfig, on_gpu: bool) -> EngineConfig:
    """The config with steps that hold the longest prompt. asked: before platform defaults."""
    wanted_len, num_tokens = config.model.max_model_len, config.scheduler.max_num_batched_tokens
    longest = model.max_position if wanted_len in (None, AUTO_MODEL_LEN) else wanted_len
    assert longest is not None and num_tokens is not None
    if asked.scheduler.max_num_batched_tokens is None:
        num_tokens = max(num_tokens, longest, GPU_STEP_TOKENS if on_gpu else 0)
    elif num_tokens < longest:
        raise ConfigError(
            f"max_num_batched_tokens is {num_tokens}, but {model.architecture} is an encoder, which computes prompts of up to {longest} "
            "tokens whole; raise --max-num-batched-tokens or lower --max-model-len"
        )
    logger.info(
        "%s is an encoder: a step computes whole prompts, up to %d tokens; block_size, enable_chunked_prefill and options of the KV cache "
        "have no effect",
        *(model.architecture, num_tokens),
    )
    return config.replace(
        max_num_batched_tokens=num_tokens,
        max_num_prefill_tokens=num_tokens,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        block_size=BLOCK_SIZE,
    )

"""Models that context parallelism does not take. Does not import JAX."""

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.model_config import ModelConfig


def check_model(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError for a model that the devices of prefill_context_parallel_size cannot compute together; with one, any can."""
    size = config.parallel.prefill_context_parallel_size
    faults = (
        (bool(model.latent_attentions), "has latent attention, whose cache is not split by tokens"),
        (bool(model.state_mixers), "has linear attention or other layers with states by row, which sum up all tokens in order"),
        (any(part.chunk for part in model.attentions), "has layers that attend within chunks, which devices do not share"),
        (
            model.model_class != ModelConfig.model_class,
            f"is computed by {model.model_class}, and only jaxllm's own decoder shares out tokens",
        ),
    )
    for is_so, reason in faults:
        if size > 1 and is_so:
            raise ConfigError(
                f"prefill_context_parallel_size is {size}, but {model.architecture} {reason}; leave the option out: "
                "--tensor-parallel-size takes several devices for such a model"
            )

"""Options and models that data-parallel ranks exclude."""

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.model_config import ModelConfig
from jaxllm.options.eplb import EplbConfig


def check_ranks(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError for a model whose experts cannot be distributed over all devices, or for options that data-parallel
    ranks exclude."""
    num_ranks, size = config.parallel.num_ranks, config.parallel.tensor_parallel_size
    if num_ranks == 1:
        return
    asked = f"data_parallel_size is {num_ranks} and enable_expert_parallel is set"
    excluded = (
        ("enable_lora is set", not config.lora.enable_lora, "adapters are not given to several ranks"),
        ("pipeline_parallel_size is set", config.parallel.pipeline_parallel_size == 1, "ranks have no stages"),
        (
            "prefill_context_parallel_size is set",
            config.parallel.prefill_context_parallel_size == 1,
            "a rank's devices do not split tokens",
        ),
        ("compiled_artifact is set", config.compile.compiled_artifact is None, "an artifact has the programs of one rank"),
        (
            f"{model.architecture} is computed by {model.model_class}",
            model.model_class == ModelConfig.model_class,
            "only jaxllm's own mixtures send tokens to other devices",
        ),
    )
    for what, is_fine, reason in excluded:
        if not is_fine:
            raise ConfigError(
                f"{asked}, which makes one engine of {num_ranks} data-parallel ranks, and {what}, but {reason}; leave one of them out: "
                "without enable_expert_parallel, data_parallel_size starts engines that share nothing"
            )
    num_redundant = EplbConfig.of(config.parallel.eplb_config).num_redundant_experts
    for part in model.mixtures:
        num_slots = part.routing.num_experts + num_redundant
        if num_slots % (num_ranks * size):
            copies = f" with {num_redundant} redundant ones (eplb_config.num_redundant_experts)" if num_redundant else ""
            raise ConfigError(
                f"{asked}: {part.routing.num_experts} experts{copies} cannot be shared equally by {num_ranks * size} devices "
                f"(data_parallel_size {num_ranks} times tensor_parallel_size {size}); choose sizes whose product divides {num_slots}"
                + (", or another number of redundant ones" if num_redundant else "")
            )

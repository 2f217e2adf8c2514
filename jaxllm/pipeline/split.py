"""Which layers each stage has. Does not import JAX."""

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import LatentAttention


def check_stages(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError if the layers cannot be divided as the options say, or for options that pipelines exclude."""
    layers_of_stages(config, model)


def layers_of_stages(config: EngineConfig, model: ModelConfig) -> tuple[range, ...]:
    """The layers of each stage, in order. Raises ConfigError if they cannot be divided so, or for options that pipelines exclude."""
    options, num_layers = config.parallel, model.num_layers
    num_stages, given = options.pipeline_parallel_size, options.pipeline_parallel_layers
    if num_stages > num_layers:
        raise ConfigError(
            f"pipeline_parallel_size is {num_stages}, but {model.architecture} has {num_layers} layers here, and each stage needs one; "
            f"choose 1 to {num_layers}"
        )
    if given is not None and (len(given) != num_stages or sum(given) != num_layers):
        raise ConfigError(
            f"pipeline_parallel_layers is {','.join(map(str, given))}: {sum(given)} layers in {len(given)} stages, but the model has "
            f"{num_layers} and pipeline_parallel_size is {num_stages}; leave it out, or give such a list"
        )
    if num_stages > 1:
        _refuse(config, model)
    stops = [0]
    for count in given or _even(num_layers, num_stages):
        stops.append(stops[-1] + count)
    for first in stops[1:-1]:
        part = model.layers[first].attention
        if isinstance(part, LatentAttention) and part.top_k is not None and part.index is None:
            raise ConfigError(
                f"layer {first} would be the first of a stage, but attends to the tokens that an earlier layer chooses; give "
                f"--pipeline-parallel-layers by which each stage begins with one of the layers {_with_index(model)}"
            )
    return tuple(map(range, stops, stops[1:]))


def _with_index(model: ModelConfig) -> str:
    """The layers that choose tokens themselves."""
    parts = enumerate(layer.attention for layer in model.layers)
    return ", ".join(str(number) for number, part in parts if isinstance(part, LatentAttention) and part.index is not None)


def _even(num_layers: int, num_stages: int) -> list[int]:
    """As many layers for each stage. Of what is left over the last gets none, because it has the head; those before it come first."""
    least, rest = divmod(num_layers, num_stages)
    return [least + (num_stages - 1 - rest <= stage < num_stages - 1) for stage in range(num_stages)]


def _refuse(config: EngineConfig, model: ModelConfig) -> None:
    own_class = model.model_class == ModelConfig.model_class
    excluded = (
        ("speculative_config is set", config.speculative.speculative_config is None, "drafts are not divided into stages"),
        ("compiled_artifact is set", config.compile.compiled_artifact is None, "an artifact has the programs of one stage"),
        (
            f"{model.architecture} is computed by {model.model_class}",
            own_class,
            "only jaxllm's own decoder is divided into stages",
        ),
    )
    for what, is_fine, reason in excluded:
        if not is_fine:
            raise ConfigError(
                f"pipeline_parallel_size is {config.parallel.pipeline_parallel_size} and {what}, but {reason}; leave one of them out: "
                "--tensor-parallel-size takes several devices without stages"
            )

"""Properties that must be equal on all hosts with replicas of one server."""

from jaxllm import hub
from jaxllm.config import EngineConfig
from jaxllm.hosts import identity as of_engines
from jaxllm.text.model_files import text_files


def identity(config: EngineConfig) -> dict[str, str]:
    """The identity of this host, by names for error messages. Raises ModelLoadError if there is no such model."""
    options = config.model
    directory = text_files(options.model, revision=options.revision, download_dir=options.download_dir)
    found = of_engines.identity(config, directory)
    if hub.is_local(options.model):
        return {**found, "the model's weights": hub.weight_files(directory)}
    return {
        **found,
        "model": options.model,
        "the model's revision on the hub": directory.name,
    }  # its weights may not be there yet

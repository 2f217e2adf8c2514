"""Audio in prompts as the options of an engine ask for it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.media.features import payload_bytes
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Audio
from jaxllm.scheduler.audio_encoding import AudioEncoding


@dataclass(frozen=True)
class Hearing:
    """See `jaxllm.engine.features.Items`."""

    audio: Audio
    in_steps = ("audio",)

    @property
    def described(self) -> Mapping[str, Any]:
        """See Items."""
        return asdict(self.audio)

    def new_room(self) -> AudioEncoding:
        """See Items."""
        return AudioEncoding(payload_bytes(self.audio))


def make_items(config: EngineConfig, model_config: ModelConfig) -> Hearing | None:
    """For a model that hears. Raises ConfigError for options that exclude audio."""
    if model_config.audio is None:
        return None
    parallel, name = config.parallel, model_config.architecture
    excluded = (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size > 1, "stages of a pipeline do not encode audio"),
        ("enable_lora", config.lora.enable_lora, "adapters do not change its attention to audio"),
        ("nnodes", parallel.nnodes > 1, "hosts do not send each other audio"),
    )
    for option, is_set, reason in excluded:
        if is_set:
            raise ConfigError(f"{option} is set, but {name} hears, and {reason}; leave the option out")
    return Hearing(model_config.audio)

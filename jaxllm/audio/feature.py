"""Audio in prompts as the options of an engine ask for it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.encoder_sizes import EncoderSizes
from jaxllm.errors import ConfigError
from jaxllm.media.features import payload_bytes
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Audio
from jaxllm.scheduler.audio_encoding import AudioEncoding
from jaxllm.scheduler.encoder_cache import EncoderCache


@dataclass(frozen=True)
class Hearing:
    """Audio that layers attend to. See `jaxllm.engine.features.Items`."""

    audio: Audio
    in_steps = ("audio",)

    @property
    def described(self) -> Mapping[str, Any]:
        """See Items."""
        return asdict(self.audio)

    def new_room(self) -> AudioEncoding:
        """See Items."""
        return AudioEncoding(payload_bytes(self.audio))


@dataclass(frozen=True)
class HeardTokens:
    """Audio in place of tokens. See `jaxllm.engine.features.Items`."""

    audio: Audio
    whole_tokens: int
    """Tokens of the longest clip, where a step computes a clip whole; 0: steps may cut clips."""
    in_steps = ("audio_tokens",)

    @property
    def described(self) -> Mapping[str, Any]:
        """See Items."""
        return asdict(self.audio)

    def new_room(self) -> EncoderCache:
        """See Items."""
        return EncoderCache(EncoderSizes.of_audio(self.audio), whole_tokens=self.whole_tokens, kinds=("audio",))


def make_items(config: EngineConfig, model_config: ModelConfig) -> Hearing | HeardTokens | None:
    """For a model that hears. Raises ConfigError for options that exclude audio."""
    audio, parallel = model_config.audio, config.parallel
    if audio is None:
        return None
    stages = ("pipeline_parallel_size", parallel.pipeline_parallel_size > 1, "stages of a pipeline do not encode audio")
    hosts = ("nnodes", parallel.nnodes > 1, "hosts do not send each other audio")
    if model_config.attends_to_audio:
        adapters = ("enable_lora", config.lora.enable_lora, "adapters do not change its attention to audio")
        _refuse(model_config, stages, adapters, hosts)
        return Hearing(audio)
    split = parallel.prefill_context_parallel_size > 1
    _refuse(
        model_config, stages, ("prefill_context_parallel_size", split, "devices that split tokens do not split clips"), hosts
    )
    return HeardTokens(audio, _whole_tokens(config, EncoderSizes.of_audio(audio).max_item_embeddings))


def _refuse(model_config: ModelConfig, *excluded: tuple[str, bool, str]) -> None:
    """Raise ConfigError for the first option that is set, with its reason."""
    way_out = "" if model_config.attends_to_audio else ", or set language_model_only for text alone"
    for option, is_set, reason in excluded:
        if is_set:
            raise ConfigError(
                f"{option} is set, but {model_config.architecture} hears, and {reason}; leave the option out{way_out}"
            )


def _whole_tokens(config: EngineConfig, least: int) -> int:
    """See HeardTokens. Raises ConfigError if a step cannot compute the longest clip, of `least` tokens."""
    if not config.multimodal.disable_chunked_mm_input:
        return 0
    most = config.scheduler.max_num_batched_tokens
    assert most is not None
    if least > most:
        raise ConfigError(
            f"disable_chunked_mm_input is set, so a step computes all {least} tokens of a clip, but max_num_batched_tokens is {most}; "
            "raise it"
        )
    return least

"""Audio: an encoder turns a clip into keys and values of the decoder's cross attention, which belong to the row of its request."""

from jaxllm.config import EngineConfig
from jaxllm.layers.audio import encoding_bytes
from jaxllm.layers.decoder import CausalLM
from jaxllm.loaders.encoder import audio_weights
from jaxllm.model_config import ModelConfig
from jaxllm.runner.features.audio.step import Hearing
from jaxllm.runner.step_feature import FeatureParts, StepFeature
from jaxllm.runner.weights import WithWeights


def weights(config: EngineConfig, model_config: ModelConfig, model: CausalLM) -> WithWeights | None:
    """The encoder, whole on every device."""
    return audio_weights(config.model, model_config) if model_config.attends_to_audio else None


def memory_bytes(config: EngineConfig, model_config: ModelConfig, model: CausalLM) -> int:
    """Bytes on each device of the encoder, and of temporary arrays of encoding a clip. What rows keep is counted with their states."""
    encoder, audio = audio_weights(config.model, model_config), model_config.audio
    if encoder is None or audio is None or not model_config.attends_to_audio:
        return 0
    return encoder.num_bytes + encoding_bytes(audio, model_config.dtype)


def make(parts: FeatureParts) -> StepFeature | None:
    """For models whose layers attend to audio."""
    audio = parts.model_config.audio
    if audio is None or not parts.model_config.attends_to_audio:
        return None
    return Hearing(audio, parts.kernels, parts.weights["audio"].merge, parts.weights["model"].merge)

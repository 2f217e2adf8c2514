"""Audio: an encoder turns a clip into keys and values of the decoder's cross attention, which belong to the row of its request."""

import math

import jax.numpy as jnp

from jaxllm.config import EngineConfig
from jaxllm.layers.decoder import CausalLM
from jaxllm.layers.parameters import parameters
from jaxllm.loaders.encoder import audio_weights
from jaxllm.model_config import ModelConfig
from jaxllm.runner.features.audio.step import Hearing
from jaxllm.runner.step_feature import FeatureParts, StepFeature
from jaxllm.runner.weights import WithWeights


def weights(config: EngineConfig, model_config: ModelConfig, model: CausalLM) -> WithWeights | None:
    """The encoder, whole on every device."""
    return audio_weights(config.model, model_config)


def memory_bytes(config: EngineConfig, model_config: ModelConfig, model: CausalLM) -> int:
    """Bytes on each device of the encoder, and of temporary arrays of encoding a clip, an estimate: a head's scores in float32 and in the
    model's type, and a layer's arrays. What rows keep is counted with their states."""
    encoder, audio = audio_weights(config.model, model_config), model_config.audio
    if encoder is None or audio is None:
        return 0
    of_weights = sum(math.prod(each.shape) * jnp.dtype(each.dtype).itemsize for _, each in parameters(encoder.model))
    itemsize = jnp.dtype(model_config.dtype).itemsize
    scores = (4 + itemsize) * audio.num_positions**2
    return of_weights + scores + audio.num_frames * (8 * audio.hidden_size + 2 * audio.mlp.width) * itemsize


def make(parts: FeatureParts) -> StepFeature | None:
    """For models that hear."""
    audio = parts.model_config.audio
    if audio is None:
        return None
    return Hearing(audio, parts.kernels, parts.weights["audio"].merge, parts.weights["model"].merge)

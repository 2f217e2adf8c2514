"""Loads an encoder, which a checkpoint holds in addition to the text model: the weights of an engine's feature.

    def weights(config, model_config, model):  # of the feature's module, see `jaxllm/runner/features/__init__.py`
        return vision_weights(config.model, model_config)

What it returns is a `WithWeights` (`jaxllm/runner/weights.py`): `model` is the encoder with shapes and axes, each of which every device has
whole; `load` reads its values. `Weights.merges` gives programs the encoder with its arrays.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxllm.config import ModelOptions
from jaxllm.errors import ModelLoadError
from jaxllm.hub import resolve_model
from jaxllm.layers.build import build_audio_encoder, build_tower
from jaxllm.layers.parameters import parameters
from jaxllm.loaders import orbax
from jaxllm.loaders.dummy import dummy_weights
from jaxllm.loaders.layout import Progress as Report
from jaxllm.loaders.load import load_checkpoint
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Audio, VisionEncoder
from jaxllm.progress import Progress, bytes_loaded


@dataclass(frozen=True)
class EncoderWeights:
    """An encoder of a model: see `WithWeights`."""

    options: ModelOptions
    config: ModelConfig
    build: Callable[[ModelConfig], Any]
    """Makes it, as shapes without values."""
    part: VisionEncoder | Audio
    """Names of its tensors in the checkpoint."""

    @cached_property
    def model(self) -> Any:
        """As shapes, without values."""
        return self.build(self.config)

    @property
    def num_bytes(self) -> int:
        """Bytes on each device."""
        return sum(math.prod(each.shape) * jnp.dtype(each.dtype).itemsize for _, each in parameters(self.model))

    def load(self, mesh: Mesh, progress: Progress) -> nnx.State:
        """Raises ModelLoadError."""
        options, report = self.options, bytes_loaded(progress)
        if options.load_format == "dummy":
            return dummy_weights(self.config, self.model, mesh, seed=options.seed or 0, progress=report, build=self.build)
        directory = resolve_model(options.model, options.revision, options.download_dir)
        given: dict[str, Any] = {"load_format": options.load_format, "mesh": mesh, "progress": report}
        return load_encoder(self.config, self.model, self.part, directory, **given)


def vision_weights(options: ModelOptions, config: ModelConfig) -> EncoderWeights | None:
    """The encoder of images of a model; None: it does not see."""
    vision = config.vision
    if vision is None:
        return None
    assert vision.encoder is not None
    return EncoderWeights(options, config, build_tower, vision.encoder)


def audio_weights(options: ModelOptions, config: ModelConfig) -> EncoderWeights | None:
    """The encoder of audio of a model; None: it does not hear."""
    return None if config.audio is None else EncoderWeights(options, config, build_audio_encoder, config.audio)


def load_encoder(
    config: ModelConfig,
    encoder: nnx.Module,
    part: VisionEncoder | Audio,
    directory: Path,
    *,
    mesh: Mesh,
    load_format: str = "auto",
    progress: Report | None = None,
) -> nnx.State:
    """The encoder's state with every array on its devices. Raises ModelLoadError."""
    if load_format == "orbax" or (load_format == "auto" and orbax.is_checkpoint(directory)):
        if not orbax.has_encoder(directory):
            way_out = "" if config.attends_to_audio else ", or use --language-model-only"
            raise ModelLoadError(
                f"{directory} holds a converted text model, without its encoder; convert the model again{way_out}"
            )
        return orbax.restore(config, encoder, directory, mesh, part=orbax.ENCODER, progress=progress)
    return load_checkpoint(config, encoder, directory, mesh=mesh, load_format=load_format, progress=progress, encoder=part)

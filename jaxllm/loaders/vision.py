"""Loads the encoder of images, which a checkpoint holds beside the text model: the weights of an engine's feature.

    def weights(config, model_config, model):  # of the feature's module, see `jaxllm/runner/features/__init__.py`
        return vision_weights(config.model, model_config)

What it returns is a `WithWeights` (`jaxllm/runner/weights.py`): `model` is the `VisionTower` with shapes and axes, each of which every
device has whole; `load` reads its values. `Weights.merges` gives programs the tower with its arrays.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from flax import nnx
from jax.sharding import Mesh

from jaxllm.config import ModelOptions
from jaxllm.errors import ModelLoadError
from jaxllm.hub import resolve_model
from jaxllm.layers.build import build_tower
from jaxllm.layers.vision import VisionTower
from jaxllm.loaders import orbax
from jaxllm.loaders.dummy import dummy_weights
from jaxllm.loaders.layout import Progress as Report
from jaxllm.loaders.load import load_checkpoint
from jaxllm.model_config import ModelConfig
from jaxllm.progress import Progress, bytes_loaded


@dataclass(frozen=True)
class VisionWeights:
    """The encoder of a model that sees images: see `WithWeights`."""

    options: ModelOptions
    config: ModelConfig

    @cached_property
    def model(self) -> VisionTower:
        """As shapes, without values."""
        return build_tower(self.config)

    def load(self, mesh: Mesh, progress: Progress) -> nnx.State:
        """Raises ModelLoadError."""
        options, report = self.options, bytes_loaded(progress)
        if options.load_format == "dummy":
            return dummy_weights(self.config, self.model, mesh, seed=options.seed or 0, progress=report, build=build_tower)
        directory = resolve_model(options.model, options.revision, options.download_dir)
        return load_tower(self.config, self.model, directory, load_format=options.load_format, mesh=mesh, progress=report)


def vision_weights(options: ModelOptions, config: ModelConfig) -> VisionWeights | None:
    """The encoder of a model; None: it takes text alone."""
    return None if config.vision is None else VisionWeights(options, config)


def load_tower(
    config: ModelConfig,
    tower: VisionTower,
    directory: Path,
    *,
    mesh: Mesh,
    load_format: str = "auto",
    progress: Report | None = None,
) -> nnx.State:
    """The encoder's state with every array on its devices. Raises ModelLoadError."""
    if load_format == "orbax" or (load_format == "auto" and orbax.is_checkpoint(directory)):
        raise ModelLoadError(
            f"{directory} holds a converted text model, without its encoder of images; load the checkpoint that it was converted from, "
            "or use --language-model-only"
        )
    return load_checkpoint(
        config, tower, directory, mesh=mesh, load_format=load_format, progress=progress, encoder=tower.vision.encoder
    )

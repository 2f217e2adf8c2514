"""Builds the Flax model that a `ModelConfig` describes."""

import dataclasses
import importlib
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx

from jaxllm.layers.audio import AudioEmbedder, AudioEncoder
from jaxllm.layers.decoder import CausalLM, DecoderBlock
from jaxllm.layers.embedding import Embedding
from jaxllm.layers.linear import Linear
from jaxllm.layers.parameters import Weight, parameters, weights
from jaxllm.layers.vision import VisionTower
from jaxllm.model_config import ModelConfig
from jaxllm.weight_format import ParamSpec


def build_model(config: ModelConfig, layers: range | None = None) -> CausalLM:
    """The model with shapes, types, axes and sources, and no values. layers: of one stage of a pipeline; None: all."""
    module, name = config.model_class.split(":")
    given = () if layers is None else (layers,)
    model: CausalLM = getattr(importlib.import_module(module), name)(config, *given)
    take_formats(config, model.blocks)
    if (head := model.output_head) is not None:
        head.take_formats(config.formats)
    return model


def build_tower(config: ModelConfig) -> VisionTower:
    """The encoder of a model that sees images, the same way."""
    assert config.vision is not None
    return VisionTower(config.vision, config.dtype)


def build_audio_encoder(config: ModelConfig) -> AudioEncoder:
    """The encoder of a model that hears, the same way."""
    assert config.audio is not None
    of = AudioEncoder if config.audio.tokens is None else AudioEmbedder
    return of(config.audio, config.dtype)


def take_formats(config: ModelConfig, blocks: nnx.Module) -> None:
    """Put the weights of all linear layers of blocks into the config's formats."""
    for _, part in nnx.iter_modules(blocks):
        if isinstance(part, Linear):
            part.take_formats(config.formats)
    for _, part in nnx.iter_modules(blocks):
        if isinstance(part, DecoderBlock):
            part.take_formats()


class Widened(NamedTuple):
    """Whether products make some weights whole in the model's type first: of linear layers, of experts, and of the head."""

    linears: bool
    experts: bool
    head: bool = False
    head_in_tiles: bool = False
    """Whether the head is multiplied as it is stored: by kernels, or on a CPU in lanes."""

    @classmethod
    def of(cls, model: nnx.Module) -> "Widened":
        """Read it from the formats of a model's weights. Weights in tiles and lanes do not count: they are multiplied as they are."""
        head_paths = {(*path, "weight") for path, part in nnx.iter_modules(model) if isinstance(part, Embedding)}
        packed = weights(model)
        of_head = [weight for weight in packed if weight.path in head_paths]
        others = [weight for weight in packed if weight.path not in head_paths]
        found = {_is_of_experts(weight) for weight in others if weight.format.widens_in_products}
        in_tiles = any(weight.format.stored_parts is not None for weight in of_head)
        return cls(False in found, True in found, any(weight.format.widens_in_products for weight in of_head), in_tiles)


def num_parameters(config: ModelConfig) -> int:
    """Values in the checkpoint, of an encoder of images or audio too: copies of KV heads, padding and scales not counted, a tied head, and
    of models without videos the frames of a patch, counted once."""
    plain = dataclasses.replace(config.as_stored(), formats=())
    return sum(math.prod(leaf.shape) for leaf in _leaves(plain))


def weight_bytes(config: ModelConfig) -> int:
    """Bytes of all weights as stored, on all devices together: copies of KV heads and padding not counted."""
    return sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in _leaves(config.as_stored()))


def bytes_per_expert_value(config: ModelConfig) -> float:
    """Bytes of a value of the weights of experts as stored, scales counted in. The model must have experts."""

    def size(config: ModelConfig, of_item: Callable[[ParamSpec], int]) -> int:
        found = (weight for weight in weights(build_model(config)) if {"gate_up", "down"} & set(weight.path))
        return sum(math.prod(v.shape) * of_item(v) for weight in found if _is_of_experts(weight) for v in weight.parts.values())

    stored = config.as_stored()
    num_values = size(dataclasses.replace(stored, formats=()), lambda v: 1)
    return size(stored, lambda v: jnp.dtype(v.dtype).itemsize) / num_values


def _is_of_experts(weight: Weight) -> bool:
    return all(spec.axes[0] in ("experts", "split_experts") for spec in weight.parts.values())


def _leaves(config: ModelConfig) -> list[nnx.Variable]:
    models: list[nnx.Module] = [build_model(config)]
    if config.vision is not None and config.vision.encoder is not None:
        models.append(build_tower(config))
    if config.audio is not None:
        models.append(build_audio_encoder(config))
    return [variable for model in models for _, variable in parameters(model)]

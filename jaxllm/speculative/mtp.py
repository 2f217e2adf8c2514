"""Drafts of the layers for multi-token prediction that a checkpoint has behind the target's. Source: arXiv:2412.19437, section 2.2.

Each module combines the hidden state of a token, after the target's last norm, with the embedding of the next token. A single one goes on
from its own results; of several, `mtp_modules` has each make one draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jaxllm.errors import ConfigError
from jaxllm.layers.build import take_formats
from jaxllm.layers.decoder import DecoderBlock
from jaxllm.layers.linear import Linear
from jaxllm.layers.norm import Normalization
from jaxllm.layers.source import Module
from jaxllm.layers.step import Step
from jaxllm.loaders.dummy import dummy_weights
from jaxllm.loaders.load import load_checkpoint
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Attention, LatentAttention, Layer, MoE, StateMixer
from jaxllm.parallel.shards import Shards
from jaxllm.progress import Progress, bytes_loaded
from jaxllm.runner.drafter import Drafting
from jaxllm.speculative.predictor import HiddenStateDrafter


class NextTokenModule(nnx.Module):
    """A few layers, with norms of what goes in and what comes out; embedding and head are the target's."""

    def __init__(self, config: ModelConfig, layers: range | None = None):
        """layers: those of the config that are its own; None: all."""
        layers = range(config.num_layers) if layers is None else layers
        D, part = config.hidden_size, config.next_token
        self.token_ids = nnx.data(None)

        def norm(name: str) -> Normalization:
            return Normalization(replace(config.norm, name=name), D, "embed", config.dtype)

        self.embedding_norm, self.hidden_norm, self.norm = norm(part.embedding_norm), norm(part.hidden_norm), norm(part.norm)
        self.joined = Linear("td,dh->th", (2 * D, D), ("embed", "embed"), config.dtype, modules=[Module(part.joined, (D,))])
        self.blocks = nnx.List([DecoderBlock(config, layer) for layer in layers])
        attends = (place for place, layer in enumerate(layers) if config.layers[layer].attention is not None)
        self.last_attention = max(attends, default=0)
        for block in self.blocks:
            take_formats(config, block)

    def hidden(self, drafting: Drafting) -> Array:
        return drafting.hidden_TD

    def __call__(self, target: Any, hidden_TD: Array, step: Step, kept_R: Array | None = None) -> tuple[Array, Array]:
        part_TD = target.embedding(step.token_ids_T, step.shards)
        _, embedded_TD = step.shards.add_and_norm(part_TD, None, self.embedding_norm)
        x_TD = self.joined(jnp.concatenate([embedded_TD, self.hidden_norm(hidden_TD)], axis=-1))
        runs = [(x_TD, self.blocks[0].first_norm(x_TD))]
        norms = [*(block.first_norm for block in self.blocks[1:]), self.norm]
        for layer, (block, norm) in enumerate(zip(self.blocks, norms, strict=True)):
            runs = block(runs, norm, step, kept_R if layer == self.last_attention else None)
        ((_, out_TD),) = runs
        return out_TD, out_TD

    def logits(self, target: Any, hidden_RD: Array, shards: Shards) -> Array:
        return target.logits(hidden_RD, shards)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class MultiTokenPrediction(HiddenStateDrafter):
    """Proposes with the first module that the checkpoint has."""

    def load(self, mesh: Mesh, progress: Progress) -> nnx.State:
        """Raises ModelLoadError."""
        report = bytes_loaded(progress)
        if self.load_format == "dummy":
            return dummy_weights(self.config, self.model, mesh, seed=self.seed, progress=report, build=NextTokenModule)
        return load_checkpoint(
            self.config, self.model, self.directory, mesh=mesh, load_format=self.load_format, progress=report
        )


def make(
    directory: Path, target: ModelConfig, *, tensor_parallel_size: int = 1, num_expert_devices: int = 1, **fields: Any
) -> MultiTokenPrediction:
    """The drafter that a target's checkpoint holds, with these fields. target: split over the devices. num_expert_devices: those that
    whole experts are distributed to. Raises ConfigError."""
    if not target.num_spare_layers:
        raise ConfigError(
            f"{directory} ({target.architecture}) has no layers for multi-token prediction (num_nextn_predict_layers or "
            "mtp_num_hidden_layers in config.json); "
            "choose another method than mtp"
        )
    if fields.get("load_format") == "orbax":
        raise ConfigError("load_format is orbax, whose checkpoints have no layers for multi-token prediction; load safetensors")
    config = first_module(target, num_expert_devices, tensor_parallel_size)
    return MultiTokenPrediction(config=config, target=target, model=NextTokenModule(config), directory=directory, **fields)


def first_module(target: ModelConfig, num_expert_devices: int, size: int) -> ModelConfig:
    """The layers of the first module; all other tensors of the checkpoint are ignored. size: devices that split tensors. Raises
    ConfigError."""
    names, part, first = target.names, target.next_token, target.num_layers
    layer = part.layer or target.layer_name(first)
    others = [f"{name}." for i in range(first + target.num_spare_layers) if (name := target.layer_name(i)) != layer]
    outside = [f"{name}." for name in (names.embedding, names.head, target.norm.name)]
    part = part.named(layer.format(0))
    names = replace(names, layer=layer, ignored=(*names.ignored, *others, *part.shared, *outside))
    # A layer with linear attention is not what predicts, wherever it stands in the target.
    like = next(each for each in reversed(target.layers) if isinstance(each.attention, (Attention, LatentAttention)))
    layers = tuple(each.split(size) for each in part.layers) or (
        _without_copies(_with_own_index(like, target.layers), num_expert_devices),
    )
    if any(isinstance(each.attention, StateMixer) for each in layers):
        raise ConfigError(
            f"{target.architecture} has layers for multi-token prediction with states by row, which cannot be taken back when a draft "
            "proves wrong; choose another method than mtp"
        )
    return replace(target, layers=layers, names=names, next_token=part, num_spare_layers=0)


def _with_own_index(like: Layer, layers: Sequence[Layer]) -> Layer:
    """A layer that chooses the tokens that it attends to, if one of these does and this takes the choice of another."""
    part = like.attention
    if not isinstance(part, LatentAttention) or part.top_k is None:
        return like
    others = (each.attention for each in reversed(layers) if isinstance(each.attention, LatentAttention))
    index = next(other.index for other in others if other.index is not None)
    return replace(like, attention=replace(part, index=index))


def _without_copies(layer: Layer, num_devices: int) -> Layer:
    """With each expert once, if devices then have as many: tokens of a drafter's experts are not counted, so copies would lie idle."""
    if not isinstance(layer.mlp, MoE):
        return layer
    if layer.mlp.routing.num_experts % num_devices:
        return layer
    return replace(layer, mlp=layer.mlp.as_stored())

"""Drafts of the layers for multi-token prediction that a checkpoint has behind the target's. Source: arXiv:2412.19437, section 2.2.

Each combines the hidden state of a token, after the target's last norm, with the embedding of the next token. Where a checkpoint has
several of these layers, only the first is used: it goes on from its own results.
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
from jaxllm.model_parts import Attention, LatentAttention, Layer, MoE
from jaxllm.parallel.shards import Shards
from jaxllm.progress import Progress, bytes_loaded
from jaxllm.runner.drafter import Drafting
from jaxllm.speculative.predictor import HiddenStateDrafter

_BEHIND = {"embedding": "enorm", "hidden": "hnorm", "joined": "eh_proj", "last": "shared_head.norm"}
_APART = {"embedding": "pre_fc_norm_embedding", "hidden": "pre_fc_norm_hidden", "joined": "fc", "last": "norm"}
"""Names of what stands around the layer: of a further layer of the target, in which they are; and behind `Names.next_token`."""


class NextTokenLayer(nnx.Module):
    """A layer like the target's last with attention, with norms of what goes in and what comes out; embedding and head are the target's."""

    def __init__(self, config: ModelConfig):
        D, apart = config.hidden_size, config.names.next_token
        prefix, names = (f"{config.layer_name(0)}.", _BEHIND) if apart is None else (f"{apart}.", _APART)
        self.token_ids = nnx.data(None)

        def norm(part: str) -> Normalization:
            return Normalization(replace(config.norm, name=names[part]), D, "embed", config.dtype, prefix=prefix)

        self.embedding_norm, self.hidden_norm, self.norm = norm("embedding"), norm("hidden"), norm("last")
        module = Module(f"{prefix}{names['joined']}", (D,))
        self.joined = Linear("td,dh->th", (2 * D, D), ("embed", "embed"), config.dtype, modules=[module])
        self.block = DecoderBlock(config, 0)
        take_formats(config, self.block)

    def hidden(self, drafting: Drafting) -> Array:
        return drafting.hidden_TD

    def __call__(self, target: Any, hidden_TD: Array, step: Step, kept_R: Array | None = None) -> tuple[Array, Array]:
        part_TD = target.embedding(step.token_ids_T, step.shards)
        _, embedded_TD = step.shards.add_and_norm(part_TD, None, self.embedding_norm)
        x_TD = self.joined(jnp.concatenate([embedded_TD, self.hidden_norm(hidden_TD)], axis=-1))
        ((_, out_TD),) = self.block([(x_TD, self.block.attention_norm(x_TD))], self.norm, step, kept_R)
        return out_TD, out_TD

    def logits(self, target: Any, hidden_RD: Array, shards: Shards) -> Array:
        return target.logits(hidden_RD, shards)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class MultiTokenPrediction(HiddenStateDrafter):
    """Proposes with the first layer behind the target's."""

    def load(self, mesh: Mesh, progress: Progress) -> nnx.State:
        """Raises ModelLoadError."""
        report = bytes_loaded(progress)
        if self.load_format == "dummy":
            return dummy_weights(self.config, self.model, mesh, seed=self.seed, progress=report, build=NextTokenLayer)
        return load_checkpoint(
            self.config, self.model, self.directory, mesh=mesh, load_format=self.load_format, progress=report
        )


def make(directory: Path, target: ModelConfig, *, num_expert_devices: int = 1, **fields: Any) -> MultiTokenPrediction:
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
    config = _config(target, num_expert_devices)
    return MultiTokenPrediction(config=config, target=target, model=NextTokenLayer(config), directory=directory, **fields)


def _config(target: ModelConfig, num_expert_devices: int) -> ModelConfig:
    """One layer, the first behind the target's; all other tensors of the checkpoint are ignored."""
    names, first = target.names, target.num_layers
    name = target.layer_name(first) if names.next_token is None else f"{names.next_token}.layers.0"
    others = [f"{target.layer_name(i)}." for i in range(first + target.num_spare_layers) if target.layer_name(i) != name]
    shared = [f"{name}.{part}." for part in ("embed_tokens", "shared_head.head")]
    outside = [f"{name}." for name in (names.embedding, names.head, target.norm.name)]
    names = replace(names, layer=name, ignored=(*names.ignored, *others, *shared, *outside))
    # A layer with linear attention is not what predicts, wherever it stands in the target.
    like = next(each for each in reversed(target.layers) if isinstance(each.attention, (Attention, LatentAttention)))
    layer = _without_copies(_with_own_index(like, target.layers), num_expert_devices)
    return replace(target, layers=(layer,), names=names, num_spare_layers=0)


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

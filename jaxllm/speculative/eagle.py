"""Drafts of decoder layers trained on the target's hidden states. Sources: arXiv:2401.15077 (EAGLE), arXiv:2503.01840 (EAGLE-3).

EAGLE goes on from the hidden state after the target's last norm and predicts the next one. EAGLE-3 takes what enters some of the
target's layers, mostly three, and has a separate head, often for the likelier part of the vocabulary only. Most heads have one layer; in
those with more, the later ones are ordinary layers.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.errors import ConfigError, ModelLoadError
from jaxllm.layers.decoder import DecoderBlock
from jaxllm.layers.linear import Linear
from jaxllm.layers.norm import make_norm
from jaxllm.layers.source import Module
from jaxllm.layers.step import Step
from jaxllm.loaders.checkpoint import Checkpoint
from jaxllm.loaders.formats import open_checkpoint
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Attention, Layer, Norm
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.load_config import read_config_json
from jaxllm.models.registry import find
from jaxllm.parallel.shards import Shards
from jaxllm.runner.drafter import Drafting
from jaxllm.speculative.predictor import HiddenStateDrafter
from jaxllm.speculative.trained_head import (
    OFFSETS,
    HeadParts,
    TrainedHead,
    TrainedHeadDrafter,
    flat,
    token_ids,
    with_vocabulary,
)

_OF_THIRD = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Flags of EAGLE-3 heads in config.json. Source: the library speculators."""


@dataclass(frozen=True, kw_only=True)
class _Parts(HeadParts):
    """`num_features` 0: EAGLE, which fuses the embedding of the next token with the one hidden state."""

    residual_is_normed: bool
    norms_features: Literal["none", "each", "all"]
    """Whether each of these vectors has a norm, or all together one."""
    feeds_normed: bool
    """Whether a draft is made from the state of the one before after the last norm."""
    has_bias: bool


class EagleHead(TrainedHead):
    """The layers and what is around them."""

    def __init__(self, config: ModelConfig, target: ModelConfig, parts: _Parts):
        super().__init__(config, target, parts)
        H, dtype = config.hidden_size, config.dtype
        inputs = (parts.num_features or 2) * target.hidden_size
        fused = Module("fc", (H,))
        self.fused = Linear("td,dh->th", (inputs, H), ("embed", "embed"), dtype, modules=[fused], bias=parts.has_bias)
        self.block = DecoderBlock(config, 0)
        later = [DecoderBlock(config, layer) for layer in range(1, config.num_layers)]
        self.later = nnx.List(later) if later else nnx.data(None)
        self.feature_norms = nnx.data(None)
        if parts.norms_features != "none":
            self.feature_norms = nnx.List(
                make_norm(replace(config.norm, name=name), width, dtype) for name, width in _feature_norms(parts, target)
            )
        self.hidden_norm = make_norm(_hidden_norm(config) if parts.num_features else None, H, dtype)
        self.norm = make_norm(config.norm if parts.num_features else None, H, dtype)

    def hidden(self, drafting: Drafting) -> Array:
        if not self.parts.num_features:
            return drafting.hidden_TD
        features, norms = drafting.features, self.feature_norms
        if norms is None:
            return self.fused(jnp.concatenate(features, axis=-1))
        if self.parts.norms_features == "all":
            return self.fused(norms[0](jnp.concatenate(features, axis=-1)))
        return self.fused(jnp.concatenate([norm(x_TD) for norm, x_TD in zip(norms, features, strict=True)], axis=-1))

    def __call__(self, target: Any, hidden_TX: Array, step: Step, kept_R: Array | None = None) -> tuple[Array, Array]:
        embedding = target.embedding if self.embedding is None else self.embedding
        part_TD = embedding(step.token_ids_T, step.shards)
        _, embedded_TD = step.shards.add_and_norm(part_TD, None, self.block.attention_norm)  # EAGLE has no norm here
        if self.parts.num_features:
            normed_TD = self.hidden_norm(hidden_TX)
            x_TD = normed_TD if self.parts.residual_is_normed else hidden_TX
            run = (x_TD, jnp.concatenate([embedded_TD, normed_TD], axis=-1))
        else:
            x_TD = self.fused(jnp.concatenate([embedded_TD, hidden_TX], axis=-1))
            run = (x_TD, x_TD)
        later = () if self.later is None else tuple(self.later)
        runs, norms = [run], [*(block.attention_norm for block in later), self.norm]
        for block, norm in zip((self.block, *later), norms, strict=True):
            runs = block(runs, norm, step, kept_R if norm is self.norm else None)
        ((x_TD, out_TD),) = runs
        return out_TD if self.parts.feeds_normed else x_TD, out_TD

    def logits(self, target: Any, hidden_RD: Array, shards: Shards) -> Array:
        return (target if self.head is None else self.head).logits(hidden_RD, shards)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Eagle(TrainedHeadDrafter, HiddenStateDrafter):
    """Proposes with an `EagleHead`."""


def make(
    directory: Path,
    target: ModelConfig,
    *,
    is_third: bool,
    tensor_parallel_size: int = 1,
    **fields: Any,
) -> Eagle:
    """The drafter of a directory with an EAGLE-3 head, or with one of EAGLE, with these fields.

    target: split over the devices. Raises ConfigError and ModelLoadError.
    """
    raw = flat(read_config_json(directory))
    config = _read(raw, directory, target, is_third=is_third)
    layers = _feature_layers(raw, directory, target) if is_third else ()
    is_random = fields.get("load_format") == "dummy"
    checkpoint = None if is_random else open_checkpoint(directory, dtype=config.dtype)
    parts = _parts(checkpoint, config, target, raw, num_features=len(layers))
    if checkpoint is not None:
        config = _check(checkpoint, config, target, parts)
    try:
        config = config.for_tensor_parallel(tensor_parallel_size)
    except ConfigError as error:
        raise ConfigError(f"the draft head {directory}: {error}") from error
    return Eagle(
        config=config,
        target=target,
        model=EagleHead(config, target, parts),
        feature_layers=layers,
        directory=directory,
        **fields,
    )


def _read(raw: Mapping[str, Any], directory: Path, target: ModelConfig, *, is_third: bool) -> ModelConfig:
    """A decoder of the layers, with the vocabulary of the head. It is read as the family reads it that its name contains."""
    names = raw.get("architectures") or ["LlamaForCausalLM"]
    name = re.sub("(?i)eagle-?3?", "", str(names[0]))
    plain = {**raw, "architectures": [name], "vocab_size": raw.get("vocab_size", target.vocab_size)}
    architecture, read, _ = find(plain, directory)
    reader = ConfigReader(architecture, plain, [])
    config = read(reader)
    faults = reader.faults
    first, *later = config.layers
    if any(not isinstance(each.attention, Attention) or not isinstance(each.mlp, MLP) for each in config.layers):
        faults.append(f"{architecture} has no layers as Llama has them, which drafts are computed with")
    if any(each.attention_norm is None for each in config.layers):
        faults.append(f"{architecture} has no norm before attention, as layers have that drafts are computed with")
    if is_third and any(each.attention_post_norm is not None or each.parallel for each in config.layers):
        faults.append(f"{architecture} has other norms than Llama")
    for place in (raw, raw.get("eagle_config") or {}):
        flags = ConfigReader(architecture, place, faults)
        flags.refuse_unless("use_aux_hidden_state", is_third)
        for name in () if is_third else _OF_THIRD:
            flags.refuse_unless(name, False)
        if place.get("norm_before_fc"):
            flags.refuse_unless("fc_norm", False)
    if config.vocab_size != target.vocab_size:
        faults.append(f"vocab_size is {config.vocab_size}, must be the target's {target.vocab_size}")
    width = reader.integer("target_hidden_size", target.hidden_size)
    if width != target.hidden_size:
        faults.append(f"target_hidden_size is {width}, the target's hidden_size is {target.hidden_size}")
    if not is_third and config.hidden_size != target.hidden_size:
        faults.append(f"hidden_size is {config.hidden_size}, must be the target's {target.hidden_size}")
    vocab_size = reader.integer("draft_vocab_size", config.vocab_size) if is_third else config.vocab_size
    if faults:
        raise ModelLoadError(f"{directory / 'config.json'}: {'; '.join(dict.fromkeys(faults))}")
    layers = (_with_two_inputs(first) if is_third else replace(first, attention_norm=None), *later)
    return with_vocabulary(replace(config, layers=layers), target, vocab_size)


def _with_two_inputs(layer: Layer) -> Layer:
    assert isinstance(layer.attention, Attention)
    return replace(layer, attention=replace(layer.attention, num_inputs=2))


def _feature_norms(parts: _Parts, target: ModelConfig) -> list[tuple[str, int]]:
    """Name and width of each norm of the target's vectors."""
    if parts.norms_features == "all":
        return [("input_norm", parts.num_features * target.hidden_size)]
    return [(f"fc_norm.{i}", target.hidden_size) for i in range(parts.num_features)]


def _hidden_norm(config: ModelConfig) -> Norm:
    return replace(config.norm, name=f"{config.layer_name(0)}.hidden_norm")


def _feature_layers(raw: Mapping[str, Any], directory: Path, target: ModelConfig) -> tuple[int, ...]:
    """The layers of the target whose inputs an EAGLE-3 head takes."""
    num_layers, key = target.num_layers, "eagle_aux_hidden_state_layer_ids"
    given = (raw.get("eagle_config") or {}).get(key, raw.get(key))
    if given is None:
        given = [2, num_layers // 2, num_layers - 3]
    is_list = isinstance(given, list) and given and all(type(layer) is int for layer in given)
    if not is_list or not all(0 <= layer <= num_layers for layer in given):
        raise ModelLoadError(
            f"{directory / 'config.json'}: {key} is {json.dumps(given)}, must be a list of layers of the target, 0 to {num_layers}"
        )
    return tuple(given)


def _parts(
    checkpoint: Checkpoint | None, config: ModelConfig, target: ModelConfig, raw: Mapping[str, Any], *, num_features: int
) -> _Parts:
    """Parts of the checkpoint; without one, those that it would have."""
    entries = {} if checkpoint is None else checkpoint.entries
    shares_head = config.hidden_size == target.hidden_size and config.vocab_size == target.vocab_size
    differs = num_features > 0 and (checkpoint is None or not shares_head)
    flags = {name for place in (raw, raw.get("eagle_config") or {}) for name in _OF_THIRD if place.get(name)}
    return _Parts(
        num_features=num_features,
        residual_is_normed="norm_before_residual" in flags,
        norms_features="all" if "norm_before_fc" in flags else "each" if "fc_norm" in flags else "none",
        feeds_normed="norm_output" in flags,
        has_bias="fc.bias" in entries,
        has_embedding="embed_tokens.weight" in entries or config.hidden_size != target.hidden_size,
        has_head="lm_head.weight" in entries or differs,
        has_offsets=OFFSETS in entries or config.vocab_size != target.vocab_size,
    )


def _check(checkpoint: Checkpoint, config: ModelConfig, target: ModelConfig, parts: _Parts) -> ModelConfig:
    """The config with the names that the checkpoint has. Raises ModelLoadError for what does not fit the target."""
    entries, width = checkpoint.entries, target.hidden_size
    wanted = (config.hidden_size, (parts.num_features or 2) * width)
    if "fc.weight" in entries and tuple(entries["fc.weight"].shape) != wanted:
        kind = f"{parts.num_features} hidden states" if parts.num_features else "an embedding and a hidden state"
        raise ModelLoadError(
            f"fc.weight in {checkpoint.directory} is {list(entries['fc.weight'].shape)}, must be {list(wanted)} for {kind} of a target "
            f"of hidden_size {width}; give the head that was trained for this target"
        )
    if parts.has_offsets:
        token_ids(checkpoint, config.vocab_size, target)
    names = config.names
    if config.num_layers == 1 and any(name.startswith("midlayer.") for name in entries):
        names = replace(names, layer="midlayer")
    if not parts.num_features:  # some converters write the norm that EAGLE does not have
        names = replace(names, ignored=(*names.ignored, f"{names.layer.format(0)}.input_layernorm."))
    return replace(config, names=names)

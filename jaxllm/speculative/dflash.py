"""Drafts of block diffusion: layers propose all drafts of a step in one pass. Source: arXiv:2602.06036 (DFlash) and its authors' code.

Each layer's keys and values of earlier tokens are made of the target's hidden states at some depths, fused and normed, the same for all
layers. The latest token and a mask in the place of each draft pass through the layers; they see all earlier tokens and each other, also
the later ones. A layer with a window is causal, as vLLM has it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.errors import ConfigError, ModelLoadError
from jaxllm.layers.decoder import DecoderBlock
from jaxllm.layers.linear import Linear
from jaxllm.layers.norm import make_norm
from jaxllm.layers.source import Module
from jaxllm.loaders.checkpoint import Checkpoint
from jaxllm.loaders.formats import open_checkpoint
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Attention, Layer
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.load_config import read_config_json
from jaxllm.models.registry import find
from jaxllm.runner.drafter import Drafting
from jaxllm.speculative.trained_head import (
    OFFSETS,
    HeadParts,
    TrainedHead,
    TrainedHeadDrafter,
    flat,
    token_ids,
    with_vocabulary,
)

_ARCHITECTURES = ("DFlashDraftModel", "DFlashSpeculator")
_WINDOWED = "sliding_attention"
_KNOWN = ("target_layer_ids", "mask_token_id", "block_size", "causal", "use_swa", "swa_window_size", "use_aux_hidden_state")
"""Keys of `dflash_config` that are read."""
_REFUSED = (
    "use_swa",
    "sliding_window_non_causal",
    "sample_from_anchor",
    "fc_layernorm",
    "attention_sink_bias",
    "add_swa_attention_sink_bias",
)
"""Flags of heads that compute otherwise."""


@dataclass(frozen=True, kw_only=True)
class _Parts(HeadParts):
    """With what of its config.json is not in a ModelConfig."""

    mask_token_id: int
    are_causal: tuple[bool, ...]
    """Whether tokens of a block see only earlier ones, by layer."""


class BlockDiffusionHead(TrainedHead):
    """The layers and what is around them."""

    def __init__(self, config: ModelConfig, target: ModelConfig, parts: _Parts):
        super().__init__(config, target, parts)
        H, dtype = config.hidden_size, config.dtype
        self.embedding_scale = target.embedding_scale
        fused, inputs = Module("fc", (H,)), parts.num_features * target.hidden_size
        self.fused = Linear("td,dh->th", (inputs, H), ("embed", "embed"), dtype, modules=[fused])
        self.blocks = nnx.List([DecoderBlock(config, layer) for layer in range(config.num_layers)])
        self.hidden_norm = make_norm(replace(config.norm, name="hidden_norm"), H, dtype)
        self.norm = make_norm(config.norm, H, dtype)

    def take_in(self, drafting: Drafting) -> None:
        """Write keys and values of a step's tokens."""
        fused_TD = self.hidden_norm(self.fused(jnp.concatenate(drafting.features, axis=-1)))
        step = drafting.same_step(drafting.token_ids_T)
        for block in self.blocks:
            assert block.attention is not None
            block.attention([fused_TD], step)  # whose result nothing reads, so that none is computed

    def propose(self, drafting: Drafting) -> Array:
        """Logits float32 [R, drafts, V] of this device's columns of its vocabulary."""
        num_rows, masks = len(drafting.token_R), (drafting.num_wanted,)
        token_RW = jnp.pad(drafting.token_R[:, None], ((0, 0), (0, *masks)), constant_values=self.parts.mask_token_id)
        kinds = set(self.parts.are_causal)
        steps = {causal: drafting.run_step(token_RW, drafting.position_R, sees_later=not causal) for causal in kinds}
        shards, target = drafting.shards, drafting.target
        part_TD = (target.embedding if self.embedding is None else self.embedding)(token_RW.reshape(-1), shards)
        if self.embedding is None and self.embedding_scale != 1.0:
            part_TD = part_TD * jnp.asarray(self.embedding_scale, part_TD.dtype)
        runs = [shards.add_and_norm(part_TD, None, self.blocks[0].first_norm)]
        norms = [*(block.first_norm for block in list(self.blocks)[1:]), self.norm]
        for block, norm, causal in zip(self.blocks, norms, self.parts.are_causal, strict=True):
            runs = block(runs, norm, steps[causal])
        out_RWD = runs[0][1].reshape(num_rows, 1 + drafting.num_wanted, -1)
        head = target if self.head is None else self.head
        logits_TV = head.logits(out_RWD[:, 1:].reshape(-1, out_RWD.shape[-1]), shards)
        return logits_TV.reshape(num_rows, drafting.num_wanted, -1)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class BlockDiffusion(TrainedHeadDrafter):
    """Proposes with a `BlockDiffusionHead`."""

    @property
    def num_lookahead(self) -> int:
        return self.num_drafts + 1

    def follow(self, model: BlockDiffusionHead, state: tuple[()], drafting: Drafting) -> tuple[()]:
        """Keep up with the cache, without which no later draft would be right."""
        model.take_in(drafting)
        return state

    def propose(self, model: BlockDiffusionHead, state: tuple[()], drafting: Drafting) -> tuple[tuple[()], Array]:
        model.take_in(drafting)
        logits_RNV, ids_V = model.propose(drafting), None if model.token_ids is None else model.token_ids[...]
        drafts = [
            self.choose(logits_RNV[:, i], drafting.position_R + i + 1, drafting, ids_V) for i in range(drafting.num_wanted)
        ]
        return state, jnp.stack(drafts, axis=1)


def make(directory: Path, target: ModelConfig, *, tensor_parallel_size: int = 1, **fields: Any) -> BlockDiffusion:
    """The drafter of a directory with such a head, with these fields.

    target: split over the devices. Raises ConfigError and ModelLoadError.
    """
    raw = flat(read_config_json(directory))
    reader = ConfigReader("a head of DFlash", {**raw, **(raw.get("dflash_config") or {})}, [])
    _refuse_others(raw, reader)
    config = _read(raw, reader, directory, target)
    config, are_causal = _with_windows(config, reader)
    layers, mask = _feature_layers(reader, target), reader.count("mask_token_id")
    if mask >= target.vocab_size:
        reader.faults.append(f"mask_token_id is {mask}, must be one of the target's {target.vocab_size} tokens")
    if reader.faults:
        raise ModelLoadError(f"{directory / 'config.json'}: {'; '.join(dict.fromkeys(reader.faults))}")
    _check_block(reader.raw.get("block_size"), fields["num_drafts"], directory)
    is_random = fields.get("load_format") == "dummy"
    checkpoint = None if is_random else open_checkpoint(directory, dtype=config.dtype)
    parts = _parts(checkpoint, config, target, num_features=len(layers), mask_token_id=mask, are_causal=are_causal)
    if checkpoint is not None:
        _check(checkpoint, config, target, parts)
    try:
        config = config.for_tensor_parallel(tensor_parallel_size)
    except ConfigError as error:
        raise ConfigError(f"the draft head {directory}: {error}") from error
    model = BlockDiffusionHead(config, target, parts)
    return BlockDiffusion(config=config, target=target, model=model, feature_layers=layers, directory=directory, **fields)


def _refuse_others(raw: Mapping[str, Any], reader: ConfigReader) -> None:
    """Faults for heads that compute otherwise."""
    reader.refuse_unless("model_type", "qwen3", "speculators", "dflash")
    reader.refuse_unless("speculators_model_type", "dflash")
    reader.refuse_unless("use_aux_hidden_state", True)
    reader.refuse_unless("is_neox_style", True)
    reader.refuse_unless("logit_scale", 1, 1.0)
    for name in _REFUSED:
        reader.refuse_unless(name, False)
    others = [name for name in raw.get("architectures") or () if name not in _ARCHITECTURES]
    reader.faults += [f"architectures has {name}, supported: {' or '.join(_ARCHITECTURES)}" for name in others]
    unknown = [name for name in raw.get("dflash_config") or {} if name not in _KNOWN]
    reader.faults += [f"dflash_config has {name}, which is not known" for name in unknown]


def _read(raw: Mapping[str, Any], reader: ConfigReader, directory: Path, target: ModelConfig) -> ModelConfig:
    """A decoder of the layers, which are those of Qwen 3 whatever the target has, with the vocabulary of the head."""
    windows = ("layer_types", "use_sliding_window", "sliding_window")
    plain = {name: value for name, value in raw.items() if name not in windows}
    plain |= {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": raw.get("vocab_size", target.vocab_size),
    }
    architecture, read, _ = find(plain, directory)
    config = read(ConfigReader(architecture, plain, reader.faults))
    for name in ("vocab_size", "hidden_size"):
        found, wanted = getattr(config, name), getattr(target, name)
        if found != wanted:
            reader.faults.append(f"{name} is {found}, must be the target's {wanted}")
    vocab_size = reader.integer("draft_vocab_size", config.vocab_size)
    return with_vocabulary(config, target, vocab_size)


def _with_windows(config: ModelConfig, reader: ConfigReader) -> tuple[ModelConfig, tuple[bool, ...]]:
    """The config with the windows of its layers, and which layers are causal: unless it says otherwise, those with windows."""
    kinds, all_full = reader.raw.get("layer_types"), ["full_attention"] * config.num_layers
    kinds = all_full if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != config.num_layers or not {*kinds} <= {"full_attention", _WINDOWED}:
        reader.faults.append(
            f"layer_types is {json.dumps(kinds)}, must name full_attention or {_WINDOWED} for each of {config.num_layers} layers"
        )
        kinds = all_full
    if _WINDOWED not in kinds:
        causal = reader.boolean("is_causal", reader.boolean("causal"))
        return config, (causal,) * config.num_layers
    window = reader.integer("swa_window_size", reader.integer("sliding_window"))
    are_causal = tuple(reader.boolean("is_causal", reader.boolean("causal", kind == _WINDOWED)) for kind in kinds)
    if any(kind == _WINDOWED and not causal for kind, causal in zip(kinds, are_causal, strict=True)):
        reader.faults.append("causal is false with layers that have windows, which is not supported")
    windows = (window if kind == _WINDOWED else None for kind in kinds)
    return replace(config, layers=tuple(map(_with_window, config.layers, windows))), are_causal


def _with_window(layer: Layer, window: int | None) -> Layer:
    assert isinstance(layer.attention, Attention)
    return replace(layer, attention=replace(layer.attention, window=window))


def _feature_layers(reader: ConfigReader, target: ModelConfig) -> tuple[int, ...]:
    """The layers of the target whose inputs it takes. `target_layer_ids` names those whose results they are."""
    inputs = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
    key = next((name for name in inputs if name in reader.raw), "target_layer_ids")
    given, behind = reader.raw.get(key), int(key not in inputs)
    # Of the last layer's result some take it before the model's norm and some behind it.
    most = target.num_layers - 2 if behind else target.num_layers
    is_list = isinstance(given, list) and given and all(type(layer) is int for layer in given)
    if not is_list or not all(0 <= layer <= most for layer in given or ()):
        reader.faults.append(f"{key} is {json.dumps(given)}, must be a list of layers of the target, 0 to {most}")
        return ()
    return tuple(layer + behind for layer in given or ())


def _check_block(block_size: object, num_drafts: int, directory: Path) -> None:
    """Raise ConfigError for more drafts than the head was trained for."""
    if isinstance(block_size, int) and num_drafts >= block_size:
        raise ConfigError(
            f"num_speculative_tokens is {num_drafts}, the draft head {directory} proposes at most {block_size - 1}: its block_size is "
            f"{block_size}, with the token that they follow"
        )


def _parts(checkpoint: Checkpoint | None, config: ModelConfig, target: ModelConfig, **fields: Any) -> _Parts:
    """Parts of the checkpoint; without one, those that it would have."""
    entries, has_others = {} if checkpoint is None else checkpoint.entries, config.vocab_size != target.vocab_size
    return _Parts(
        **fields,
        has_embedding="embed_tokens.weight" in entries,
        has_head="lm_head.weight" in entries or has_others,
        has_offsets=OFFSETS in entries or has_others,
    )


def _check(checkpoint: Checkpoint, config: ModelConfig, target: ModelConfig, parts: _Parts) -> None:
    """Raise ModelLoadError for what does not fit the target."""
    wanted = (config.hidden_size, parts.num_features * target.hidden_size)
    entry = checkpoint.entries.get("fc.weight")
    if entry is not None and tuple(entry.shape) != wanted:
        raise ModelLoadError(
            f"fc.weight in {checkpoint.directory} is {list(entry.shape)}, must be {list(wanted)} for {parts.num_features} hidden states "
            f"of a target of hidden_size {target.hidden_size}; give the head that was trained for this target"
        )
    if parts.has_offsets:
        token_ids(checkpoint, config.vocab_size, target)

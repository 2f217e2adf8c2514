"""Common parts of the checkpoints of heads trained for a target: EAGLE's, and those of block diffusion."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxllm.errors import ModelLoadError
from jaxllm.layers.embedding import Embedding
from jaxllm.layers.linear import abstract_param
from jaxllm.layers.parameters import axes_of, parameters, state_of
from jaxllm.loaders.checkpoint import INTEGERS, Checkpoint
from jaxllm.loaders.dummy import dummy_weights
from jaxllm.loaders.formats import open_checkpoint
from jaxllm.loaders.load import load_checkpoint
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Names
from jaxllm.parallel.across_hosts import put
from jaxllm.parallel.axes import sharding
from jaxllm.progress import Progress, bytes_loaded
from jaxllm.speculative.with_weights import DrafterWithWeights

OFFSETS = "d2t"
"""The tensor of what is added to ids of the head's vocabulary to get the target's."""


def flat(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json, merged with the layer's where that is a separate object (the library speculators writes it so)."""
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        return raw
    return {**raw, "architectures": None, **layer}


@dataclass(frozen=True, kw_only=True)
class HeadParts:
    """Parts that a checkpoint's head may have."""

    num_features: int
    """Vectors of the target that it fuses."""
    has_embedding: bool
    has_head: bool
    has_offsets: bool


class TrainedHead(nnx.Module):
    """A head's own vocabulary, as far as the checkpoint has one; the rest is the target's. A subclass adds the layers."""

    parts: Any
    embedding: Any
    """Embedding of tokens; None: that of the target."""
    head: Any
    """Head for logits; None: that of the target."""
    token_ids: Any
    """A parameter: the target's ids of the head's vocabulary; None: they are the target's own."""

    def __init__(self, config: ModelConfig, target: ModelConfig, parts: HeadParts):
        """target: of the same number of devices."""
        self.parts = parts
        own = replace(config, vocab_size=target.vocab_size, padded_vocab_size=target.padded_vocab_size)
        self.embedding = Embedding(own, config.names.embedding) if parts.has_embedding else nnx.data(None)
        self.head = Embedding(config, config.names.head) if parts.has_head else nnx.data(None)
        self.token_ids = (
            abstract_param((config.vocab_size,), ("draft_vocab",), "int32", source=OFFSETS, init="zeros")
            if parts.has_offsets
            else nnx.data(None)
        )


@dataclass(frozen=True, kw_only=True)
class TrainedHeadDrafter(DrafterWithWeights):
    """A drafter whose model is a `TrainedHead`."""

    @property
    def described(self) -> Mapping[str, Any]:
        return {**super().described, "parts": asdict(self.model.parts)}

    def load(self, mesh: Mesh, progress: Progress) -> nnx.State:
        """Raises ModelLoadError."""
        has_offsets, report = self.model.token_ids is not None, bytes_loaded(progress)

        def build(config: ModelConfig, has_offsets: bool = has_offsets) -> Any:
            parts = replace(self.model.parts, has_offsets=has_offsets)
            return type(self.model)(config, self.target if config is self.config else self.target.as_stored(), parts)

        if self.load_format == "dummy":
            return dummy_weights(self.config, self.model, mesh, seed=self.seed, progress=report, build=build)
        weights = build(self.config, has_offsets=False)
        options: dict[str, Any] = {"load_format": self.load_format, "mesh": mesh, "progress": report}
        state = load_checkpoint(self.config, weights, self.directory, **options)
        arrays = {path: variable.get_value() for path, variable in parameters(state)}
        if has_offsets:
            ids = token_ids(open_checkpoint(self.directory, self.load_format), self.config.vocab_size, self.target)
            arrays["token_ids",] = put(ids, sharding(mesh, axes_of(self.model.token_ids)))
        return state_of(self.model, arrays)


def with_vocabulary(config: ModelConfig, target: ModelConfig, vocab_size: int) -> ModelConfig:
    """The decoder of a head's layers, with the vocabulary of the head."""
    return replace(
        config,
        norm=replace(config.norm, name="norm"),
        names=Names("embed_tokens", "layers.{}", "lm_head", ("t2d", OFFSETS)),
        vocab_size=vocab_size,
        padded_vocab_size=vocab_size,
        tie_word_embeddings=False,
        dtype=target.dtype,
        kv_cache_dtype=target.kv_cache_dtype,
    )


def token_ids(checkpoint: Checkpoint, vocab_size: int, target: ModelConfig) -> np.ndarray:
    """The target's ids of the head's vocabulary, int32. Raises ModelLoadError."""
    entry = checkpoint.entries.get(OFFSETS)
    told = "missing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
    if entry is None or entry.dtype not in INTEGERS or tuple(entry.shape) != (vocab_size,):
        raise ModelLoadError(
            f"{OFFSETS} in {checkpoint.directory} is {told}, must be {vocab_size} integers: what is added to the ids of the head's "
            f"draft_vocab_size {vocab_size} to get the target's"
        )
    ids = np.arange(vocab_size) + checkpoint.tensor(OFFSETS)
    if ids.min() < 0 or ids.max() >= target.vocab_size:
        raise ModelLoadError(
            f"{OFFSETS} in {checkpoint.directory} gives the token ids {ids.min()} to {ids.max()}, must be those of the target's "
            f"{target.vocab_size} tokens"
        )
    return ids.astype(np.int32)

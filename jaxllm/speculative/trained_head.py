"""Common parts of the checkpoints of heads trained for a target: EAGLE's, and those of block diffusion."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxllm.errors import ModelLoadError
from jaxllm.layers.parameters import axes_of, parameters, state_of
from jaxllm.loaders.checkpoint import INTEGERS, Checkpoint
from jaxllm.loaders.dummy import dummy_weights
from jaxllm.loaders.formats import open_checkpoint
from jaxllm.loaders.load import load_checkpoint
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.across_hosts import put
from jaxllm.parallel.axes import sharding
from jaxllm.speculative.with_weights import DrafterWithWeights

OFFSETS = "d2t"
"""The tensor of what is added to ids of the head's vocabulary to get the target's."""


def flat(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json, merged with the layer's where that is a separate object (the library speculators writes it so)."""
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        return raw
    return {**raw, "architectures": None, **layer}


def load_head(
    drafter: DrafterWithWeights, build: Callable[..., nnx.Module], mesh: Mesh, report: Callable[[int, int], None] | None
) -> nnx.State:
    """The values of a drafter's model, whose `token_ids` are the target's ids of its vocabulary or None.

    build: (config, has_offsets=) -> the model of a config, with such ids or without. Raises ModelLoadError.
    """
    has_offsets = drafter.model.token_ids is not None
    if drafter.load_format == "dummy":

        def with_ids(config: ModelConfig) -> nnx.Module:
            return build(config, has_offsets=has_offsets)

        return dummy_weights(drafter.config, drafter.model, mesh, seed=drafter.seed, progress=report, build=with_ids)
    weights = build(drafter.config, has_offsets=False)
    options: dict[str, Any] = {"load_format": drafter.load_format, "mesh": mesh, "progress": report}
    state = load_checkpoint(drafter.config, weights, drafter.directory, **options)
    arrays = {path: variable.get_value() for path, variable in parameters(state)}
    if has_offsets:
        ids = token_ids(open_checkpoint(drafter.directory, drafter.load_format), drafter.config.vocab_size, drafter.target)
        arrays["token_ids",] = put(ids, sharding(mesh, axes_of(drafter.model.token_ids)))
    return state_of(drafter.model, arrays)


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

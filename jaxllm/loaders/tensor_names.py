"""The tensors of a checkpoint by the names that the model has for them, whichever class of the model it was saved from."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from jaxllm.errors import ModelLoadError
from jaxllm.loaders.checkpoint import NUMPY_TYPES, TensorEntry, span_bytes
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MoE

Entries = Mapping[str, TensorEntry]
_OF_NORM = {"gamma": "weight", "beta": "bias"}
"""Names of a norm's tensors in encoders saved from TensorFlow."""


def as_named_here(config: ModelConfig, entries: Entries) -> Entries:
    """The tensors of a text model's checkpoint, those of encoders in it included. Raises ModelLoadError."""
    prefix, _, bare = config.names.embedding.partition(".")
    if f"{bare}.weight" in entries:  # saved as a bare decoder, as embedding models are
        entries = {f"{prefix}.{name}": entry for name, entry in entries.items()}
    if config.encoder is not None:
        entries = {
            re.sub(r"LayerNorm\.(gamma|beta)$", lambda found: f"LayerNorm.{_OF_NORM[found[1]]}", name): entry
            for name, entry in entries.items()
        }
    named = {config.names.named(name): entry for name, entry in entries.items()}
    if len(named) < len(entries):
        raise ModelLoadError(
            "the checkpoint has tensors of two text models, whose names differ before the layers; remove one of them"
        )
    entries = named
    for layer, parts in enumerate(config.layers):
        if isinstance(parts.mlp, MoE) and "{}" in parts.mlp.down:
            for whole, names in _of_all_experts(parts.mlp.module(config.layer_name(layer)), parts.mlp):
                if whole in entries and (each := _split(entries[whole], len(names), parts.mlp.routing.num_experts)):
                    del entries[whole]
                    entries |= {
                        name.format(i): entry
                        for i, of_expert in enumerate(each)
                        for name, entry in zip(names, of_expert, strict=True)
                    }
    return entries


def others_told(config: ModelConfig, entries: Entries) -> str:
    """A text about the tensors of a checkpoint that neither the text model nor an encoder takes; empty: there are none."""
    vision = None if config.vision is None else config.vision.encoder
    encoders = [each for each in (vision, config.audio) if each is not None]
    names = config.names
    left = [name for name in entries if names.is_other(name) or name.startswith(names.ignored)]
    others = [name for name in left if not any(each.name_of(name) for each in encoders)]
    counts = Counter(".".join(name.split(".")[: 2 if name.startswith("model.") else 1]) for name in others)
    size = sum(entries[name].num_bytes for name in others)
    told = ", ".join(f"{prefix} ({count})" for prefix, count in counts.most_common(10))
    return f"{len(others)} tensors of {size / 2**20:.1f} MiB are not of the model, and left out: {told}" if others else ""


def _of_all_experts(prefix: str, moe: MoE) -> Iterator[tuple[str, list[str]]]:
    """The name that a tensor with gates and ups, or downs, of all experts may have, and those of an expert's own, with {} for its
    number."""
    yield f"{prefix}.experts.gate_up_proj", [f"{prefix}.{part}{moe.ending}" for part in moe.gate_up]
    yield f"{prefix}.experts.down_proj", [f"{prefix}.{moe.down}{moe.ending}"]


def _split(entry: TensorEntry, num_parts: int, num_experts: int) -> list[list[TensorEntry]]:
    """The tensors of each expert in one of all, [experts, outputs of all parts, inputs]; none if it has not this form."""
    if len(entry.shape) != 3 or entry.shape[0] != num_experts or entry.shape[1] % num_parts or entry.dtype not in NUMPY_TYPES:
        return []
    dtype, shape = NUMPY_TYPES[entry.dtype], (entry.shape[1] // num_parts, entry.shape[2])
    strides = entry.strides or (math.prod(entry.shape[1:]) * dtype.itemsize, entry.shape[2] * dtype.itemsize, dtype.itemsize)
    own = None if entry.strides is None else strides[1:]
    num_bytes = span_bytes(dtype, shape, strides[1:])

    def part(expert: int, j: int) -> TensorEntry:
        start = entry.start + expert * strides[0] + j * shape[0] * strides[1]
        return replace(entry, shape=shape, start=start, num_bytes=num_bytes, strides=own)

    return [[part(expert, j) for j in range(num_parts)] for expert in range(num_experts)]

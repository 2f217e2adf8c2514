"""Granite with windows: most layers see a window, each head has an attention sink, each layer a separate rope or none; dense, or with
experts and perhaps an MLP in addition to them. Source: IBM's Granite releases, 2026.
"""

import math
from dataclasses import replace
from typing import Any

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Attention, Layer, Routing
from jaxllm.models import granite
from jaxllm.models.config_reader import WINDOWED, ConfigReader

DEFAULTS = {"max_position_embeddings": 8192, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
"""Values of keys that a dense model's config lacks."""
EXPERTS: dict[str, Any] = {"gate_up": ("experts.gate_up_proj",), "down": "experts.down_proj", "ending": ""}
"""Names of the tensors of all experts of a layer."""


def read(c: ConfigReader) -> ModelConfig:
    """Dense."""
    return _read(c.with_defaults(**DEFAULTS))


def _read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(sliding_window=128)
    windowed, thetas = c.layer_kinds(WINDOWED, lambda layer: layer % 4 != 0), thetas_of_layers(c)
    config = granite.read(c)

    def layer(base: Layer, has_window: bool, theta: float | None) -> Layer:
        assert isinstance(base.attention, Attention) and base.attention.rope is not None
        rope = base.attention.rope if theta is None else replace(base.attention.rope, theta=theta) if theta else None
        window = c.integer("sliding_window") if has_window else None
        return replace(base, attention=replace(base.attention, rope=rope, window=window, sinks=True))

    return replace(config, layers=tuple(map(layer, config.layers, windowed, thetas)))


def read_moe(c: ConfigReader) -> ModelConfig:
    """With experts."""
    config = _read(c)
    routing = Routing(
        c.integer("num_local_experts", 8), c.integer("num_experts_per_tok", 2), "softmax_of_chosen", router="router"
    )
    width = c.count("shared_intermediate_size", 0)
    shared = MLP(width, name="shared_mlp", gate_up=("input_linear",), down="output_linear") if width else None
    moe = c.moe(routing, c.integer("intermediate_size"), shared=shared, name="block_sparse_moe", **EXPERTS)
    return replace(config, layers=tuple(replace(layer, mlp=moe) for layer in config.layers))


def thetas_of_layers(c: ConfigReader) -> list[float | None]:
    """The base of each layer's rope: 0 for none, None for the model's."""
    given = c.raw.get("layer_rope_theta")
    if given is None:
        return [None] * c.num_layers
    is_right = isinstance(given, list) and len(given) == c.num_layers
    if not is_right or not all(type(x) in (int, float) and 0 <= x < math.inf for x in given):
        c.faults.append(f"layer_rope_theta is {given!r}, must be a list of {c.num_layers} finite numbers, none negative")
        return [None] * c.num_layers
    return [float(theta) for theta in given]

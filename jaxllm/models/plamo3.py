"""PLaMo 3: norms before and after attention and MLP whose weights are stored from their first values, norms of each head of q and k,
windows in most layers, with another rope. Source: Preferred Networks' PLaMo 3 release, 2025.
"""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Layer, Names
from jaxllm.models.config_reader import WINDOWED, ConfigReader

DEFAULTS = {
    "max_position_embeddings": 10485760,
    "head_dim": 128,
    "sliding_window_pattern": 8,
    "rope_theta": 1000000.0,
    "rope_local_theta": 10000.0,
}
NAMES = Names(layer="model.layers.layers.{}")
OF_MIXER, OF_MLP = 1 / 5, 1 / 5**1.5
"""First values of the weights of norms behind attention and MLP; of others it is 1."""


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(**DEFAULTS)
    rope, max_position = c.rope_of("full_attention")
    local, _ = c.rope_of("sliding_attention", {"rope_theta": c.number("rope_local_theta")})
    norms = (c.rms_norm("mixer.q_norm", weight_offset=1.0), c.rms_norm("mixer.k_norm", weight_offset=1.0))
    attention = replace(c.attention(rope), head_norms=norms, name="mixer", qkv=("qkv_proj",))
    layer = Layer(
        attention,
        c.mlp(gate_up=("gate_up_proj",)),
        attention_norm=c.rms_norm("pre_mixer_norm", weight_offset=1.0),
        mlp_norm=c.rms_norm("pre_mlp_norm", weight_offset=1.0),
        attention_post_norm=c.rms_norm("post_mixer_norm", weight_offset=OF_MIXER),
        mlp_post_norm=c.rms_norm("post_mlp_norm", weight_offset=OF_MLP),
    )
    layers = [
        layer if window is None else replace(layer, attention=replace(attention, rope=local, window=window))
        for window in _windows(c)
    ]
    return c.decoder(layers, max_position, names=NAMES, norm=c.rms_norm("model.norm", weight_offset=1.0))


def _windows(c: ConfigReader) -> list[int | None]:
    """The window of each layer: from a list, or else the same for those of layer_types, or for all but every eighth layer."""
    given = c.raw.get("interleaved_sliding_window") or c.raw.get("sliding_window")
    if isinstance(given, list):
        c.refuse_unless("layer_types", ["full_attention" if window is None else "sliding_attention" for window in given])
        if len(given) == c.num_layers and all(window is None or (type(window) is int and window > 0) for window in given):
            return given
        c.faults.append(f"sliding_window is {given!r}, must be a list of {c.num_layers} positive integers or null")
        return [None] * c.num_layers
    every = c.integer("sliding_window_pattern")
    kinds = c.layer_kinds(WINDOWED, lambda layer: (layer + 1) % every != 0)
    return [c.integer("sliding_window", 2048) if on else None for on in kinds]

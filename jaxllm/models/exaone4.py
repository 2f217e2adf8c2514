"""EXAONE 4: norms behind attention and MLP and of each head; the full layers of a model with windows have no positions.

Source: arXiv:2507.11407.
"""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.models.config_reader import WINDOWED, ConfigReader


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(max_position_embeddings=2048, num_key_value_heads=32, rms_norm_eps=1e-5, sliding_window=4096)
    rope, max_position = c.positions()
    norms = (c.rms_norm("self_attn.q_norm"), c.rms_norm("self_attn.k_norm"))
    attention = replace(c.attention(rope), head_norms=norms)
    if c.raw["sliding_window"] is None:
        return c.decoder([c.post_norm_layer(attention, c.mlp())] * c.num_layers, max_position)
    full = c.post_norm_layer(replace(attention, rope=None), c.mlp())
    windowed = c.post_norm_layer(replace(attention, window=c.integer("sliding_window")), c.mlp())
    pattern = c.raw.get("sliding_window_pattern") or 4  # a number, or a letter for each layer of a period: LLLG
    every = len(pattern) if isinstance(pattern, str) else c.integer("sliding_window_pattern", 4)
    kinds = c.layer_kinds(WINDOWED, lambda layer: (layer + 1) % every != 0)
    return c.decoder([windowed if on else full for on in kinds], max_position)

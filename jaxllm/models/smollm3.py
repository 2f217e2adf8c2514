"""SmolLM3: Llama in which every fourth layer has no positions. Source: Hugging Face's SmolLM3 report, 2025."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.models.config_reader import WINDOWED, ConfigReader

DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
    "rope_theta": 2e6,
}


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(**DEFAULTS)
    rope, max_position = c.positions()
    bias = c.boolean("attention_bias")
    attention = replace(c.attention(rope), bias=bias, out_bias=bias)
    has_rope = c.layers_with_rope()
    window = c.integer_or_none("sliding_window") if c.boolean("use_sliding_window") else None
    kinds = c.layer_kinds(WINDOWED, lambda layer: window is not None and not has_rope[layer])
    mlp = c.mlp(bias=c.boolean("mlp_bias"))
    layers = [
        c.pre_norm_layer(replace(attention, rope=rope if turns else None, window=window if is_windowed else None), mlp)
        for turns, is_windowed in zip(has_rope, kinds, strict=True)
    ]
    return c.decoder(layers, max_position)

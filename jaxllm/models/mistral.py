"""Mistral: Llama with a sliding window over the keys, the same in every layer. Ministral 3: instead of a window, queries that grow with
their positions.

Sources: arXiv:2310.06825, the Ministral 3 release.
"""

from dataclasses import replace
from typing import Any

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import QueryScale
from jaxllm.models.config_reader import ConfigReader

YARN = {
    "type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read(c: ConfigReader, **fields: Any) -> ModelConfig:
    """fields: of the ModelConfig, in place of those of the config."""
    c = c.with_defaults(max_position_embeddings=131072, num_key_value_heads=8, sliding_window=4096)
    rope, max_position = c.positions()
    window = c.integer_or_none("sliding_window")
    attention = replace(c.attention(rope), window=window)
    return c.decoder([c.pre_norm_layer(attention, c.mlp())] * c.num_layers, max_position, **fields)


def read_ministral3(c: ConfigReader, **fields: Any) -> ModelConfig:
    """fields: of the ModelConfig, in place of those of the config."""
    c = c.with_defaults(max_position_embeddings=262144, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5)
    if not c.raw.get("rope_scaling") and not c.raw.get("rope_parameters"):
        c = c.with_values(rope_parameters=YARN)
    rope, max_position = c.positions()
    given = c.within("rope_scaling" if c.raw.get("rope_scaling") else "rope_parameters")
    rate = given.number_or_none("llama_4_scaling_beta")
    scale = None if rate is None else QueryScale(rate, given.integer("original_max_position_embeddings"), offset=0)
    attention = replace(c.attention(rope), window=c.integer_or_none("sliding_window"), query_scale=scale)
    return c.decoder([c.pre_norm_layer(attention, c.mlp())] * c.num_layers, max_position, **fields)

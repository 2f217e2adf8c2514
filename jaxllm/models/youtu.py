"""Youtu-LLM: Llama with the attention over latents of DeepSeek-V3. Source: arXiv:2512.24618."""

from jaxllm.model_config import ModelConfig
from jaxllm.models import deepseek
from jaxllm.models.config_reader import ConfigReader

DEFAULTS = {**deepseek.DEFAULTS, "max_position_embeddings": 131072, "tie_word_embeddings": True}


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(**DEFAULTS)
    rope, max_position = c.positions(interleaved=c.boolean("rope_interleave", True))
    layer = c.pre_norm_layer(deepseek.attention(c, rope), c.mlp())
    return c.decoder([layer] * c.num_layers, max_position)

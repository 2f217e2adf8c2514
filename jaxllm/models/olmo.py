"""OLMo 2 and 3: norms behind attention and MLP, and over all heads of q and k. Sources: arXiv:2501.00656, arXiv:2512.13961."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Attention, Rope
from jaxllm.models.config_reader import WINDOWED, ConfigReader


def read(c: ConfigReader) -> ModelConfig:
    """OLMo 2."""
    c = c.with_defaults(max_position_embeddings=2048, rms_norm_eps=1e-5)
    rope, max_position = c.positions()
    return c.decoder([c.post_norm_layer(_attention(c, rope), c.mlp())] * c.num_layers, max_position)


def read_olmo3(c: ConfigReader) -> ModelConfig:
    """OLMo 3: with windows, in whose layers rope is not scaled."""
    c = c.with_defaults(max_position_embeddings=2048, rms_norm_eps=1e-5, sliding_window=4096)
    rope, max_position = c.rope_of("full_attention")
    local, _ = c.rope_of("sliding_attention", {"rope_theta": c.number("rope_theta", 10000.0)})
    full = c.post_norm_layer(_attention(c, rope), c.mlp())
    windowed = replace(full, attention=replace(_attention(c, local), window=c.integer("sliding_window")))
    kinds = c.layer_kinds(WINDOWED, lambda layer: (layer + 1) % 4 != 0)
    return c.decoder([windowed if on else full for on in kinds], max_position)


def _attention(c: ConfigReader, rope: Rope) -> Attention:
    bias = c.boolean("attention_bias")
    norms = (c.rms_norm("self_attn.q_norm"), c.rms_norm("self_attn.k_norm"))
    return replace(c.attention(rope), bias=bias, out_bias=bias, whole_norms=norms)

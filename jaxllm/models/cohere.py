"""Command R, R+, R7B and A: LayerNorm, attention and MLP side by side, logits scaled; R7B and A have windows, and rope there alone.

Sources: Cohere's model cards of c4ai-command-r-v01, c4ai-command-r-plus and c4ai-command-r7b-12-2024; arXiv:2504.00698.
"""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Attention, Head, Layer, Rope
from jaxllm.models.config_reader import WINDOWED, ConfigReader

DEFAULTS = {"max_position_embeddings": 8192, "logit_scale": 0.0625, "tie_word_embeddings": True}

ORIGINAL = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_gated_activation": True,
    "use_parallel_block": True,
}
"""Keys of Cohere's files that transformers has not."""


def read(c: ConfigReader) -> ModelConfig:
    """Command R and R+."""
    c = c.with_defaults(**DEFAULTS)
    rope, max_position = c.positions(interleaved=True)
    attention = _attention(c, rope)
    if c.boolean("use_qk_norm"):
        norms = (c.layer_norm("self_attn.q_norm", bias=False), c.layer_norm("self_attn.k_norm", bias=False))
        attention = replace(attention, own_norms=norms)
    return _decoder(c, [_layer(c, attention)] * c.num_layers, max_position)


def read_cohere2(c: ConfigReader) -> ModelConfig:
    """Command R7B and A."""
    c = c.with_defaults(**DEFAULTS, sliding_window=4096, sliding_window_pattern=4)
    for name, supported in ORIGINAL.items():
        c.refuse_unless(name, supported)
    rope, max_position = c.positions(interleaved=True)
    full = _layer(c, _attention(c, None))
    windowed = _layer(c, replace(_attention(c, rope), window=c.integer("sliding_window")))
    every = c.integer("sliding_window_pattern")
    kinds = c.layer_kinds(WINDOWED, lambda layer: (layer + 1) % every != 0)
    return _decoder(c, [windowed if on else full for on in kinds], max_position)


def _attention(c: ConfigReader, rope: Rope | None) -> Attention:
    bias = c.boolean("attention_bias")
    return replace(c.attention(rope), bias=bias, out_bias=bias)


def _layer(c: ConfigReader, attention: Attention) -> Layer:
    return Layer(attention, c.mlp(), c.layer_norm("input_layernorm", bias=False), None, parallel=True)


def _decoder(c: ConfigReader, layers: list[Layer], max_position: int) -> ModelConfig:
    norm = c.layer_norm("model.norm", bias=False)
    return c.decoder(layers, max_position, norm=norm, head=Head(scale=c.number("logit_scale")))

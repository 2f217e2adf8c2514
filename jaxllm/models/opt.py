"""OPT: LayerNorm, learned positions, ReLU. Source: arXiv:2205.01068."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Layer, Names, Norm, Positions
from jaxllm.models.config_reader import ConfigReader


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(max_position_embeddings=2048, activation_function="relu", tie_word_embeddings=True)
    c.refuse_unless("do_layer_norm_before", True)
    c.refuse_unless("_remove_final_layer_norm", False)
    c.refuse_unless("layer_norm_elementwise_affine", True)
    c.refuse_unless("word_embed_proj_dim", c.integer("hidden_size"))
    bias, max_position = c.boolean("enable_bias", True), c.integer("max_position_embeddings")
    attention = replace(c.attention(None), bias=bias, out_bias=bias, out="out_proj")
    width, activation = c.integer("ffn_dim"), c.activation("activation_function")
    mlp = MLP(width, activation, gated=False, bias=bias, name="", gate_up=("fc1",), down="fc2")
    layer = Layer(attention, mlp, _norm("self_attn_layer_norm"), _norm("final_layer_norm"))
    return c.decoder(
        [layer] * c.num_layers,
        max_position,
        names=Names("model.decoder.embed_tokens", "model.decoder.layers.{}"),
        positions=Positions("model.decoder.embed_positions", max_position + 2, offset=2),
        norm=_norm("model.decoder.final_layer_norm"),
    )


def _norm(name: str) -> Norm:
    return Norm(name, 1e-5, centred=True, bias=True)

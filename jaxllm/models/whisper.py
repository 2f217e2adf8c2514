"""Whisper: an encoder of audio, and a decoder whose layers attend to it. Source: arXiv:2212.04356."""

from dataclasses import replace
from typing import Any

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Attention, Audio, CrossAttentionLayer, Names, Norm, Positions
from jaxllm.models.config_reader import ConfigReader

DECODER = "model.decoder"


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(activation_function="gelu", tie_word_embeddings=True)
    width, count = c.integer("d_model"), c.integer("max_target_positions", 448)
    audio = encoder(c)
    attention = _attention(width, _num_heads(c, "decoder_attention_heads"))
    layer = CrossAttentionLayer(
        attention,
        _mlp(c, "decoder_ffn_dim"),
        _norm("self_attn_layer_norm"),
        _norm("final_layer_norm"),
        cross=replace(attention, name="encoder_attn"),
        cross_norm=_norm("encoder_attn_layer_norm"),
    )
    return c.decoder(
        [layer] * c.integer("decoder_layers"),
        count,
        hidden_size=width,
        names=Names(f"{DECODER}.embed_tokens", f"{DECODER}.layers.{{}}", "proj_out", (audio.prefix,)),
        positions=Positions(f"{DECODER}.embed_positions", count),
        norm=_norm(f"{DECODER}.layer_norm"),
        audio=audio,
        model_class="jaxllm.layers.cross_attention:CrossAttentionLM",
    )


def encoder(c: ConfigReader, **fields: Any) -> Audio:
    """The encoder of these values. fields: of the Audio."""
    c.refuse_unless("scale_embedding", False)
    return Audio(
        num_bins=c.integer("num_mel_bins", 80),
        num_positions=c.integer("max_source_positions", 1500),
        hidden_size=c.integer("d_model"),
        num_layers=c.integer("encoder_layers"),
        num_heads=_num_heads(c, "encoder_attention_heads"),
        mlp=_mlp(c, "encoder_ffn_dim"),
        **fields,
    )


def _num_heads(c: ConfigReader, name: str) -> int:
    width, num_heads = c.integer("d_model"), c.integer(name)
    if width % num_heads or width // num_heads % 2:
        c.faults.append(f"{name} is {num_heads}, must divide d_model, which is {width}, into heads of even width")
    return num_heads


def _attention(width: int, num_heads: int) -> Attention:
    head_dim = max(1, width // num_heads)
    return Attention(num_heads, num_heads, head_dim, None, bias=True, key_bias=False, out_bias=True, out="out_proj")


def _mlp(c: ConfigReader, width: str) -> MLP:
    activation = c.activation("activation_function")
    return MLP(c.integer(width), activation, gated=False, bias=True, name="", gate_up=("fc1",), down="fc2")


def _norm(name: str) -> Norm:
    return Norm(name, 1e-5, centred=True, bias=True)

"""Qwen 3.5, 3.6 and 3.8 (text): the layers of Qwen 3 Next, with each projection of linear attention apart; dense, or experts in all layers.

Sources: arXiv:2412.06464, arXiv:2505.06708.
"""

from dataclasses import replace
from typing import Any

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, MoE, Names
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.qwen3_next import NEXT_TOKEN, gated_moe, hybrid_layers, linear_attention, offset_norm

DEFAULTS = {"max_position_embeddings": 32768, "head_dim": 256, "partial_rotary_factor": 0.25}
PLAIN = tuple(f"linear_attn.in_proj_{letter}" for letter in "ba")
"""Linear layers that checkpoints in 8 or 4 bits keep plain too: small, and exponentials of their outputs decay the states."""


def read(c: ConfigReader) -> ModelConfig:
    """With dense layers."""
    text, names, norm = _text(c, num_key_value_heads=4)
    return _decoder(text, text.mlp(), names=names, norm=offset_norm(text, norm))


def read_moe(c: ConfigReader) -> ModelConfig:
    """With mixtures of experts."""
    text, names, norm = _text(c, num_key_value_heads=2, num_experts=256, num_experts_per_tok=8)
    return _decoder(text, gated_moe(text.with_values(norm_topk_prob=True)), names=names, norm=offset_norm(text, norm))


def _text(c: ConfigReader, **defaults: int) -> tuple[ConfigReader, Names, str]:
    """The reader of the text model, which may be all of the config; the names of its tensors, and its last norm."""
    text, names, norm = c.text_part("model.language_model", "lm_head")
    return text.with_defaults(**DEFAULTS, **defaults), replace(names, is_part=True, unquantized=PLAIN), norm


def _decoder(c: ConfigReader, mlp: MLP | MoE, **fields: Any) -> ModelConfig:
    for name, supported in {"layer_scale": False, "attn_output_gate": True, "mlp_only_layers": []}.items():
        c.refuse_unless(name, supported)
    c.refuse_unless("output_gate_type", "silu", "sigmoid")
    gate = "sigmoid" if c.raw.get("output_gate_type") == "sigmoid" else "silu"
    layers, max_position = hybrid_layers(c, mlp, linear_attention(c, gate=gate, is_flat=True))
    num_spare = c.count("mtp_num_hidden_layers", 0)
    return c.decoder(layers, max_position, num_spare_layers=num_spare, next_token=NEXT_TOKEN, **fields)

"""ERNIE 4.5 with experts: softmax routing with a correction bias. Source: Baidu's ERNIE 4.5 report, 2025."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, NextToken, Routing
from jaxllm.models import ernie
from jaxllm.models.config_reader import ConfigReader

DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "moe_num_experts": 64,
    "moe_k": 6,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_interval": 1,
    "moe_intermediate_size": 1536,
}
NEXT_TOKEN = NextToken(
    layer="model.mtp_block.{}",
    embedding_norm="model.mtp_emb_norm.{module}",
    hidden_norm="model.mtp_hidden_norm.{module}",
    joined="model.mtp_linear_proj.{module}",
)
"""A dense layer, behind which comes the model's own last norm."""
IGNORED = ("model.mtp_block.", "model.mtp_emb_norm.", "model.mtp_hidden_norm.", "model.mtp_linear_proj.")


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(**DEFAULTS)
    c.refuse_unless("moe_norm_min", 1e-12)
    config = ernie.read(c)
    width, num_shared = c.integer("moe_intermediate_size"), c.count("moe_num_shared_experts")
    routing = Routing(
        c.integer("moe_num_experts"),
        c.integer("moe_k"),
        renormalize=True,
        correction_bias="moe_statics.e_score_correction_bias",
        correction_bias_rank=2,
    )
    shared = (
        MLP(width * num_shared, c.activation(), bias=c.boolean("use_bias"), name="mlp.shared_experts") if num_shared else None
    )
    moe = c.moe(routing, width, shared=shared)
    first, every = c.count("moe_layer_start_index"), c.integer("moe_layer_interval")
    last = c.num_layers - 1 if c.raw.get("moe_layer_end_index") in (None, -1) else c.count("moe_layer_end_index")

    def is_sparse(layer: int) -> bool:
        return (layer + 1) % every == 0 and first <= layer <= last

    layers = tuple(replace(layer, mlp=moe) if is_sparse(i) else layer for i, layer in enumerate(config.layers))
    next_token = replace(NEXT_TOKEN, layers=config.layers[-1:], norm=config.norm.name)
    return replace(config, layers=layers, names=replace(config.names, ignored=IGNORED), next_token=next_token)

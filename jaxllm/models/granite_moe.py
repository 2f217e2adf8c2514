"""Granite 3 with experts: Granite's factors, the experts of a layer in one tensor. Source: IBM's Granite 3.0 report, 2024."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Routing
from jaxllm.models import granite
from jaxllm.models.config_reader import ConfigReader


def read(c: ConfigReader) -> ModelConfig:
    config = granite.read(c)
    routing = Routing(
        c.integer("num_local_experts", 8), c.integer("num_experts_per_tok", 2), "softmax_of_chosen", router="router.layer"
    )
    names = {"name": "block_sparse_moe", "gate_up": ("input_linear",), "down": "output_linear"}
    moe = c.moe(routing, c.integer("intermediate_size"), **names)
    return replace(config, layers=tuple(replace(layer, mlp=moe) for layer in config.layers))

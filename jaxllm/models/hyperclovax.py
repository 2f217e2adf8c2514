"""HyperCLOVA X Think: Granite's factors, norms behind attention and MLP, and logits multiplied. Source: arXiv:2506.22403."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Head
from jaxllm.models import granite
from jaxllm.models.config_reader import ConfigReader


def read(c: ConfigReader) -> ModelConfig:
    scale = c.number("logits_scaling", 1.0)
    c = c.with_defaults(attention_multiplier=None)
    if c.raw["attention_multiplier"] is None:
        c = c.with_values(attention_multiplier=c.head_dim**-0.5)
    config = granite.read(c)
    layers = config.layers
    if c.boolean("use_post_norm", True):
        norms = {"attention_post_norm": c.rms_norm("post_norm1"), "mlp_post_norm": c.rms_norm("post_norm2")}
        layers = tuple(replace(layer, **norms) for layer in layers)  # type: ignore[arg-type]
    return replace(config, layers=layers, head=Head(scale=scale))

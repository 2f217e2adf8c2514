"""A model of two narrow layers for the tests of training."""

from dataclasses import replace

import jax
from flax import nnx

from jaxllm.layers.build import build_model
from jaxllm.models import llama
from jaxllm.models.config_reader import ConfigReader
from scripts.demo_data.initial_weights import init_params

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
CONFIG = replace(llama.read(ConfigReader("LlamaForCausalLM", SIZES)), dtype="float32", kv_cache_dtype="float32")


def sharpened_state() -> nnx.State:
    """Random weights under which some tokens are much likelier than others."""
    return jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim > 1 else leaf, init_params(build_model(CONFIG), jax.random.key(1)))

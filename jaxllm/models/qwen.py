"""Qwen 2, 2.5 and 3: Llama with a window in some layers (`ModelConfig.sliding_window_layers`) and what is named below."""

from jaxllm.models.decoder import CausalLM


class Qwen2ForCausalLM(CausalLM):
    """q, k and v have a bias (`ModelConfig.attention_bias`), the output projection has none. Source: arXiv:2407.10671."""


class Qwen3ForCausalLM(CausalLM):
    """Each head of q and k is normalised before rotation (`ModelConfig.qk_norm`). Source: arXiv:2505.09388."""

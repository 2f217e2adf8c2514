"""Mistral: Llama with a sliding window over the keys, the same in every layer (`ModelConfig.sliding_window`)."""

from jaxllm.models.decoder import CausalLM


class MistralForCausalLM(CausalLM):
    """Source: arXiv:2310.06825."""

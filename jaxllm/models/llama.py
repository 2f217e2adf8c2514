"""Llama 2 and 3: the plain form of the decoder; scaled rotary positions are `ModelConfig.rope`."""

from jaxllm.models.decoder import CausalLM


class LlamaForCausalLM(CausalLM):
    """Source: arXiv:2307.09288, arXiv:2407.21783."""

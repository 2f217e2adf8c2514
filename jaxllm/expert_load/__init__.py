"""How evenly the tokens of a mixture spread over its experts, and over the devices that have them. Does not import JAX."""

from jaxllm.expert_load.feature import make_expert_load

__all__ = ["make_expert_load"]

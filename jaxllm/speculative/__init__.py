"""Speculative decoding: drafters propose tokens, the model verifies them in one step. Importing it does not import JAX."""

from jaxllm.speculative.options import SpeculativeConfig, of_engine

__all__ = ["SpeculativeConfig", "of_engine"]

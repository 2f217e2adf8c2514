"""Audio in the prompts of an engine: what excludes it, and the rooms of its schedulers. Does not import JAX."""

from jaxllm.audio.feature import make_items

__all__ = ["make_items"]

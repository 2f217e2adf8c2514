"""Images in the prompts of an engine: what excludes them, and the rooms of its schedulers. Does not import JAX."""

from jaxllm.vision.feature import make_items

__all__ = ["make_items"]

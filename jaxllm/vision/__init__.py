"""Images in the prompts of an engine: options that exclude them, and the encoder cache of its schedulers. Does not import JAX."""

from jaxllm.vision.feature import make_items

__all__ = ["make_items"]

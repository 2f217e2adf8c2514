"""Context parallelism: devices with the same weights that split the tokens of a step, and the KV cache by tokens.

What it does and when to use it: docs/LONG_PROMPTS.md.
"""

"""Measures how a model's speed grows with the GPUs that its layers are split over, for `jaxllm bench scaling`.

The command's own process never imports JAX; one process per tensor-parallel size measures.
"""

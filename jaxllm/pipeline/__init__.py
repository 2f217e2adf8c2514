"""Pipelines: the layers of a model in stages, each with its own devices, programs, weights and KV cache."""

"""Pipelines: the layers of a model in stages, each with devices, programs, weights and a KV cache of its own."""

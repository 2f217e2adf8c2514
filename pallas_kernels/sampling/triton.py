"""Sampling by Pallas-Triton: the likeliest token, a draw, the top values. Deprecated in JAX 0.11: nothing else depends on it."""

from pallas_kernels.sampling.triton_draw import argmax, draw
from pallas_kernels.sampling.triton_scan import MAX_VOCAB_SIZE
from pallas_kernels.sampling.triton_top import top_values

__all__ = ["argmax", "draw", "supports", "top_values"]


def supports(*, platform: str, vocab_size: int, interpret: bool = False) -> bool:
    return (platform == "gpu" or interpret) and 0 < vocab_size <= MAX_VOCAB_SIZE

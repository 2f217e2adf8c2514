"""Muon for matrices (Keller Jordan, 2024; arXiv:2502.16982) and AdamW for all else, over dictionaries of stacked weights."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from .model import EMBEDDINGS, PATCHES, POSITIONS, Weights

MOMENTUM, BETA1, BETA2 = 0.95, 0.9, 0.98
WEIGHT_DECAY = 0.1
MAX_GRADIENT_NORM = 1.0
MUON_SCALE = 0.2
"""Root mean square of an update of Muon over the rate, about that of AdamW, so that both take the same rate."""


class Moments(NamedTuple):
    """What the optimizer keeps."""

    first: Weights
    second: Weights
    """Of the weights that AdamW changes."""
    step: Array


def is_for_muon(name: str, value: Array) -> bool:
    """Whether it is a matrix between layers, or a stack of them."""
    return name.endswith(".weight") and "norm" not in name and value.ndim >= 2 and name not in (EMBEDDINGS, POSITIONS, PATCHES)


def init_moments(weights: Weights) -> Moments:
    """All zero."""
    first = {name: jnp.zeros_like(value) for name, value in weights.items()}
    second = {name: jnp.zeros_like(value) for name, value in weights.items() if not is_for_muon(name, value)}
    return Moments(first, second, jnp.int32(0))


def orthogonalize(matrix: Array, steps: int = 5) -> Array:
    """Brings the singular values of each matrix near to 1, by Newton-Schulz iterations in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = jnp.swapaxes(matrix, -1, -2) if is_tall else matrix
    x = (x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)).astype(jnp.bfloat16)
    for _ in range(steps):
        square = x @ jnp.swapaxes(x, -1, -2)
        x = a * x + (b * square + c * square @ square) @ x
    x = x.astype(jnp.float32)
    return jnp.swapaxes(x, -1, -2) if is_tall else x


def update(weights: Weights, moments: Moments, gradients: Weights, rate: Array) -> tuple[Weights, Moments]:
    """One step at this learning rate, after the gradient is cut to its longest length."""
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(gradient)) for gradient in gradients.values()))
    cut = jnp.minimum(1.0, MAX_GRADIENT_NORM / (norm + 1e-9))
    step = moments.step + 1
    first, second, changed = {}, {}, {}
    for name, weight in weights.items():
        gradient = gradients[name] * cut
        if is_for_muon(name, weight):
            first[name] = MOMENTUM * moments.first[name] + gradient
            rows, columns = weight.shape[-2:]
            change = MUON_SCALE * max(rows, columns) ** 0.5 * orthogonalize(gradient + MOMENTUM * first[name])
        else:
            first[name] = BETA1 * moments.first[name] + (1 - BETA1) * gradient
            second[name] = BETA2 * moments.second[name] + (1 - BETA2) * jnp.square(gradient)
            mean, square = first[name] / (1 - BETA1**step), second[name] / (1 - BETA2**step)
            change = mean / (jnp.sqrt(square) + 1e-8)
        decay = WEIGHT_DECAY * weight if weight.ndim > 1 and name.endswith(".weight") and "norm" not in name else 0.0
        changed[name] = weight - rate * (change + decay)
    return changed, Moments(first, second, step)

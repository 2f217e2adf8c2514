"""Rotary position embedding (arXiv:2104.09864) and its ways to reach beyond the pretraining's context.

Frequencies are computed as transformers does, in float32 and in the same order of operations, because at position 100 000
the last bit of a frequency is a visible angle.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxllm.model_parts import Rope


def rope_angles(rope: Rope | None, head_dim: int, positions_T: Array) -> tuple[Array, Array]:
    """Cosine and sine, float32 [T, H/2], of every position. Values that are not rotated have the angle 0.

    positions_T: of a rope with sections, either [T], the same in time, row and column, or [3, T].
    """
    if rope is None:
        shape = (len(positions_T), head_dim // 2)
        return jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32)
    width = rope.rotary_dim or head_dim
    if positions_T.ndim == 1:
        positions_T1 = positions_T.astype(jnp.float32)[:, None]
    else:  # another position for each frequency
        assert rope.kind != "dynamic", "its frequencies depend on one position"
        positions_T1 = positions_T.astype(jnp.float32)[axis_of_frequency(rope, width)].T
    if rope.kind == "dynamic":
        angles = positions_T1 * _dynamic_frequencies(rope, width, positions_T1)
    else:
        angles = positions_T1 * frequencies(rope, width)
    cos, sin = jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor
    if width == head_dim:
        return cos, sin
    padding = ((0, 0), (0, (head_dim - width) // 2))
    return jnp.pad(cos, padding, constant_values=1.0), jnp.pad(sin, padding)


def axis_of_frequency(rope: Rope, head_dim: int) -> np.ndarray:
    """Int [H/2] of a rope with sections: whether a frequency turns by time (0), row (1) or column (2). Sources: arXiv:2409.12191 for
    sections one after the other, arXiv:2511.21631 for interleaved ones."""
    assert rope.sections is not None
    if not rope.sections_interleaved:
        return np.repeat(np.arange(3), rope.sections)
    axes = np.zeros(head_dim // 2, int)
    for axis in (1, 2):
        axes[axis : 3 * rope.sections[axis] : 3] = axis
    return axes


def head_order(rope: Rope | None, head_dim: int) -> tuple[int, ...] | None:
    """The order of the values of query and key heads in which value i turns with value i + H/2, by their stored places; None: as
    stored. Products of queries and keys do not depend on it."""
    if rope is None:
        return None
    width = rope.rotary_dim or head_dim
    half = width // 2
    first = [2 * i if rope.interleaved else i for i in range(half)]
    second = [2 * i + 1 if rope.interleaved else i + half for i in range(half)]
    middle = (width + head_dim) // 2
    order = (*first, *range(width, middle), *second, *range(middle, head_dim))
    return None if order == tuple(range(head_dim)) else order


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Radians per position, float32 [H/2], of every kind but dynamic."""
    plain = np.float32(1) / _powers(rope.theta, head_dim)
    if rope.kind == "linear":
        return plain / np.float32(rope.factor)
    if rope.kind == "proportional":
        return np.where(np.arange(head_dim // 2) < (rope.num_turning or 0), plain / np.float32(rope.factor), np.float32(0))
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, head_dim)
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, plain)
    if rope.kind == "longrope":
        return np.float32(1) / (np.array(rope.divisors, np.float32) * _powers(rope.theta, head_dim))
    return plain


def _powers(theta: float, head_dim: int) -> np.ndarray:
    """theta ** (2 i / H)"""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.power(np.float32(theta), exponents, dtype=np.float32)


def _dynamic_frequencies(rope: Rope, head_dim: int, positions_T1: Array) -> Array:
    """Float32 [T, H/2]: the base grows with the sequence, past the pretraining's context.

    A token's rotation depends on its own position only, as if it were the newest of the sequence: so it depends neither on
    how a prompt is cut into chunks nor on the batch, and cached keys stay right. transformers gives the same numbers for
    prompts up to the pretraining's context and everything generated after them; a longer prompt it rotates as a whole by its
    full length.
    """
    assert rope.original_max_position is not None
    length_T1 = jnp.maximum(positions_T1 + 1, rope.original_max_position)
    growth_T1 = rope.factor * length_T1 / rope.original_max_position - (rope.factor - 1)
    base_T1 = rope.theta * growth_T1 ** (head_dim / (head_dim - 2))
    return 1.0 / base_T1 ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))


def _yarn_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Fast dimensions keep their frequency, slow ones are stretched by the factor, a ramp between. Source: arXiv:2309.00071."""
    original = rope.original_max_position
    assert original is not None

    def dimension(rotations: float) -> float:
        """The dimension that turns this many times over the pretraining's context."""
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = np.float32(1) - np.clip(ramp, 0, 1)
    powers = _powers(rope.theta, head_dim)
    return (1 / (np.float32(rope.factor) * powers)) * (1 - keep) + (1 / powers) * keep


def _llama3_frequencies(rope: Rope, plain: np.ndarray) -> np.ndarray:
    """Long waves are stretched by the factor, short ones kept, a smooth passage between. Source: the Llama 3.1 release."""
    assert rope.original_max_position is not None
    original, low, high = (
        np.float32(rope.original_max_position),
        np.float32(rope.low_freq_factor),
        np.float32(rope.high_freq_factor),
    )
    factor = np.float32(rope.factor)
    wavelength = np.float32(2 * math.pi) / plain
    smooth = (original / wavelength - low) / (high - low) if high > low else np.float32(0)  # a step instead of a passage
    between = (1 - smooth) * plain / factor + smooth * plain
    long, short = wavelength > original / low, wavelength < original / high
    return np.where(long, plain / factor, np.where(short, plain, between)).astype(np.float32)

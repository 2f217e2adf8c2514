"""The content of a block outside the KV cache: 32-bit words, in an order in which each device has a separate part.

A device's part is [head][array][token][width] of its heads: those of the arrays with as many heads as the first, then those of the others.
Devices with copies of the same heads, or of latents, share a part. Where devices split the tokens of a block too, all parts of its first
tokens come first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.cache_spec import WORD_BYTES, CacheLayout
from jaxllm.errors import ConfigError

NO_BLOCK = -1
"""In place of a block to write."""


@dataclass(frozen=True)
class Run:
    """Arrays with equal numbers of heads."""

    arrays: tuple[int, ...]
    """Indices in `CacheLayout.arrays`."""
    num_heads: int
    """On each device."""
    head_words: tuple[int, ...]
    """Words of a head of a block in each array."""

    @property
    def num_words(self) -> int:
        """Words of a block on each device."""
        return self.num_heads * sum(self.head_words)


@dataclass(frozen=True)
class BlockFormat:
    """Sizes of a block's parts, and the functions between blocks and rows of a staging buffer on each device."""

    runs: tuple[Run, ...]
    num_devices: int
    """All of them: those that split heads, for each of those that split tokens."""
    num_copies: int
    """Devices that have the same heads: one after the other in the mesh."""
    num_token_parts: int = 1
    """Devices, or groups of those that split heads, that split the tokens of a block."""
    has_views: bool = False
    """Whether layers with other heads than an array's lie in it: see `CacheView`."""

    @classmethod
    def of(cls, layout: CacheLayout, num_devices: int, num_copies: int = 1, num_token_parts: int = 1) -> "BlockFormat":
        """num_devices: that heads are split over. num_copies, num_token_parts: see there. Raises ConfigError for blocks that are no whole
        words."""
        of_heads: dict[int, list[int]] = {}
        for index, array in enumerate(layout.arrays):
            of_heads.setdefault(array.num_heads, []).append(index)

        def head_words(index: int) -> int:
            array = layout.arrays[index]
            num_tokens = layout.block_size // num_token_parts
            words, rest = divmod(num_tokens * array.bytes_per_token, array.num_heads * WORD_BYTES)
            if rest:
                raise ConfigError(
                    f"block_size is {num_tokens}: a head's part of a block is {words * WORD_BYTES + rest} bytes, but is copied in "
                    f"words of {WORD_BYTES}; choose a block_size of 4 or more"
                )
            return words

        runs = (
            Run(tuple(arrays), num_heads // num_devices, tuple(map(head_words, arrays)))
            for num_heads, arrays in of_heads.items()
        )
        return cls(tuple(runs), num_devices * num_token_parts, num_copies, num_token_parts, layout.has_views)

    @property
    def part_words(self) -> int:
        """Words of a device's part."""
        return sum(run.num_words for run in self.runs)

    @property
    def num_parts(self) -> int:
        """Parts of a block that differ."""
        return self.num_devices // self.num_copies

    @property
    def num_sums(self) -> int:
        """Checksums of a device's part: one for each head of each run."""
        return sum(run.num_heads for run in self.runs)

    @property
    def block_bytes(self) -> int:
        """Bytes of all parts."""
        return self.num_parts * self.part_words * WORD_BYTES

    @property
    def arrangement(self) -> dict[str, Any]:
        """Where each byte and checksum of a content is, as JSON values: for arrays with equal numbers of heads, whose parts are whole heads
        one after the other and of no other layers, the same however many devices split them. Devices that split tokens count."""
        num_parts = self.num_parts // self.num_token_parts
        runs = [[run.num_heads * num_parts, *run.head_words] for run in self.runs]
        found = {"heads, and words of each in arrays": runs, "parts": num_parts if len(runs) > 1 or self.has_views else 1}
        return found if self.num_token_parts == 1 else {**found, "parts of tokens": self.num_token_parts}

    def gather(self, caches: Sequence[jax.Array], block_n: jax.Array) -> tuple[jax.Array, jax.Array]:
        """uint32 [n, part_words] and [n, num_sums]: this device's parts of blocks, and their checksums. caches: the device's arrays."""
        parts, sums = [], []
        for run in self.runs:
            words_nHw = jnp.concatenate([_words(caches[index][block_n]) for index in run.arrays], axis=2)
            parts.append(words_nHw.reshape(len(block_n), -1))
            sums.append(checksums(words_nHw))
        return jnp.concatenate(parts, axis=1), jnp.concatenate(sums, axis=1)

    def scatter(
        self, caches: Sequence[jax.Array], block_n: jax.Array, words_nw: jax.Array, sums_nH: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        """The arrays with these parts in blocks, and bool [n]: whether the parts have these checksums. Others are left out, because a NaN
        in a block reaches every later owner of it. A negative block is nowhere."""
        of_heads = self._of_heads(words_nw)
        is_right_n = jnp.all(jnp.concatenate(list(map(checksums, of_heads)), axis=1) == sums_nH, axis=1)
        return self._written(caches, block_n, is_right_n & (block_n >= 0), of_heads), is_right_n

    def write(self, caches: Sequence[jax.Array], block_n: jax.Array, words_nw: jax.Array) -> list[jax.Array]:
        """The arrays with these parts in blocks, which nothing checks. A negative block is nowhere."""
        return self._written(caches, block_n, block_n >= 0, self._of_heads(words_nw))

    def _of_heads(self, words_nw: jax.Array) -> list[jax.Array]:
        """The words of each run: [n, H, words of a head]."""
        split = [words_nw[:, end - run.num_words : end] for run, end in zip(self.runs, self._ends(), strict=True)]
        return [part.reshape(len(words_nw), run.num_heads, -1) for run, part in zip(self.runs, split, strict=True)]

    def _written(
        self, caches: Sequence[jax.Array], block_n: jax.Array, is_wanted_n: jax.Array, of_heads: Sequence[jax.Array]
    ) -> list[jax.Array]:
        written = list(caches)
        # Targets must differ, also those that are dropped because no array has them.
        nowhere_n = jnp.iinfo(jnp.int32).max - jnp.arange(len(block_n), dtype=jnp.int32)
        target_n = jnp.where(is_wanted_n, block_n, nowhere_n)
        for run, words_nHw in zip(self.runs, of_heads, strict=True):
            start = 0
            for index, count in zip(run.arrays, run.head_words, strict=True):
                cache = written[index]
                values = _values(words_nHw[:, :, start : start + count], cache)
                written[index] = cache.at[target_n].set(values, mode="drop", unique_indices=True)
                start += count
        return written

    def _ends(self) -> list[int]:
        sizes = [run.num_words for run in self.runs]
        return [sum(sizes[: index + 1]) for index in range(len(sizes))]


def checksums(words_nHw: jax.Array) -> jax.Array:
    """uint32 [n, H]: the sum of w[i] * (2 i + 1). Any change of one word changes it, and swapping two changes nearly every one."""
    weight_w = 2 * jnp.arange(words_nHw.shape[-1], dtype=jnp.uint32) + 1
    return jnp.sum(words_nHw * weight_w, axis=-1, dtype=jnp.uint32)


def _words(values_nHSF: jax.Array) -> jax.Array:
    """uint32 [n, H, w]: the bits of heads of blocks."""
    n, heads, size, width = values_nHSF.shape
    itemsize = values_nHSF.dtype.itemsize
    bits = jax.lax.bitcast_convert_type(values_nHSF, jnp.dtype(f"uint{8 * itemsize}"))
    if itemsize == WORD_BYTES:
        return bits.reshape(n, heads, size * width)
    return jax.lax.bitcast_convert_type(bits.reshape(n, heads, -1, WORD_BYTES // itemsize), jnp.uint32)


def _values(words_nHw: jax.Array, cache: jax.Array) -> jax.Array:
    """[n, H, S, F]: words as values of a cache."""
    shape = (len(words_nHw), *cache.shape[1:])
    bits = jax.lax.bitcast_convert_type(words_nHw, jnp.dtype(f"uint{8 * cache.dtype.itemsize}"))
    assert math.prod(bits.shape) == math.prod(shape)
    return jax.lax.bitcast_convert_type(bits.reshape(shape), cache.dtype)

"""Arranges the states of a row in blocks: [block][part][words], so that bytes of a block's content do not depend on how many devices split
the parts, which are heads where all arrays have as many, as long as the words of a block can be divided among all parts."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxllm.cache_spec import WORD_BYTES, CacheLayout
from jaxllm.runner.block_format import BlockFormat


@dataclass(frozen=True)
class StateFormat:
    """Sizes of one device's parts, and the functions between a row of the states and blocks."""

    blocks: BlockFormat
    num_blocks: int
    """Blocks that hold the states of a row."""
    num_parts: int
    """Parts of the states on each device: see `CacheLayout.state_parts`."""
    num_arrays: int
    """Arrays of blocks, behind which those of states are."""

    @classmethod
    def of(cls, layout: CacheLayout, num_devices: int) -> "StateFormat":
        """num_devices: that heads are split over. Raises ConfigError for states that blocks cannot hold."""
        num_blocks = layout.state_blocks
        return cls(BlockFormat.of(layout, num_devices), num_blocks, layout.state_parts // num_devices, len(layout.arrays))

    @property
    def _part_words(self) -> int:
        """Words of a part in each block."""
        return self.blocks.part_words // self.num_parts

    def store(self, caches: Sequence[jax.Array], row: jax.Array, block_k: jax.Array) -> list[jax.Array]:
        """The arrays with the states of a row in these blocks, one for each of `num_blocks`. A negative block is nowhere."""
        states = [jax.lax.dynamic_index_in_dim(state, row, keepdims=False) for state in caches[self.num_arrays :]]
        words_Pw = jnp.concatenate([_words(state, self.num_parts) for state in states], axis=1)
        words_Pw = jnp.pad(words_Pw, ((0, 0), (0, self.num_blocks * self._part_words - words_Pw.shape[1])))
        words_kw = words_Pw.reshape(self.num_parts, self.num_blocks, -1).swapaxes(0, 1).reshape(self.num_blocks, -1)
        words_kw = jnp.pad(words_kw, ((0, 0), (0, self.blocks.part_words - words_kw.shape[1])))
        return self.blocks.write(caches, block_k, words_kw)

    def load(self, caches: Sequence[jax.Array], row: jax.Array, block_k: jax.Array) -> list[jax.Array]:
        """The arrays with the states that these blocks hold in a row."""
        words_kw, _ = self.blocks.gather(caches, block_k)
        words_kPw = words_kw[:, : self.num_parts * self._part_words].reshape(self.num_blocks, self.num_parts, -1)
        words_Pw = words_kPw.swapaxes(0, 1).reshape(self.num_parts, -1)
        written, start = list(caches), 0
        for index in range(self.num_arrays, len(written)):
            state = written[index]
            of_row = jax.ShapeDtypeStruct(state.shape[1:], state.dtype)
            count = _num_words(of_row, self.num_parts)
            values = _values(words_Pw[:, start : start + count], of_row)
            written[index] = jax.lax.dynamic_update_index_in_dim(state, values, row, 0)
            start += count
        return written


def _num_words(state: jax.ShapeDtypeStruct, num_parts: int) -> int:
    """Words of a part of a row's state [H, ...]."""
    return -(-state.size // num_parts * state.dtype.itemsize // WORD_BYTES)


def _words(state: jax.Array, num_parts: int) -> jax.Array:
    """uint32 [P, w]: the bits of a row's state [H, ...], whose parts are filled up to whole words."""
    of_parts = state.reshape(num_parts, -1)
    bits = jax.lax.bitcast_convert_type(of_parts, jnp.dtype(f"uint{8 * state.dtype.itemsize}"))
    per_word = WORD_BYTES // state.dtype.itemsize
    if per_word == 1:
        return bits
    bits = jnp.pad(bits, ((0, 0), (0, -bits.shape[1] % per_word)))
    return jax.lax.bitcast_convert_type(bits.reshape(num_parts, -1, per_word), jnp.uint32)


def _values(words_Pw: jax.Array, state: jax.ShapeDtypeStruct) -> jax.Array:
    """[H, ...]: words as a row's state."""
    bits = jax.lax.bitcast_convert_type(words_Pw, jnp.dtype(f"uint{8 * state.dtype.itemsize}")).reshape(len(words_Pw), -1)
    values = jax.lax.bitcast_convert_type(bits[:, : state.size // len(words_Pw)], state.dtype)
    return values.reshape(state.shape)

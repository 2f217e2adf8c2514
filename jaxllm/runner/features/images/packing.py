"""Packs images, and time steps of videos, for the device: groups those encoded together, and finds positions of tokens.

NumPy only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxllm.encoder_sizes import EncoderSizes
from jaxllm.layers.patch_indices import Grid, patch_indices
from jaxllm.model_parts import Vision
from jaxllm.rope_positions import rope_delta, rope_positions
from jaxllm.runner.batch import Chunk

SHIFTS = slice(1, 4)
"""Behind `SLAB_ROW` in the values of a token. With ropes in sections: its positions in time, row and column, each minus that which
`rope_delta` gives it."""
NUM_LATER = -1
"""Where tokens of an image see each other: how many of those behind it are of the same image."""


@dataclass(frozen=True)
class EncoderInput:
    """An image to encode, or the frames of a video that share their patches."""

    grid: Grid
    """In patches."""
    patches_NC: np.ndarray
    slab_rows: np.ndarray
    """int32: where its embeddings go."""


def hidden_shape(vision: Vision, sizes: EncoderSizes) -> tuple[int, int]:
    """Shape of the array that has the hidden state of an image between its parts, without rows if no image has parts."""
    most = 0 if len(sizes.whole_programs) == len(sizes.programs) else sizes.programs[-1]
    return vision.hidden_rows(most), vision.hidden_size


def together(inputs: Sequence[EncoderInput], max_patches: int) -> list[list[EncoderInput]]:
    """The inputs in as few programs as first-fit finds, the largest first."""
    groups: list[list[EncoderInput]] = []
    left: list[int] = []
    for each in sorted(inputs, key=lambda each: -len(each.patches_NC)):
        count = len(each.patches_NC)
        assert count <= max_patches, f"an image of {count} patches, programs encode {max_patches}"
        index = next((i for i, room in enumerate(left) if room >= count), None)
        if index is None:
            index = len(groups)
            groups.append([])
            left.append(max_patches)
        groups[index].append(each)
        left[index] -= count
    return groups


def num_patches(inputs: Sequence[EncoderInput]) -> int:
    """Patches of some inputs."""
    return sum(len(each.patches_NC) for each in inputs)


def arrays(
    vision: Vision, inputs: Sequence[EncoderInput], size: int, num_slab_rows: int, patch_values: int
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs of a program of P = `size` patches: uint8 patches [P, C], and int32 indices, those of `patch_indices` [K, P] and then the row
    of the slab of each result, beyond its end for padding."""
    patches_PC = np.zeros((size, patch_values), np.uint8)
    rows = np.full(size // vision.merge_size**2, num_slab_rows, np.int32)
    first = 0
    for each in inputs:
        count = len(each.patches_NC)
        patches_PC[first : first + count] = each.patches_NC
        result = first // vision.merge_size**2
        rows[result : result + len(each.slab_rows)] = each.slab_rows
        first += count
    packed_KP = patch_indices(vision, [each.grid for each in inputs], size).pack()
    return patches_PC, np.concatenate([packed_KP.reshape(-1), rows])


def rope_shifts(chunk: Chunk) -> np.ndarray:
    """int32 [3, count]: see `SHIFTS`."""
    items = chunk.row.data.items
    behind_T = np.arange(chunk.start, chunk.stop, dtype=np.int32) + rope_delta(items)
    return rope_positions(items, chunk.start, chunk.count) - behind_T

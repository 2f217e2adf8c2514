"""Cuts images into patches, in the order in which an encoder merges them."""

import numpy as np
from PIL import Image


def to_patches(image: Image.Image, patch_size: int, merge_size: int) -> np.ndarray:
    """The patches of an RGB image, uint8 [patches, 3 · patch_size²], each in the order channel, row, column.

    Those that become one embedding, merge_size² in reading order, follow each other; the groups are in reading order too. The sides of
    the image are multiples of patch_size · merge_size.
    """
    width, height = image.size
    rows, columns = height // patch_size // merge_size, width // patch_size // merge_size
    line = f"V{patch_size}"  # a row of a patch as one value, so that NumPy moves it at once
    patches = np.empty((rows, columns, merge_size, merge_size, 3, patch_size), line)
    for channel, band in enumerate(image.split()):
        lines = np.frombuffer(band.tobytes(), line).reshape(rows, merge_size, patch_size, columns, merge_size)
        patches[..., channel, :] = lines.transpose(0, 3, 1, 4, 2)
    return patches.view(np.uint8).reshape(-1, 3 * patch_size**2)

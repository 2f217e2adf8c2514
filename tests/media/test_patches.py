import numpy as np
import pytest
from PIL import Image

from jaxllm.media.patches import to_patches
from jaxllm.media.payload import pack, unpack
from tests.helpers.images import picture, pixels


@pytest.mark.parametrize(("patch", "merge", "rows", "columns"), [(16, 2, 3, 5), (14, 2, 1, 4), (14, 4, 2, 3), (5, 1, 3, 2)])
def test_patches_are_cut_in_the_order_in_which_they_are_merged(patch: int, merge: int, rows: int, columns: int) -> None:
    array = pixels(columns * merge * patch, rows * merge * patch)
    expected = [
        array[y * patch : (y + 1) * patch, x * patch : (x + 1) * patch].transpose(2, 0, 1).reshape(-1)
        for row in range(rows)
        for column in range(columns)
        for y in range(row * merge, (row + 1) * merge)
        for x in range(column * merge, (column + 1) * merge)
    ]
    np.testing.assert_array_equal(to_patches(Image.fromarray(array), patch, merge), np.stack(expected))


def test_a_payload_holds_the_grid_and_the_patches_without_a_copy() -> None:
    patches = to_patches(picture(64, 96), 16, 2)
    payload = pack((1, 6, 4), patches)
    grid, found = unpack(payload)
    assert grid == (1, 6, 4)
    np.testing.assert_array_equal(found, patches)
    assert not found.flags.owndata and not found.flags.writeable
    assert len(payload) == 16 + 24 * 768
    assert payload[:16] == np.array([1, 6, 4, 768], "<i4").tobytes()

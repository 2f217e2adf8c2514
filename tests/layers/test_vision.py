"""The vision encoder against formulas in NumPy and float64."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.layers.patch_indices import PatchIndices, patch_indices
from jaxllm.loaders.formats import open_checkpoint
from jaxllm.models.load_config import load_model_config
from tests.helpers import pictures, vision_checkpoint, vision_numpy
from tests.helpers.slow import slow_except

CELLS = [(1, 1), (2, 5), (4, 3)]
"""Heights and widths of images, in cells."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return vision_checkpoint.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(directory):
    return pictures.load(directory)


def images(vision, cells=CELLS):
    side = vision.patch_size * vision.merge_size
    return [pictures.picture(i, rows * side, columns * side) for i, (rows, columns) in enumerate(cells)]


def test_an_encoder_computes_its_formulas(directory, model):
    config, _, tower = model
    checkpoint, raw = open_checkpoint(directory), json.loads((directory / "config.json").read_text())
    weights = {name: checkpoint.tensor(name) for name in checkpoint.entries}
    given = images(config.vision)
    expected = [vision_numpy.qwen3_vl(weights, raw, *pictures.patches(image, config.vision)) for image in given]
    found = pictures.encode(config, tower, given, num_patches=96)
    assert found.shape == (23, config.vision.result_width) and np.abs(found).max() > 1
    np.testing.assert_allclose(found, np.concatenate(expected), atol=1e-5)


def test_other_images_of_a_batch_do_not_change_an_image(model):
    config, _, tower = model
    given = images(config.vision)
    together = pictures.encode(config, tower, given, num_patches=128)
    alone = pictures.encode(config, tower, given[1:2], num_patches=128)
    np.testing.assert_allclose(together[1:11], alone, atol=1e-6)


@pytest.mark.parametrize("dtype", slow_except(["bfloat16"], ["bfloat16", "float16"]))
def test_narrow_types_are_near_float32(directory, model, dtype):
    config, _, tower = model
    narrow, _, narrow_tower = pictures.load(directory, dtype=dtype)
    given = images(config.vision)
    expected = pictures.encode(config, tower, given, num_patches=96)
    found = pictures.encode(narrow, narrow_tower, given, num_patches=96)
    assert found.dtype == jnp.dtype(dtype)
    # A few roundings of the type, which for bfloat16 has 8 bits.
    tolerance = (0.01 if dtype == "float16" else 0.08) * np.abs(expected).max()
    np.testing.assert_allclose(found.astype(np.float32), expected, atol=tolerance)


def test_indices_of_images_and_padding(directory):
    vision = load_model_config(directory).vision
    indices = patch_indices(vision, [(1, 2, 4), (2, 2, 2)], 20)
    np.testing.assert_array_equal(indices.segment_P, [0] * 8 + [1] * 4 + [2] * 4 + [-1] * 4)
    first_cell, second_cell = [[0, 0], [0, 1], [1, 0], [1, 1]], [[0, 2], [0, 3], [1, 2], [1, 3]]
    np.testing.assert_array_equal(indices.place_P2, [*first_cell, *second_cell, *first_cell, *first_cell, *[[0, 0]] * 4])
    # Corners of an image are corners of the table of 8 × 8; between them all four taps count.
    corner = 8 * 8 - 1
    assert (indices.taps_P4[[0, 7], 0].tolist(), indices.weights_P4[[0, 7], 0].tolist()) == ([0, corner], [1.0, 1.0])
    np.testing.assert_allclose(indices.weights_P4.sum(axis=1), [1.0] * 16 + [0.0] * 4, atol=1e-6)
    assert indices.pack().shape == (PatchIndices.num_rows(vision), 20)
    for found, given in zip(PatchIndices.unpack(jnp.asarray(indices.pack())), indices, strict=True):
        np.testing.assert_array_equal(found, given)

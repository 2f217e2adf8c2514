"""Patches are equal to what transformers' image processors compute, pixel by pixel."""

import functools
import json
import random
import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from jaxllm.media.payload import unpack
from jaxllm.model_parts.vision import VisionFamily
from tests.helpers.image_oracle import GOLDENS, digest, oracle
from tests.helpers.images import SIZES, VISIONS, encoded, media, picture, pixels, processor

GOLDEN = json.loads(GOLDENS.read_text())
FAMILIES = tuple(VISIONS)


@pytest.fixture(scope="module")
def drawn() -> Callable[[int, int], Image.Image]:
    """Draws the picture of a size, once for all families."""
    return functools.cache(picture)


@pytest.fixture(scope="module")
def file(drawn) -> Callable[[int, int], bytes]:
    return functools.cache(lambda width, height: encoded(drawn(width, height)))


@pytest.mark.parametrize("family", FAMILIES)
def test_patches_are_those_of_the_goldens(tmp_path, drawn, family: VisionFamily) -> None:
    prepare = processor(tmp_path, family)
    for width, height in sorted(SIZES, key=lambda size: size[0] * size[1])[:20]:
        _, patches = unpack(prepare.process(media(drawn(width, height))).payload)
        assert digest(patches) == GOLDEN[family][f"{width}x{height}"], (width, height)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_patches_are_those_that_transformers_computes(tmp_path, drawn, file, family: VisionFamily) -> None:
    prepare = processor(tmp_path, family)
    for width, height in SIZES:
        expected = oracle(family, drawn(width, height))
        processed = prepare.process(media(file(width, height)))
        grid, patches = unpack(processed.payload)
        np.testing.assert_array_equal(patches, expected)
        assert digest(expected) == GOLDEN[family][f"{width}x{height}"]
        assert processed.num_tokens == prepare.count_tokens(width, height)
        assert np.prod(grid) == len(patches) == processed.num_embeddings * VISIONS[family].merge_size ** 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("qwen3_vl", {"min_pixels": 200_000}),
        ("qwen3_vl", {"max_pixels": 90_000}),
        ("qwen2_5_vl", {"size": {"shortest_edge": 100_000, "longest_edge": 200_000}}),
        ("qwen2_5_vl", {"resample": 1}),
        ("gemma3", {"resample": 3}),
        ("pixtral", {"size": {"longest_edge": 300}}),
        ("idefics3", {"size": {"longest_edge": 200}}),
        ("idefics3", {"size": {"longest_edge": 80}, "resample": 3}),
        ("idefics3", {"do_image_splitting": False}),
        ("internvl", {"min_patches": 3, "max_patches": 5}),
        ("internvl", {"max_patches": 1}),
    ],
)
def test_overrides_are_those_of_transformers(tmp_path, family: VisionFamily, changed: dict) -> None:
    prepare = processor(tmp_path, family, mm_processor_kwargs=changed)
    for size in ((640, 480), (97, 1301), (1000, 999)):
        _, patches = unpack(prepare.process(media(pixels(*size))).payload)
        np.testing.assert_array_equal(patches, oracle(family, picture(*size), **changed))


@pytest.mark.slow
def test_sizes_are_those_of_transformers(tmp_path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
    qwen3, qwen2_5, pixtral = (processor(tmp_path, family)._family for family in ("qwen3_vl", "qwen2_5_vl", "pixtral"))
    draw = random.Random(0)
    for _ in range(20_000):
        width, height = (round(2 ** draw.uniform(0, 13)) for _ in range(2))
        if max(width, height) <= 200 * min(width, height):
            assert qwen3.resized(width, height)[::-1] == smart_resize(height, width, 32, 65536, 16384 * 256)
            assert qwen2_5.resized(width, height)[::-1] == smart_resize(height, width, 28, 3136, 16384 * 196)
        empty = np.broadcast_to(np.uint8(0), (3, height, width))
        size = get_resize_output_image_size(empty, 1540, 28, "channels_first")
        if 0 not in size:
            assert pixtral.resized(width, height)[::-1] == size


@pytest.mark.slow
def test_tiles_are_those_of_transformers(tmp_path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas
        from transformers.models.smolvlm.image_processing_pil_smolvlm import (
            SmolVLMImageProcessorPil,
            get_resize_output_image_size,
        )
    internvl, smolvlm = processor(tmp_path, "internvl")._family, processor(tmp_path, "idefics3")._family
    found: list[tuple[int, int]] = []
    enlarge = SmolVLMImageProcessorPil.resize_for_vision_encoder

    class Sizes:
        def resize(self, image, size, resample):
            found.append((size.width, size.height))

    draw = random.Random(0)
    for _ in range(2_000):
        width, height, longest = round(2 ** draw.uniform(0, 13)), round(2 ** draw.uniform(0, 13)), draw.randint(1, 5000)
        columns, rows = get_optimal_tiled_canvas((height, width), (56, 56), 1, 12)
        assert internvl.rows_and_columns(width, height) == (rows, columns)
        first = get_resize_output_image_size(np.broadcast_to(np.uint8(0), (3, height, width)), longest)[::-1]
        enlarge(Sizes(), np.broadcast_to(np.uint8(0), (3, *first[::-1])), 86)
        own = replace(smolvlm, longest_edge=longest, max_tiles=10_000)
        assert own._sizes(width, height) == (first, found[-1])

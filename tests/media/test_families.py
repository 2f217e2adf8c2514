"""Sizes of images, and the tokens that stand for them, by family."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.media.families.pixtral import Pixtral
from jaxllm.media.families.qwen_vl import Qwen3VL
from jaxllm.media.options import MediaOptions
from jaxllm.media.processor import make_processor
from tests.helpers.images import BREAK_ID, END_ID, VISIONS, Image, media, picture, processor, write_settings

SIDES = st.integers(1, 20_000)


def qwen(min_pixels: int, max_pixels: int) -> Qwen3VL:
    return Qwen3VL(VISIONS["qwen3_vl"], Image.Resampling.BICUBIC, min_pixels, max_pixels)


@settings(max_examples=200, deadline=None)
@given(SIDES, st.floats(1 / 200, 200), st.integers(1, 4096), st.integers(0, 20_000))
def test_qwen_rounds_sides_and_changes_them_only_to_get_into_the_area(width: int, ratio: float, least: int, more: int) -> None:
    height = max(1, round(width * ratio))
    family = qwen(least * 1024, (least + more) * 1024)
    sides, found = (width, height), family.resized(width, height)
    area, rounded = found[0] * found[1], [round(side / 32) * 32 for side in sides]
    assert all(side % 32 == 0 and side >= 32 for side in found)
    if rounded[0] * rounded[1] > family.max_pixels:
        scale = (family.max_pixels / (width * height)) ** 0.5
        assert area <= family.max_pixels or 32 in found
        assert all(new == 32 or new - 1e-6 <= side * scale < new + 32 for side, new in zip(sides, found, strict=True))
    elif rounded[0] * rounded[1] < family.min_pixels:
        scale = (family.min_pixels / (width * height)) ** 0.5
        assert area >= family.min_pixels
        assert all(new - 32 < side * scale + 1e-6 <= new + 1 for side, new in zip(sides, found, strict=True))
    else:
        assert list(found) == rounded


@settings(max_examples=200, deadline=None)
@given(SIDES, SIDES, st.integers(28, 3000))
def test_pixtral_shrinks_to_the_longest_side_and_rounds_up(width: int, height: int, longest: int) -> None:
    family = Pixtral(VISIONS["pixtral"], Image.Resampling.BICUBIC, longest, BREAK_ID, END_ID)
    scale = min(1.0, longest / max(width, height))
    for side, new in zip((width, height), family.resized(width, height), strict=True):
        assert new % 28 == 0 and new - 28 <= max(1, side * scale) + 1e-6 and side * scale - 1 <= new < longest + 28


@pytest.mark.parametrize(
    ("family", "size", "tokens"),
    [
        ("qwen3_vl", (1920, 1080), 2040),
        ("qwen3_vl", (1, 1), 64),
        ("qwen2_5_vl", (1920, 1080), 69 * 39),
        ("gemma3", (1920, 1080), 256),
        ("gemma3", (1, 1), 256),
        ("pixtral", (1920, 1080), 31 * 55 + 31),
        ("pixtral", (1, 1), 2),
        ("pixtral", (200, 100), 8 * 4 + 4),
    ],
)
def test_tokens_are_counted_by_the_size_alone(tmp_path, family, size: tuple[int, int], tokens: int) -> None:
    assert processor(tmp_path, family).count_tokens(*size) == tokens


def test_pixtral_has_a_token_behind_each_row(tmp_path) -> None:
    processed = processor(tmp_path, "pixtral").process(media(picture(84, 56)))
    assert processed.grid == (1, 2, 3) and processed.num_tokens == 8 and processed.num_embeddings == 6
    assert processed.embedding_runs == ((0, 3), (4, 3))
    ids, (item,) = processor(tmp_path, "pixtral").expand([7, 500, 8], [processed])
    assert ids == [7, 500, 500, 500, BREAK_ID, 500, 500, 500, END_ID, 8]
    assert item.embedding_runs == ((0, 3), (4, 3)) and item.grid is None


def test_pixtral_finds_the_tokens_in_either_file_of_the_tokenizer(tmp_path) -> None:
    write_settings(tmp_path, "pixtral")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has no token \[IMG_BREAK\] and no \[IMG_END\], which images are written with"):
        make_processor(tmp_path, VISIONS["pixtral"], MediaOptions())
    (tmp_path / "tokenizer.json").write_text(
        '{"added_tokens": [{"id": 12, "content": "[IMG_BREAK]"}, {"id": 13, "content": "[IMG_END]"}]}'
    )
    made = make_processor(tmp_path, VISIONS["pixtral"], MediaOptions())
    assert made.expand([500], [made.process(media(picture(9, 9)))])[0] == [500, 13]


def test_gemma_writes_text_around_each_image(tmp_path) -> None:
    prepare = processor(tmp_path, "gemma3")
    two = [prepare.process(media(picture(10, 10)))] * 2
    whole = "\n\n<start_of_image>" + "<image_soft_token>" * 256 + "<end_of_image>\n\n"
    expanded = prepare.expand_text("a<start_of_image>b<start_of_image>", two)
    assert expanded == f"a{whole}b{whole}"
    assert prepare.expand_text(expanded, two) == expanded
    assert prepare.placeholder() == "<start_of_image>"
    with pytest.raises(InvalidRequestError, match="has 1 times <start_of_image> and 2 image"):
        prepare.expand_text("a<start_of_image>", two)
    assert prepare.expand_text("no image", []) == "no image"


def test_other_families_leave_the_text_as_it_is(tmp_path) -> None:
    prepare = processor(tmp_path)
    assert prepare.expand_text("<|image_pad|>", []) == "<|image_pad|>"
    assert prepare.placeholder() == "<|vision_start|><|image_pad|><|vision_end|>"
    assert processor(tmp_path, "pixtral").placeholder() == "[IMG]"


def test_large_images_are_made_smaller_to_the_most_patches(tmp_path) -> None:
    for family in ("qwen3_vl", "qwen2_5_vl", "pixtral"):
        prepare = processor(tmp_path, family, mm_max_patches=1024)
        for size in ((700, 700), (1600, 8), (8, 1600)):
            assert prepare.process(media(picture(*size))).num_embeddings * 4 <= 1024
        assert prepare.process(media(picture(700, 700))).num_embeddings * 4 > 900
    with pytest.raises(ConfigError, match="mm_max_patches is 1024, must be at least 4096"):
        processor(tmp_path, "gemma3", mm_max_patches=1024)
    assert processor(tmp_path, "gemma3", mm_max_patches=4096).count_tokens(5, 5) == 256


def test_an_image_that_stays_too_large_is_refused(tmp_path) -> None:
    prepare = processor(tmp_path, mm_max_patches=256)
    with pytest.raises(InvalidRequestError, match="which make 452 patches, more than --mm-max-patches, 256; crop it"):
        prepare.process(media(picture(3600, 18)))

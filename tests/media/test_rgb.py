"""Images of every mode become RGB, the right way up, with the values that a naive computation gives."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from jaxllm.errors import InvalidRequestError
from jaxllm.media.image_files import load, open_image
from jaxllm.media.options import MediaOptions
from jaxllm.media.rgb import MODES, from_array, to_rgb
from tests.helpers.images import encoded, pixels

NAME = "prompt"
WHITE = (255, 255, 255)
ARRAY = pixels(24, 16)
ALPHA = ((np.arange(16)[:, None] * 24 + np.arange(24)) * 255 // 383).astype(np.uint8)


def rgb_of_file(data: bytes, background: tuple[int, int, int] = WHITE) -> np.ndarray:
    image = open_image(data, NAME, MediaOptions())
    load(image, NAME)
    return np.asarray(to_rgb(image, NAME, background)).astype(int)


def on_background(array: np.ndarray, alpha: np.ndarray, background: Any = WHITE) -> np.ndarray:
    share = alpha[..., None] / 255
    return np.round(array * share + np.array(background) * (1 - share)).astype(int)


def grey(array: np.ndarray) -> np.ndarray:
    return np.repeat(array[..., None].astype(int), 3, axis=-1)


def refusal(image: Image.Image) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        to_rgb(image, NAME, WHITE)
    return str(caught.value)


@pytest.mark.parametrize("format", ["PNG", "TIFF", "BMP"])
def test_rgb_and_grey_stay_as_they_are(format: str) -> None:
    np.testing.assert_array_equal(rgb_of_file(encoded(Image.fromarray(ARRAY), format)), ARRAY)
    np.testing.assert_array_equal(rgb_of_file(encoded(Image.fromarray(ALPHA), format)), grey(ALPHA))
    bits = Image.fromarray(ALPHA).convert("1")
    np.testing.assert_array_equal(rgb_of_file(encoded(bits, format)), grey(np.asarray(bits) * 255))


@pytest.mark.parametrize("background", [WHITE, (0, 0, 0), (10, 200, 30)])
@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
def test_transparent_pixels_show_the_background(format: str, background: tuple[int, int, int]) -> None:
    image = Image.fromarray(np.dstack([ARRAY, ALPHA]))
    found = rgb_of_file(encoded(image, format, **({"lossless": True, "exact": True} if format == "WEBP" else {})), background)
    assert np.abs(found - on_background(ARRAY, ALPHA, background)).max() <= 1  # Pillow rounds in integers
    np.testing.assert_array_equal(found[0, 0], background)
    np.testing.assert_array_equal(found[-1, -1], ARRAY[-1, -1])


def test_grey_with_alpha_shows_the_background() -> None:
    image = Image.merge("LA", [Image.fromarray(ARRAY[..., 0]), Image.fromarray(ALPHA)])
    found = rgb_of_file(encoded(image))
    assert np.abs(found - on_background(grey(ARRAY[..., 0]), ALPHA)).max() <= 1


def test_a_transparent_colour_of_a_palette_shows_the_background() -> None:
    image = Image.fromarray(ARRAY).quantize(8)
    index = np.asarray(image)
    expected = np.asarray(image.convert("RGB")).astype(int)
    np.testing.assert_array_equal(rgb_of_file(encoded(image)), expected)
    expected[index == 3] = WHITE
    for format in ("PNG", "GIF"):
        np.testing.assert_array_equal(rgb_of_file(encoded(image, format, transparency=3)), expected)
    shares = bytes([0, 128, 255, 255, 255, 255, 255, 255])
    by_entry = np.frombuffer(shares, np.uint8)[index]
    found = rgb_of_file(encoded(image, transparency=shares))
    assert np.abs(found - on_background(np.asarray(image.convert("RGB")), by_entry)).max() <= 1


def test_a_transparent_value_of_grey_or_rgb_shows_the_background() -> None:
    level = int(ALPHA[3, 3])
    found = rgb_of_file(encoded(Image.fromarray(ALPHA), transparency=level))
    np.testing.assert_array_equal(found, np.where(ALPHA[..., None] == level, 255, grey(ALPHA)))
    color = tuple(int(value) for value in ARRAY[5, 5])
    found = rgb_of_file(encoded(Image.fromarray(ARRAY), transparency=color))
    np.testing.assert_array_equal(found, np.where((color == ARRAY).all(axis=-1)[..., None], 255, ARRAY))


def test_16_bits_are_divided_not_clipped() -> None:
    ramp = (np.arange(16 * 24).reshape(16, 24) * 65535 // 383).astype(np.uint16)
    for format in ("PNG", "TIFF"):
        np.testing.assert_array_equal(rgb_of_file(encoded(Image.fromarray(ramp), format)), grey(ramp // 257))
    big_endian = Image.frombytes("I;16B", (24, 16), ramp.astype(">u2").tobytes())
    np.testing.assert_array_equal(np.asarray(to_rgb(big_endian, NAME, WHITE)), grey(ramp // 257))


def test_a_transparent_value_of_16_bits_shows_the_background() -> None:
    ramp = (np.arange(16 * 24).reshape(16, 24) * 65535 // 383).astype(np.uint16)
    image = Image.fromarray(ramp)
    image.info["transparency"] = int(ramp[2, 2])
    expected = grey(ramp // 257)
    expected[2, 2] = (1, 2, 3)
    np.testing.assert_array_equal(np.asarray(to_rgb(image, NAME, (1, 2, 3))), expected)


def test_cmyk_and_ycbcr_become_rgb() -> None:
    for mode in ("CMYK", "YCbCr"):
        image = Image.fromarray(ARRAY).convert(mode)
        found = rgb_of_file(encoded(image, "TIFF")) if mode == "CMYK" else np.asarray(to_rgb(image, NAME, WHITE)).astype(int)
        np.testing.assert_array_equal(found, np.asarray(image.convert("RGB")))
        assert np.abs(found - ARRAY).max() <= 3
    flat = Image.new("RGB", (16, 16), (200, 40, 90)).convert("CMYK")
    assert np.abs(rgb_of_file(encoded(flat, "JPEG", quality=100)) - (200, 40, 90)).max() <= 4


@pytest.mark.parametrize("mode", ["F", "I", "LAB"])
def test_values_without_a_fixed_range_are_refused(mode: str) -> None:
    image = Image.new(mode, (5, 5))
    assert f"has pixels of mode {mode}, which have no fixed range or colours; save it in RGB with 8 bits" in refusal(image)
    with pytest.raises(InvalidRequestError, match=f"mode {mode}"):
        rgb_of_file(encoded(image, "TIFF"))


@pytest.mark.parametrize("mode", MODES)
def test_every_other_mode_becomes_rgb(mode: str) -> None:
    assert to_rgb(Image.new(mode, (5, 5)), NAME, WHITE).mode == "RGB"


TURNS = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a, 1),
}


@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF", "JPEG"])
def test_images_are_turned_as_exif_says(format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, Any] = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}.get(format, {})
    array = np.asarray(Image.fromarray(ARRAY).resize((48, 32))) if format == "JPEG" else ARRAY
    found = rgb_of_file(encoded(Image.fromarray(array), format, exif=exif, **options))
    assert np.abs(found - TURNS[orientation](array)).max() <= (8 if format == "JPEG" else 0)


@pytest.mark.parametrize(
    "exif", [b"", b"garbage", b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"]
)
@pytest.mark.filterwarnings("ignore")
def test_broken_exif_is_ignored(exif: bytes) -> None:
    data = encoded(Image.fromarray(ARRAY), "JPEG")
    segment = b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif
    np.testing.assert_array_equal(rgb_of_file(data[:2] + segment + data[2:]), rgb_of_file(data))


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_unknown_orientations_are_ignored(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    np.testing.assert_array_equal(rgb_of_file(encoded(Image.fromarray(ARRAY), exif=exif)), ARRAY)


def test_images_of_scripts_are_turned_and_stay_as_they_are() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.open(io.BytesIO(encoded(Image.fromarray(ARRAY), "JPEG", exif=exif)))
    assert to_rgb(image, NAME, WHITE).size == (16, 24)
    assert image.size == (24, 16)
    assert to_rgb(ImageOps.exif_transpose(image), NAME, WHITE).size == (16, 24)


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 1), (5, 7, 3), (5, 7, 4)])
def test_arrays_become_images(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    image = from_array(array, NAME)
    assert image.size == (7, 5)
    np.testing.assert_array_equal(np.asarray(image), array[..., 0] if shape[2:] == (1,) else array)
    np.testing.assert_array_equal(np.asarray(from_array(array[::-1, ::2], NAME)), np.asarray(image)[::-1, ::2])


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (
            np.zeros((4, 4, 3), np.float32),
            r"is an array of float32, must be uint8 .* \(array \* 255\).round\(\).astype\(np.uint8\)",
        ),
        (np.zeros((4, 4, 3), np.int64), r"is an array of int64, must be uint8 .*array.astype\(np.uint8\)"),
        (np.zeros((4, 4, 3), bool), "is an array of bool"),
        (np.zeros((3, 4, 5), np.uint8), r"of shape \(3, 4, 5\), must be \[height, width\].*array.transpose\(1, 2, 0\)"),
        (np.zeros((4, 4, 2), np.uint8), r"of shape \(4, 4, 2\), must be"),
        (np.zeros((1, 4, 4, 3), np.uint8), "must be"),
        (np.zeros(4, np.uint8), "must be"),
        (np.zeros((), np.uint8), "must be"),
        (np.zeros((0, 4, 3), np.uint8), r"of shape \(0, 4, 3\), must have at least 1 x 1 pixels"),
        (np.zeros((4, 0), np.uint8), "must have at least 1 x 1 pixels"),
    ],
)
def test_other_arrays_are_refused(array: np.ndarray, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        from_array(array, NAME)

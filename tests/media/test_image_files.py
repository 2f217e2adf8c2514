"""Files that are no images, damaged, or would take much memory are refused, with a text that says what to do and none of Pillow's."""

import io
import re
import struct
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.media.image_files import FORMATS, load, open_image
from jaxllm.media.options import MediaOptions
from tests.helpers.images import encoded, media, picture, processor

NAME = "messages[0].content[1]"
LIMIT = "at most 67108864; send a smaller one"


def png_header(width: int, height: int) -> bytes:
    """A PNG without pixels, as long as its reader looks for them."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def tiff(blob: bytes, **tags: int) -> bytes:
    """A grey TIFF of 16 x 16 pixels compressed by zlib, with further tags, t322=… as numbers."""
    fields = {256: 16, 257: 16, 258: 8, 259: 8, 262: 1, 277: 1} | {int(name[1:]): value for name, value in tags.items()}
    place, size = (324, 325) if 322 in fields else (273, 279)
    fields |= {place: 8 + 2 + 12 * (len(fields) + 2) + 4, size: len(blob)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, fields[tag]) for tag in sorted(fields))
    return b"II*\0" + struct.pack("<IH", 8, len(fields)) + entries + bytes(4) + blob


def webp_header(width: int, height: int) -> bytes:
    """A lossless WebP file with the pixels of another size."""
    data = bytearray(encoded(picture(16, 16), "WEBP", lossless=True))
    bits = int.from_bytes(data[21:25], "little") >> 28 << 28 | (height - 1) << 14 | width - 1
    data[21:25] = bits.to_bytes(4, "little")
    return bytes(data)


def webp_canvas(width: int, height: int) -> bytes:
    """A WebP file whose canvas is of this size, with a small image."""
    small = encoded(picture(16, 16), "WEBP", lossless=True)[12:]
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + size + small
    return b"RIFF" + struct.pack("<I", len(body)) + body


def gif_header(width: int, height: int) -> bytes:
    data = bytearray(encoded(picture(16, 16).quantize(16), "GIF"))
    data[6:10] = struct.pack("<HH", width, height)
    return bytes(data)


def tiff_header(width: int, height: int) -> bytes:
    return tiff(zlib.compress(bytes(256)), t256=width, t257=height)


def bmp_header(width: int, height: int) -> bytes:
    data = bytearray(encoded(picture(16, 16), "BMP"))
    data[18:26] = struct.pack("<ii", width, height)
    return bytes(data)


def many_scans(count: int) -> bytes:
    """A progressive JPEG whose last scan comes again and again."""
    data = encoded(Image.new("L", (64, 64), 90), "JPEG", progressive=True)
    start = data.rindex(b"\xff\xc4", 0, data.rindex(b"\xff\xda"))
    return data[:-2] + data[start:-2] * count + data[-2:]


def open_whole(data: bytes, **options: Any) -> Image.Image:
    image = open_image(data, NAME, MediaOptions(**options))
    load(image, NAME)
    return image


def refusal(data: bytes, **options: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        open_whole(data, **options)
    assert caught.value.param == NAME
    assert str(caught.value).startswith(f"the image at {NAME} ")
    assert caught.value.__suppress_context__, "a traceback would show Pillow's text"
    return str(caught.value)


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_read(format: str) -> None:
    image = open_whole(encoded(picture(33, 20), format, **({"quality": 95} if format in ("JPEG", "WEBP") else {})))
    assert image.format == format and image.size == (33, 20)


@pytest.mark.parametrize(
    "data",
    [
        png_header(20_000, 20_000),
        png_header(9_000, 9_000),
        png_header(2**31 - 1, 2**31 - 1),
        gif_header(65_535, 65_535),
        gif_header(9_000, 9_000),
        tiff_header(9_000, 9_000),
        tiff_header(2**31 - 1, 2**31 - 1),
        webp_header(9_000, 9_000),
        webp_header(16_384, 16_384),
        webp_canvas(60_000, 60_000),
        bmp_header(30_000, 30_000),
    ],
    ids=lambda data: f"{data[:4]!r}",
)
def test_bombs_are_refused_by_their_headers(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("pixels were decoded"))
    assert re.search("has (too many|[0-9]+ x [0-9]+) pixels.*must have " + LIMIT, refusal(data))


def test_the_limit_of_pixels_is_an_option() -> None:
    data = encoded(picture(100, 50))
    assert open_whole(data, mm_max_image_pixels=5000).size == (100, 50)
    assert "has 100 x 50 pixels, 5000, must have at most 4999" in refusal(data, mm_max_image_pixels=4999)
    assert "--mm-max-image-pixels" in refusal(data, mm_max_image_pixels=4999)
    with pytest.raises(ConfigError, match="must be at most 178956970"):
        MediaOptions(mm_max_image_pixels=178_956_971)


def test_tiles_of_a_tiff_are_no_larger_than_images_may_be() -> None:
    blob = zlib.compress(bytes(16 * 16))
    assert open_whole(tiff(blob, t322=16, t323=16)).size == (16, 16)
    assert "tiles of 900000000 pixels, must have at most 67108864" in refusal(tiff(blob, t322=30_000, t323=30_000))


@pytest.mark.filterwarnings("ignore")
def test_tags_of_a_tiff_that_lie_over_each_other_take_no_memory() -> None:
    blob = bytes(1_000_000)
    tags = [(1000 + number, 1, 990_000, 8) for number in range(2000)]
    sizes = [
        (256, 4, 1, 16),
        (257, 4, 1, 16),
        (258, 4, 1, 8),
        (259, 4, 1, 1),
        (262, 4, 1, 1),
        (273, 4, 1, 500_000),
        (279, 4, 1, 256),
    ]
    entries = b"".join(struct.pack("<HHII", *entry) for entry in sizes + tags)
    data = (b"II*\0" + struct.pack("<IH", 8, len(sizes + tags)) + entries + blob)[: len(blob)]
    tracemalloc.start()
    try:
        open_whole(data)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_a_jpeg_of_many_scans_is_refused() -> None:
    assert open_whole(many_scans(10)).size == (64, 64)
    assert "is a JPEG of 206 scans, must have at most 64" in refusal(many_scans(200))


def test_files_of_many_bytes_are_refused() -> None:
    data = encoded(picture(10, 10))
    assert f"has {len(data)} bytes, must have at most 50; send a smaller one, or raise --mm-max-image-bytes" in refusal(
        data, mm_max_image_bytes=50
    )


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 0.95])
def test_truncated_files_are_refused(format: str, share: float) -> None:
    data = encoded(picture(200, 100), format)
    assert re.search("damaged|unknown format|empty", refusal(data[: int(len(data) * share)]))


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "is empty"),
        (b"\x00", "is of an unknown format"),
        (b"hello, world", "is of an unknown format"),
        (b"%PDF-1.7 ...", "is a PDF file"),
        (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "is an SVG drawing"),
        (b"\xef\xbb\xbf  <svg width='1'/>", "is an SVG drawing"),
        (b"<!DOCTYPE html><html>", "is text, not an image"),
        (b'{"error": "not found"}', "is text, not an image"),
        (b"\x00\x00\x00\x18ftypheic" + bytes(20), "is an AVIF or HEIC image, or a video"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n", "is of an unknown format"),
        (encoded(picture(32, 32), "ICO"), "is of an unknown format"),
        (encoded(picture(32, 32), "PPM"), "is of an unknown format"),
        (encoded(picture(32, 32), "JPEG2000"), "is of an unknown format"),
        (bytes(np.random.default_rng(0).integers(0, 256, 5000, np.uint8)), "is of an unknown format"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_image_of_a_known_format_is_refused(data: bytes, kind: str) -> None:
    assert kind in refusal(data)


@pytest.mark.parametrize("size", [(0, 10), (10, 0), (0, 0)])
def test_images_without_pixels_are_refused(size: tuple[int, int]) -> None:
    assert re.search("has .* pixels, must have at least 1 x 1|damaged", refusal(png_header(*size)))


@pytest.mark.parametrize("size", [(1, 1), (1, 200), (400, 2)])
def test_thin_images_are_taken_up_to_a_ratio_of_200(size: tuple[int, int]) -> None:
    assert open_whole(encoded(picture(*size))).size == size


@pytest.mark.parametrize("size", [(1, 1000), (1000, 1), (201, 1), (3, 601)])
def test_thinner_images_are_refused(size: tuple[int, int]) -> None:
    assert "one side more than 200 times the other; crop it" in refusal(encoded(picture(*size)))


def test_the_first_frame_of_an_animation_is_taken(tmp_path) -> None:
    frames = [Image.new("RGB", (40, 40), color) for color in ("red", "green", "blue")]
    for format in ("GIF", "WEBP", "PNG"):
        options = {"lossless": True} if format == "WEBP" else {}
        data = encoded(frames[0], format, save_all=True, append_images=frames[1:], duration=100, **options)
        assert getattr(Image.open(io.BytesIO(data)), "n_frames", 1) == 3
        whole = processor(tmp_path).process(media(data))
        assert whole.payload == processor(tmp_path).process(media(frames[0])).payload


def test_the_first_image_of_a_camera_with_two_lenses_is_taken() -> None:
    left, right = picture(60, 40), picture(30, 20)
    image = open_whole(encoded(left, "MPO", save_all=True, append_images=[right], quality=95))
    assert image.format == "MPO" and image.size == left.size
    assert np.abs(np.asarray(image).astype(int) - np.asarray(open_whole(encoded(left, "JPEG", quality=95)))).max() == 0


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.filterwarnings("ignore")
def test_damaged_files_are_read_or_refused(format: str) -> None:
    draw = np.random.default_rng(1)
    data = encoded(picture(60, 40), format)
    for _ in range(60):
        damaged = bytearray(data)
        for place in draw.integers(0, len(data), draw.integers(1, 8)):
            damaged[place] = draw.integers(0, 256)
        try:
            open_whole(bytes(damaged))
        except InvalidRequestError as error:
            assert error.param == NAME

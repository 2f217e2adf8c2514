"""Opens image files of known formats. Refuses damaged files, and images whose pixels would take more memory than allowed."""

import io
import warnings
from typing import NoReturn

# Pillow finds formats by the modules imported so far; these are all that are taken. AVIF is none of them: a file of 2 kB whose header
# says 16 x 16 pixels may hold 268 million, and Pillow learns of them only once they are decoded.
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from jaxllm.errors import InvalidRequestError
from jaxllm.media.options import MediaOptions

PLUGINS = (
    BmpImagePlugin.BmpImageFile,
    GifImagePlugin.GifImageFile,
    JpegImagePlugin.JpegImageFile,
    PngImagePlugin.PngImageFile,
    TiffImagePlugin.TiffImageFile,
    WebPImagePlugin.WebPImageFile,
)
FORMATS = tuple(plugin.format for plugin in PLUGINS)
"""The names of the formats that are read."""
MAX_ASPECT_RATIO = 200
"""Most of the longer side to the shorter, as in Qwen's processor. Thinner images would have no pixel left when resized."""
MAX_SCANS = 64
"""Passes of a JPEG over all its pixels: progressive ones have about ten; a file of 20 MB could have 200 000, which take hours."""
_TILE_WIDTH, _TILE_LENGTH = 322, 323

warnings.filterwarnings("ignore", module=r"PIL\.")  # each odd file would write a line to the log


def refuse(name: str, fault: str) -> NoReturn:
    """Raise the error of the image that is called `name`; `fault` goes on after it."""
    raise InvalidRequestError(f"the image at {name} {fault}", name) from None


def open_image(data: bytes, name: str, options: MediaOptions) -> Image.Image:
    """The image in a file, whose pixels are not decoded yet. Raises InvalidRequestError."""
    if not data:
        refuse(name, "is empty; send the bytes of a file")
    if len(data) > options.mm_max_image_bytes:
        refuse(
            name,
            f"has {len(data)} bytes, must have at most {options.mm_max_image_bytes}; send a smaller one, or raise --mm-max-image-bytes",
        )
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        refuse(name, f"has too many pixels, must have at most {options.mm_max_image_pixels}; send a smaller one")
    except Image.UnidentifiedImageError:
        refuse(name, f"is {_kind(data)}; send one of {', '.join(FORMATS)}")
    except Exception:  # readers of damaged files raise anything
        refuse(name, f"is damaged: its header cannot be read; send a whole file of {', '.join(FORMATS)}")
    check_size(*image.size, name, options)
    _check_work(image, data, name, options)
    return image


def check_size(width: int, height: int, name: str, options: MediaOptions) -> None:
    """Raise InvalidRequestError if an image of this size in pixels is not taken."""
    if min(width, height) < 1:
        refuse(name, f"has {width} x {height} pixels, must have at least 1 x 1")
    if width * height > options.mm_max_image_pixels:
        refuse(
            name,
            f"has {width} x {height} pixels, {width * height}, must have at most {options.mm_max_image_pixels}; send a smaller one, or "
            "raise --mm-max-image-pixels",
        )
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        refuse(
            name,
            f"has {width} x {height} pixels, one side more than {MAX_ASPECT_RATIO} times the other; crop it or cut it in pieces",
        )


def load(image: Image.Image, name: str) -> None:
    """Decode the pixels of an image; of an animation those of the first frame. Raises InvalidRequestError."""
    try:
        image.load()
    except Exception:
        refuse(name, f"is damaged or incomplete: its {image.format or 'pixel'} data cannot be decoded; send the whole file")


def _check_work(image: Image.Image, data: bytes, name: str, options: MediaOptions) -> None:
    """Refuse files of small images that take much memory or time."""
    if isinstance(image, JpegImagePlugin.JpegImageFile) and (scans := data.count(b"\xff\xda")) > MAX_SCANS:
        refuse(name, f"is a JPEG of {scans} scans, must have at most {MAX_SCANS}; save it anew")
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        tile = [image.tag_v2.get(tag, 1) for tag in (_TILE_WIDTH, _TILE_LENGTH)]
        if not all(isinstance(side, int) and side > 0 for side in tile):
            refuse(name, "is damaged: its header cannot be read; send the whole file")
        if (pixels := tile[0] * tile[1]) > options.mm_max_image_pixels:
            refuse(
                name, f"is a TIFF with tiles of {pixels} pixels, must have at most {options.mm_max_image_pixels}; save it anew"
            )


def _kind(data: bytes) -> str:
    """Guesses the format of a file that is not a supported image, for the error."""
    start = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith(b"%pdf"):
        return "a PDF file"
    if b"<svg" in start:
        return "an SVG drawing"
    if start.startswith((b"<", b"{")):
        return "text, not an image"
    if data[4:8] == b"ftyp":
        return "an AVIF or HEIC image, or a video"
    return "of an unknown format, or damaged"

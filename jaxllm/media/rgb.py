"""Turns decoded images of any mode into RGB, the right way up, and arrays into images."""

import numpy as np
from PIL import Image

from jaxllm.media.image_files import refuse

SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV")
"""Modes that are converted to RGB. Refused are LAB, and modes of 32 bits, whose value of white is not defined."""
_ORIENTATION = 0x0112
"""The EXIF tag that says how a camera was held."""
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def from_array(array: np.ndarray, name: str) -> Image.Image:
    """An image of an array uint8 [height, width], or with 1, 3 (RGB) or 4 (RGBA) channels behind. Raises InvalidRequestError."""
    if array.dtype != np.uint8:
        way_out = "(array * 255).round().astype(np.uint8)" if array.dtype.kind == "f" else "array.astype(np.uint8)"
        refuse(name, f"is an array of {array.dtype}, must be uint8 of values from 0 to 255; e.g. {way_out}")
    channels = {2: 1, 3: array.shape[-1] if array.ndim else 0}.get(array.ndim)
    if channels not in (1, 3, 4):
        hint = "; e.g. array.transpose(1, 2, 0)" if array.ndim == 3 and array.shape[0] in (1, 3, 4) else ""
        refuse(name, f"is an array of shape {array.shape}, must be [height, width] or [height, width, 1, 3 or 4]{hint}")
    if not array.size:
        refuse(name, f"is an array of shape {array.shape}, must have at least 1 x 1 pixels")
    return Image.fromarray(array[..., 0] if array.ndim == 3 and channels == 1 else array)


def to_rgb(image: Image.Image, name: str, background: tuple[int, int, int]) -> Image.Image:
    """A loaded image in mode RGB, turned as its EXIF data says; transparent pixels show the background. Raises InvalidRequestError."""
    orientation = _orientation(image)
    if image.mode in SIXTEEN_BITS:
        image = _of_16_bits(image)
    if image.mode not in MODES:
        refuse(
            name, f"has pixels of mode {image.mode}, which have no fixed range or colours; save it in RGB with 8 bits a channel"
        )
    if image.has_transparency_data:
        if image.mode != "RGBA":  # else it would be copied
            image = image.convert("RGBA")
        canvas = Image.new("RGB", image.size, background)
        canvas.paste(image, mask=image.getchannel("A"))
        image = canvas
    elif image.mode != "RGB":
        image = image.convert("RGB")
    return image.transpose(_TURNS[orientation]) if orientation in _TURNS else image


def _of_16_bits(image: Image.Image) -> Image.Image:
    """Grey of 16 bits as grey of 8, with alpha where a value is transparent. Pillow's own conversion would clip at 255."""
    values = np.asarray(image)
    grey = Image.fromarray((values // 257).astype(np.uint8))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return grey


def _orientation(image: Image.Image) -> int:
    """1 to 8, as EXIF has it; 1 where it says nothing or is damaged."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # a reader of damaged data raises anything, and the pixels are good
        return 1

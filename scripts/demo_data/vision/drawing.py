"""Draws coloured shapes, texts and bars with Pillow, and spoils the result as cameras and file formats do."""

import functools
import importlib.util
import io
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

Colour = tuple[int, int, int]

COLOURS: dict[str, Colour] = {
    "red": (222, 28, 36),
    "orange": (250, 138, 16),
    "yellow": (250, 222, 32),
    "green": (36, 160, 60),
    "blue": (36, 82, 222),
    "purple": (132, 44, 168),
    "pink": (250, 132, 188),
    "brown": (122, 74, 34),
    "black": (16, 16, 16),
    "white": (242, 242, 242),
    "grey": (130, 130, 130),
}
_JITTER = 16
"""How far each channel of a colour may be from the value above."""
_MIN_CONTRAST = 90.0
"""Distance in RGB of a background from what is drawn on it, where one is found."""


def _around(angles: Sequence[float], radii: Sequence[float]) -> tuple[tuple[float, float], ...]:
    return tuple((r * math.cos(math.radians(a)), r * math.sin(math.radians(a))) for a, r in zip(angles, radii, strict=True))


def _heart() -> tuple[tuple[float, float], ...]:
    turns = [2 * math.pi * step / 28 for step in range(28)]
    return tuple(
        (
            math.sin(t) ** 3,
            -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 16.5,
        )
        for t in turns
    )


_ARM = 0.3
OUTLINES: dict[str, tuple[tuple[float, float], ...]] = {
    "circle": (),
    "square": ((-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)),
    "triangle": _around((-90, 30, 150), (1, 1, 1)),
    "rectangle": ((-1, -0.5), (1, -0.5), (1, 0.5), (-1, 0.5)),
    "star": _around([-90 + 36 * step for step in range(10)], [1, 0.42] * 5),
    "diamond": ((0, -1), (0.66, 0), (0, 1), (-0.66, 0)),
    "cross": tuple(
        (x, y)
        for x, y in (
            (-_ARM, -1), (_ARM, -1), (_ARM, -_ARM), (1, -_ARM), (1, _ARM), (_ARM, _ARM),
            (_ARM, 1), (-_ARM, 1), (-_ARM, _ARM), (-1, _ARM), (-1, -_ARM), (-_ARM, -_ARM),
        )
    ),
    "heart": _heart(),
}  # fmt: skip
"""Corners of each shape within the unit circle; the circle has none."""
SHAPES = tuple(OUTLINES)
_MAX_TILT = {"square": 7, "rectangle": 7, "diamond": 7, "cross": 12, "heart": 12, "triangle": 20, "star": 36, "circle": 0}
"""Degrees; a tilted square would be a diamond."""


def _area(corners: Sequence[tuple[float, float]]) -> float:
    after = (*corners[1:], *corners[:1])
    return abs(sum(x * v - u * y for (x, y), (u, v) in zip(corners, after, strict=True))) / 2 or math.pi


AREAS = {shape: _area(corners) for shape, corners in OUTLINES.items()}
"""Areas of the shapes of radius 1."""


@dataclass(frozen=True)
class Thing:
    """A shape in a picture; centre and radius in pixels."""

    shape: str
    colour: str
    x: float
    y: float
    radius: float

    @property
    def area(self) -> float:
        """In pixels."""
        return AREAS[self.shape] * self.radius**2


def shade(rng: random.Random, name: str) -> Colour:
    """A colour that goes by this name."""
    red, green, blue = (min(255, max(0, channel + rng.randint(-_JITTER, _JITTER))) for channel in COLOURS[name])
    return red, green, blue


def _background_colour(rng: random.Random) -> Colour:
    low, high = rng.choice(((215, 255), (215, 255), (170, 240), (0, 50), (60, 200)))
    base = rng.randint(low, high)
    spread = rng.choice((0, 0, 12, 35))
    red, green, blue = (min(255, max(0, base + rng.randint(-spread, spread))) for _ in range(3))
    return red, green, blue


def canvas(rng: random.Random, width: int, height: int, colours: Sequence[str]) -> Image.Image:
    """An empty picture, plain or shaded, on which these colours can be seen."""
    best, distance = (255, 255, 255), -1.0
    for _ in range(12):
        tried = _background_colour(rng)
        nearest = min((math.dist(tried, COLOURS[name]) for name in colours), default=255.0)
        if nearest > distance:
            best, distance = tried, nearest
        if distance >= _MIN_CONTRAST:
            break
    if rng.random() < 0.7:
        return Image.new("RGB", (width, height), best)
    corners = Image.new("RGB", (2, 2))
    for place in ((0, 0), (0, 1), (1, 0), (1, 1)):
        red, green, blue = (min(255, max(0, channel + rng.randint(-14, 14))) for channel in best)
        corners.putpixel(place, (red, green, blue))
    return corners.resize((width, height), Image.Resampling.BILINEAR)


def draw_thing(rng: random.Random, draw: ImageDraw.ImageDraw, thing: Thing, scale: int) -> None:
    """Draws it filled or, seldom, as a thick line; `scale` times as large and as far from the corner."""
    fill = shade(rng, thing.colour)
    x, y, radius = (scale * value for value in (thing.x, thing.y, thing.radius))
    is_line = radius > 18 * scale and rng.random() < 0.12
    line = max(3 * scale, round(radius * rng.uniform(0.16, 0.24)))
    if thing.shape == "circle":
        box = (x - radius, y - radius, x + radius, y + radius)
        draw.ellipse(box, fill=None if is_line else fill, outline=fill, width=line if is_line else 1)
        return
    tilt = math.radians(rng.uniform(-1, 1) * _MAX_TILT[thing.shape])
    if thing.shape == "rectangle" and rng.random() < 0.5:
        tilt += math.pi / 2
    cos, sin = math.cos(tilt) * radius, math.sin(tilt) * radius
    corners = [(x + u * cos - v * sin, y + u * sin + v * cos) for u, v in OUTLINES[thing.shape]]
    if is_line:
        draw.line([*corners, *corners[:2]], fill=fill, width=line, joint="curve")
    else:
        draw.polygon(corners, fill=fill)


@functools.cache
def _font_files() -> tuple[str, ...]:
    """Fonts of matplotlib, where that is installed."""
    found = importlib.util.find_spec("matplotlib")
    if found is None or found.origin is None:
        return ()
    folder = Path(found.origin).parent / "mpl-data" / "fonts" / "ttf"
    names = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSansMono")
    return tuple(str(folder / f"{name}.ttf") for name in names if (folder / f"{name}.ttf").is_file())


@functools.lru_cache(maxsize=512)
def font(number: int, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Font 0 is the one in Pillow; others are there only where matplotlib is."""
    files = _font_files()
    return ImageFont.truetype(files[number - 1], size) if number else ImageFont.load_default(size)


def num_fonts() -> int:
    """How many `font` knows."""
    return 1 + len(_font_files())


@functools.cache
def _noise() -> np.ndarray:
    """Int16 [512, 512, 3], normal with deviation 16: pictures cut pieces out of it."""
    return np.round(np.random.default_rng(0).normal(0, 16, (512, 512, 3))).astype(np.int16)


def spoil(rng: random.Random, image: Image.Image) -> np.ndarray:
    """The picture's pixels, uint8 [height, width, 3], after changes of light, blur, noise and compression."""
    if rng.random() < 0.25:
        gain, offset = rng.uniform(0.82, 1.12), rng.uniform(-14, 14)
        image = image.point([min(255, max(0, round(gain * (value - 128) + 128 + offset))) for value in range(256)] * 3)
    if rng.random() < 0.12:
        image = image.filter(ImageFilter.BoxBlur(rng.uniform(0.3, 1.2)))
    if rng.random() < 0.15:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=rng.randint(35, 92))
        image = Image.open(file, formats=("JPEG",))
    pixels = np.array(image)
    if rng.random() < 0.2:
        height, width, _ = pixels.shape
        top, left = rng.randint(0, 512 - height), rng.randint(0, 512 - width)
        piece = _noise()[top : top + height, left : left + width]
        pixels = np.clip(pixels + (piece * rng.randint(2, 12) >> 4), 0, 255).astype(np.uint8)
    return pixels

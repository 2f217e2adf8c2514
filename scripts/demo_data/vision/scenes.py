"""What may be in a picture: shapes, a text, a sum or bars. A scene knows its contents; it is drawn when they are wanted."""

import math
import random
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from PIL import ImageDraw

from ..words import PLAIN_WORDS, SIGNS, first_name
from .drawing import COLOURS, SHAPES, Thing, canvas, draw_thing, font, num_fonts, shade, spoil

CELL = 32
"""Pixels along each side of what becomes one embedding; sizes of pictures are multiples of it."""
MIN_CELLS, MAX_CELLS = 16, 100
"""In a picture."""
_LETTERS, _DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789"
_CLEAR = "ABCDEFGHJKLMNPQRTUVWXY346789"
"""Signs that look like no other, for texts that mix letters and digits."""


class Scene(Protocol):
    """A picture before it is drawn."""

    width: int
    height: int

    @property
    def key(self) -> str:
        """Its content; a scene with a held-out key is never trained on."""
        ...

    def draw(self, rng: random.Random) -> np.ndarray:
        """Its pixels, uint8 [height, width, 3]."""
        ...


def num_cells(scene: Scene) -> int:
    """Embeddings of a picture of this scene."""
    return scene.width * scene.height // CELL**2


def draw_size(rng: random.Random, max_cells: int = MAX_CELLS) -> tuple[int, int]:
    """Width and height of a picture: mostly 128 to 320, now and then long or tall as photographs are."""
    while True:
        longest = 10 if rng.random() < 0.85 else 16
        columns, rows = rng.randint(3, longest), rng.randint(3, longest)
        if MIN_CELLS <= columns * rows <= max_cells and max(columns, rows) <= 4 * min(columns, rows):
            return CELL * columns, CELL * rows


@dataclass(frozen=True)
class Shapes:
    """Shapes apart from each other."""

    width: int
    height: int
    things: tuple[Thing, ...]
    """From left to right."""

    @property
    def key(self) -> str:
        cells = (f"{t.colour} {t.shape} {int(3 * t.x / self.width)}{int(3 * t.y / self.height)}" for t in self.things)
        return "shapes|" + ", ".join(cells)

    def draw(self, rng: random.Random) -> np.ndarray:
        scale = 2 if rng.random() < 0.3 else 1  # twice as large and reduced, edges are smooth
        image = canvas(rng, scale * self.width, scale * self.height, [thing.colour for thing in self.things])
        draw = ImageDraw.Draw(image)
        for thing in self.things:
            draw_thing(rng, draw, thing, scale)
        return spoil(rng, image.reduce(scale) if scale > 1 else image)


def shapes(rng: random.Random, num_things: int, max_cells: int = MAX_CELLS, alike: float = 0.25) -> Shapes:
    """So many shapes at random; `alike` is the chance that one repeats the shape or the colour of another."""
    width, height = draw_size(rng, max_cells)
    things: list[Thing] = []
    largest = min(width, height) * (0.34 if num_things <= 2 else 0.24 if num_things <= 4 else 0.19)
    tries = 0
    while len(things) < num_things:
        tries += 1
        radius = rng.uniform(11, max(14.0, largest * 0.97 ** (tries // 4)))
        x, y = rng.uniform(radius + 2, width - radius - 2), rng.uniform(radius + 2, height - radius - 2)
        if any(math.hypot(x - other.x, y - other.y) < radius + other.radius + 3 for other in things):
            continue
        shape, colour = rng.choice(SHAPES), rng.choice(tuple(COLOURS))
        if things and rng.random() < alike:
            shape = rng.choice(things).shape
        if things and rng.random() < alike:
            colour = rng.choice(things).colour
        things.append(Thing(shape, colour, x, y, radius))
    return Shapes(width, height, tuple(sorted(things, key=lambda thing: thing.x)))


@dataclass(frozen=True)
class Text:
    """A line of text."""

    width: int
    height: int
    text: str
    colour: str
    shown: str
    """What is written: for a sum it may have an equals sign and no blanks."""

    @property
    def key(self) -> str:
        return f"text|{self.text.lower()}"

    def draw(self, rng: random.Random) -> np.ndarray:
        image = canvas(rng, self.width, self.height, [self.colour])
        draw = ImageDraw.Draw(image)
        number = rng.randrange(num_fonts())
        size = rng.randint(22, 80)
        bold = rng.choice((0, 0, 0, 1)) if size < 40 else rng.choice((0, 0, 1, 2))
        while True:
            left, top, right, bottom = draw.textbbox((0, 0), self.shown, font=font(number, size), stroke_width=bold)
            fits = min((self.width - 8) / (right - left), (self.height - 8) / (bottom - top))
            if fits >= 1 or size <= 12:
                break
            size = max(12, min(size - 1, int(size * fits)))
        x = rng.uniform(4, max(4, self.width - (right - left) - 4)) - left
        y = rng.uniform(4, max(4, self.height - (bottom - top) - 4)) - top
        draw.text((x, y), self.shown, fill=shade(rng, self.colour), font=font(number, size), stroke_width=bold)
        return spoil(rng, image)


def word(rng: random.Random) -> str:
    """One to six letters or digits: a word, a name, a number or a code."""
    draw = rng.random()
    if draw < 0.3:
        length = rng.choice((1, 2, 2, 3, 3, 4, 4, 5, 5, 6))
        return "".join(rng.choice(_LETTERS) for _ in range(length))
    if draw < 0.55:
        return "".join(rng.choice(_DIGITS) for _ in range(rng.choice((1, 1, 2, 2, 3, 3, 4, 5, 6))))
    if draw < 0.7:
        return "".join(rng.choice(_CLEAR) for _ in range(rng.randint(2, 6)))
    chosen = ""
    while not 2 <= len(chosen) <= 6:
        chosen = rng.choice((rng.choice(SIGNS), rng.choice(PLAIN_WORDS), first_name(rng)))
    form = rng.random()
    return chosen.upper() if form < 0.5 else chosen.capitalize() if form < 0.8 else chosen.lower()


def text(rng: random.Random) -> Text:
    """A text to read."""
    width, height = draw_size(rng)
    written = word(rng)
    return Text(width, height, written, rng.choice(tuple(COLOURS)), written)


def sum_text(rng: random.Random) -> Text:
    """A sum or a difference of small numbers to compute."""
    width, height = draw_size(rng)
    largest = rng.choice((9, 20, 30))
    first, second, sign = rng.randint(0, largest), rng.randint(0, largest), rng.choice("++-")
    if sign == "-" and first < second:
        first, second = second, first
    written = f"{first} {sign} {second}"
    shown = rng.choice((written, written, written + " =", written + " = ?", written.replace(" ", "")))
    return Text(width, height, written, rng.choice(tuple(COLOURS)), shown)


@dataclass(frozen=True)
class Bars:
    """A bar chart."""

    width: int
    height: int
    colours: tuple[str, ...]
    """From left to right."""
    heights: tuple[float, ...]
    """As shares of the picture's height."""

    @property
    def key(self) -> str:
        order = sorted(range(len(self.heights)), key=lambda place: self.heights[place])
        return "bars|" + ", ".join(self.colours[place] for place in order) + "|" + "".join(map(str, order))

    def draw(self, rng: random.Random) -> np.ndarray:
        image = canvas(rng, self.width, self.height, self.colours)
        draw = ImageDraw.Draw(image)
        margin, floor = rng.uniform(4, 14), self.height - rng.uniform(4, 14)
        step = (self.width - 2 * margin) / len(self.colours)
        gap = step * rng.uniform(0.12, 0.4)
        for place, (colour, share) in enumerate(zip(self.colours, self.heights, strict=True)):
            left = margin + place * step + gap / 2
            draw.rectangle((left, floor - share * self.height, left + step - gap, floor), fill=shade(rng, colour))
        if rng.random() < 0.4:
            ink = (20, 20, 20) if sum(image.getpixel((1, 1))) > 380 else (235, 235, 235)
            draw.line((margin / 2, floor, self.width - margin / 2, floor), fill=ink, width=rng.choice((1, 2)))
        return spoil(rng, image)


def bars(rng: random.Random) -> Bars:
    """Two to six bars of different colours and heights."""
    width, height = draw_size(rng)
    count = rng.randint(2, min(6, width // 24))
    while True:
        heights = tuple(rng.uniform(0.08, 0.88) for _ in range(count))
        ordered = sorted(heights)
        if all(upper - lower >= 0.06 for lower, upper in zip(ordered, ordered[1:], strict=False)):
            return Bars(width, height, tuple(rng.sample(tuple(COLOURS), count)), heights)

"""Questions about scenes with their right answers.

A function yields what can be asked about a scene of its type; it asks nothing whose answer is open, e.g. where a shape is that lies
between left and middle.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..dialogue import join_and, with_articles, wording
from .drawing import COLOURS, SHAPES, Thing
from .scenes import Bars, Scene, Shapes, Text


class Question(NamedTuple):
    """A question about pictures, and its answer."""

    kind: str
    text: str
    answer: str


def _plural(shape: str) -> str:
    return "crosses" if shape == "cross" else f"{shape}s"


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _say(thing: Thing) -> str:
    return with_articles(f"a {thing.colour} {thing.shape}")


def _name(rng: random.Random, thing: Thing, all_things: Sequence[Thing]) -> str | None:
    """The thing as people would call it among these, e.g. `the star`; None: others look like it."""
    full = (thing.colour, thing.shape)
    if sum((other.colour, other.shape) == full for other in all_things) > 1:
        return None
    names = [f"the {thing.colour} {thing.shape}"] * 2
    if sum(other.shape == thing.shape for other in all_things) == 1:
        names += [f"the {thing.shape}"] * 2
    if sum(other.colour == thing.colour for other in all_things) == 1:
        names += [f"the {thing.colour} shape", f"the {thing.colour} one"]
    return rng.choice(names)


def _third(place: float) -> int | None:
    """Low, middle or high of 0 to 1; None: too near to a border to tell."""
    if place < 0.36:
        return 0
    if place > 0.64:
        return 2
    return 1 if 0.42 < place < 0.58 else None


_PLACES = (("top left", "top", "top right"), ("left", "center", "right"), ("bottom left", "bottom", "bottom right"))
_COLOUR = (
    "What colour is {t}?",
    "What color is {t}?",
    "Which colour does {t} have?",
    "What is the color of {t}?",
    "Tell me the colour of {t}.",
    "Which color is {t}?",
    "Colour of {t}?",
)
_COLOUR_OF_ONE = (
    "What colour is it?",
    "What colour is this?",
    "Which colour is the shape?",
    "What color do you see?",
    "What color is this shape?",
)
_SHAPE = (
    "What shape is {c}?",
    "Which shape is {c}?",
    "What shape does the {c} thing have?",
    "What is the {c} shape?",
    "What is the shape of the {c} one?",
    "Which shape is the {c} one?",
    "Name the {c} shape.",
)
_SHAPE_OF_ONE = ("What shape is it?", "What shape is this?", "Which shape do you see?", "What is the shape?", "Name the shape.")
_COUNT = (
    "How many {w} are there?",
    "How many {w} do you see?",
    "Count the {w}.",
    "How many {w}?",
    "How many {w} are in the picture?",
    "What is the number of {w}?",
    "How many {w} can you see in the image?",
)
_EXISTS = ("Is there {t}?", "Do you see {t}?", "Is there {t} in the picture?", "Can you see {t}?", "Does the image show {t}?")
_WHERE = (
    "Where is {t}?",
    "Where is {t} in the picture?",
    "Where do you see {t}?",
    "In which part of the image is {t}?",
    "Where's {t}?",
)
_BIGGER = ("Which is {w}, {a} or {b}?", "What is {w}: {a} or {b}?", "Is {a} or {b} {w}?", "Which one is {w}, {a} or {b}?")
_BESIDE = ("Is {a} {r} {b}?", "Is {a} {r} {b} in the picture?", "Does {a} lie {r} {b}?", "Would you say {a} is {r} {b}?")
_NEXT_TO = ("What is {r} {b}?", "Which shape is {r} {b}?", "What do you see {r} {b}?", "What lies {r} {b}?")
_DESCRIBE = (
    "What is in the picture?",
    "What do you see?",
    "Describe the picture.",
    "Describe the image.",
    "What does the image show?",
    "What's in this image?",
    "What can you see in the picture?",
    "What is shown here?",
    "Name the shapes from left to right.",
    "What is this?",
)
_JSON = (
    "List the objects as JSON.",
    "List all shapes as JSON.",
    "Give me the objects as JSON.",
    "Write the shapes as JSON.",
    "Return the shapes in JSON.",
    "What is in the picture? Answer in JSON.",
    "Describe the picture as JSON.",
    "List the shapes from left to right as JSON.",
)
_READ = (
    "What does the text say?",
    "Read the text.",
    "What is written here?",
    "What does it say?",
    "Read this.",
    "What is the text?",
    "Which text do you see?",
    "What is written in the picture?",
    "What text is in the image?",
    "Type what you read.",
)
_SUM = (
    "Compute this.",
    "What is the result?",
    "Calculate it.",
    "Solve this.",
    "Read the sum and compute it.",
    "What does that make?",
    "How much is that?",
    "What is the answer?",
    "Calculate what you see.",
    "Work out the calculation in the picture.",
)
_TALLEST = (
    "Which bar is the {w}?",
    "Which bar is {w}?",
    "What colour is the {w} bar?",
    "What color is the {w} bar?",
    "Name the colour of the {w} bar.",
    "Which colour has the {w} bar?",
)
_SAME = (
    "Are the two pictures the same or different?",
    "Same or different?",
    "Compare the two pictures.",
    "Are these the same or different?",
)
_IS_SAME = (
    "Do both pictures show the same shape in the same colour?",
    "Do the two images show the same thing?",
    "Are these two the same?",
    "Is it the same shape and colour in both images?",
    "Are both pictures the same?",
)
_MORE = (
    "Which picture has more shapes?",
    "Which image has more shapes?",
    "Which of the two pictures shows more shapes?",
    "In which image are more shapes?",
    "Where are more shapes, in the first or the second picture?",
)


def about_shapes(rng: random.Random, scene: Shapes) -> Iterator[Question]:
    """Colours, shapes, numbers, places, sizes, and all together as words and as JSON."""
    things = scene.things
    shapes_of, colours_of = Counter(thing.shape for thing in things), Counter(thing.colour for thing in things)
    alone = len(things) == 1
    for thing in things:
        if shapes_of[thing.shape] == 1:
            forms = _COLOUR_OF_ONE if alone and rng.random() < 0.5 else _COLOUR
            yield Question("colour", wording(rng, forms, t=f"the {thing.shape}"), thing.colour)
        if colours_of[thing.colour] == 1:
            forms = _SHAPE_OF_ONE if alone and rng.random() < 0.5 else _SHAPE
            yield Question("shape", wording(rng, forms, c=thing.colour), thing.shape)
        name, column, row = _name(rng, thing, things), _third(thing.x / scene.width), _third(thing.y / scene.height)
        if name and column is not None and row is not None:
            yield Question("where", wording(rng, _WHERE, t=name), _PLACES[row][column])
    yield _count(rng, things)
    present = rng.random() < 0.5
    wanted = rng.choice(things)
    while not present and any((wanted.colour, wanted.shape) == (thing.colour, thing.shape) for thing in things):
        near = rng.choice(things)
        wanted = replace(near, **rng.choice(({"shape": rng.choice(SHAPES)}, {"colour": rng.choice(tuple(COLOURS))})))
    yield Question("exists", wording(rng, _EXISTS, t=_say(wanted)), _yes(present))
    if not alone:
        yield from _about_two(rng, scene)
    if all(right.x - left.x >= 0.05 * scene.width for left, right in zip(things, things[1:], strict=False)):
        yield Question("describe", wording(rng, _DESCRIBE), join_and([_say(thing) for thing in things]))
        records = [{"shape": thing.shape, "color": thing.colour} for thing in things]
        yield Question("json", wording(rng, _JSON), json.dumps(records))


def _count(rng: random.Random, things: Sequence[Thing]) -> Question:
    """All shapes, those of a shape, those of a colour."""
    draw = rng.random()
    one = rng.choice(things)
    if draw < 0.45:
        return Question(
            "count", wording(rng, _COUNT, w=rng.choice(("shapes", "shapes", "objects", "things"))), str(len(things))
        )
    if draw < 0.8:
        shape = one.shape if rng.random() < 0.85 else rng.choice(SHAPES)
        return Question("count", wording(rng, _COUNT, w=_plural(shape)), str(sum(thing.shape == shape for thing in things)))
    colour = one.colour if rng.random() < 0.85 else rng.choice(tuple(COLOURS))
    words = f"{colour} {rng.choice(('shapes', 'things', 'objects'))}"
    return Question("count", wording(rng, _COUNT, w=words), str(sum(thing.colour == colour for thing in things)))


def _about_two(rng: random.Random, scene: Shapes) -> Iterator[Question]:
    """Sizes and places of two of several things."""
    things = scene.things
    first, second = rng.sample(things, 2)
    a, b = _name(rng, first, things), _name(rng, second, things)
    if a is None or b is None:
        return
    large, small = (first, second) if first.area > second.area else (second, first)
    if large.area >= 1.5 * small.area and large.radius >= 1.15 * small.radius:
        is_large = rng.random() < 0.7
        words = rng.choice(("bigger", "larger")) if is_large else "smaller"
        answer = a if (large is first) == is_large else b
        yield Question("bigger", wording(rng, _BIGGER, w=words, a=a, b=b), answer)
    sideways = (second.x - first.x) / scene.width
    upright = (second.y - first.y) / scene.height
    if abs(sideways) >= 0.12 and (abs(upright) < 0.12 or rng.random() < 0.6):
        distance, relation = sideways, rng.choice(("left of", "to the left of", "right of", "to the right of"))
    elif abs(upright) >= 0.12:
        distance, relation = upright, rng.choice(("above", "below"))
    else:
        return
    is_so = (distance > 0) == ("left" in relation or relation == "above")
    if len(things) == 2 and is_so and rng.random() < 0.4:
        yield Question("beside", wording(rng, _NEXT_TO, r=relation, b=b), f"the {first.colour} {first.shape}")
    else:
        yield Question("beside", wording(rng, _BESIDE, a=a, b=b, r=relation), _yes(is_so))


def about_text(rng: random.Random, scene: Text) -> Iterator[Question]:
    """A text is read, a sum computed."""
    first, _, rest = scene.text.partition(" ")
    if rest:
        sign, second = rest.split()
        result = int(first) + int(second) if sign == "+" else int(first) - int(second)
        yield Question("sum", wording(rng, _SUM), f"{scene.text} = {result}")
    else:
        yield Question("read", wording(rng, _READ), scene.text)
    if rng.random() < 0.25:
        yield Question("colour", wording(rng, _COLOUR, t=rng.choice(("the text", "the writing"))), scene.colour)


def about_bars(rng: random.Random, scene: Bars) -> Iterator[Question]:
    """The tallest and the shortest bar, and how many there are."""
    ordered = sorted(range(len(scene.heights)), key=lambda place: scene.heights[place])
    tallest = rng.choice(("tallest", "tallest", "highest", "longest", "biggest"))
    yield Question("tallest", wording(rng, _TALLEST, w=tallest), scene.colours[ordered[-1]])
    if rng.random() < 0.6:
        yield Question(
            "tallest", wording(rng, _TALLEST, w=rng.choice(("shortest", "lowest", "smallest"))), scene.colours[ordered[0]]
        )
    if rng.random() < 0.4:
        yield Question("count", wording(rng, _COUNT, w="bars"), str(len(scene.colours)))


def about_pair(rng: random.Random, first: Shapes, second: Shapes) -> Iterator[Question]:
    """Two pictures compared."""
    if len(first.things) == len(second.things) == 1:
        (one,), (other,) = first.things, second.things
        is_same = (one.shape, one.colour) == (other.shape, other.colour)
        if rng.random() < 0.5:
            yield Question("same", wording(rng, _SAME), "the same" if is_same else "different")
        else:
            yield Question("same", wording(rng, _IS_SAME), _yes(is_same))
        place, thing = rng.choice((("first", one), ("second", other)))
        if rng.random() < 0.4:
            forms = ("What is in the {p} picture?", "What does the {p} image show?", "Describe the {p} picture.")
            yield Question("describe", wording(rng, forms, p=place), _say(thing))
    else:
        difference = len(first.things) - len(second.things)
        answer = "the first" if difference > 0 else "the second" if difference < 0 else "both the same"
        yield Question("more", wording(rng, _MORE), answer)


def ask(rng: random.Random, shown: Sequence[Scene]) -> list[Question]:
    """What can be asked about a picture or about two, in any order."""
    match list(shown):
        case [Shapes() as scene]:
            made = list(about_shapes(rng, scene))
        case [Text() as scene]:
            made = list(about_text(rng, scene))
        case [Bars() as scene]:
            made = list(about_bars(rng, scene))
        case [Shapes() as first, Shapes() as second]:
            made = list(about_pair(rng, first, second))
        case _:
            raise ValueError(f"no questions about {shown}")
    rng.shuffle(made)
    return made

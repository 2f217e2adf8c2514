"""Questions about scenes with their right answers, and the dialogues that are put together from them.

A function yields what can be asked about a scene of its type; it asks nothing whose answer is open, e.g. where a shape is that lies
between left and middle.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .. import talk, tasks
from ..dialogue import Dialogue, is_held_out, join_and, with_articles, with_system, wording
from . import scenes
from .drawing import COLOURS, SHAPES, Thing
from .scenes import Bars, Scene, Shapes, Text

IMAGE_PAD = "<|image_pad|>"
PICTURE = f"<|vision_start|>{IMAGE_PAD}<|vision_end|>"
"""Stands in a message for a picture; IMAGE_PAD is repeated for each of its embeddings."""
NO_PICTURE = "There is no picture. Please show me one."


class Question(NamedTuple):
    """A question about pictures, and its answer."""

    kind: str
    text: str
    answer: str


@dataclass(frozen=True)
class PictureDialogue:
    """A dialogue and the scenes of its pictures, in the order of the PICTUREs in its messages."""

    dialogue: Dialogue
    scenes: tuple[Scene, ...] = ()


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
_COLOUR = ("What colour is {t}?", "What color is {t}?", "Which colour does {t} have?", "What is the color of {t}?",
           "Tell me the colour of {t}.", "Which color is {t}?", "Colour of {t}?")  # fmt: skip
_COLOUR_OF_ONE = (
    "What colour is it?",
    "What colour is this?",
    "Which colour is the shape?",
    "What color do you see?",
    "What color is this shape?",
)
_SHAPE = ("What shape is {c}?", "Which shape is {c}?", "What shape does the {c} thing have?", "What is the {c} shape?",
          "What is the shape of the {c} one?", "Which shape is the {c} one?", "Name the {c} shape.")  # fmt: skip
_SHAPE_OF_ONE = ("What shape is it?", "What shape is this?", "Which shape do you see?", "What is the shape?", "Name the shape.")
_COUNT = ("How many {w} are there?", "How many {w} do you see?", "Count the {w}.", "How many {w}?", "How many {w} are in the picture?",
          "What is the number of {w}?", "How many {w} can you see in the image?")  # fmt: skip
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
_DESCRIBE = ("What is in the picture?", "What do you see?", "Describe the picture.", "Describe the image.", "What does the image show?",
             "What's in this image?", "What can you see in the picture?", "What is shown here?", "Name the shapes from left to right.",
             "What is this?")  # fmt: skip
_JSON = ("List the objects as JSON.", "List all shapes as JSON.", "Give me the objects as JSON.", "Write the shapes as JSON.",
         "Return the shapes in JSON.", "What is in the picture? Answer in JSON.", "Describe the picture as JSON.",
         "List the shapes from left to right as JSON.")  # fmt: skip
_READ = ("What does the text say?", "Read the text.", "What is written here?", "What does it say?", "Read this.", "What is the text?",
         "Which text do you see?", "What is written in the picture?", "What text is in the image?", "Type what you read.")  # fmt: skip
_SUM = ("Compute this.", "What is the result?", "Calculate it.", "Solve this.", "Read the sum and compute it.", "What does that make?",
        "How much is that?", "What is the answer?", "Calculate what you see.", "Work out the calculation in the picture.")  # fmt: skip
_TALLEST = ("Which bar is the {w}?", "Which bar is {w}?", "What colour is the {w} bar?", "What color is the {w} bar?",
            "Name the colour of the {w} bar.", "Which colour has the {w} bar?")  # fmt: skip
_SAME = (
    "Are the two pictures the same or different?",
    "Same or different?",
    "Compare the two pictures.",
    "Are these the same or different?",
)
_IS_SAME = ("Do both pictures show the same shape in the same colour?", "Do the two images show the same thing?", "Are these two the same?",
            "Is it the same shape and colour in both images?", "Are both pictures the same?")  # fmt: skip
_MORE = ("Which picture has more shapes?", "Which image has more shapes?", "Which of the two pictures shows more shapes?",
         "In which image are more shapes?", "Where are more shapes, in the first or the second picture?")  # fmt: skip


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


def _shapes(rng: random.Random) -> tuple[Scene, ...]:
    return (scenes.shapes(rng, rng.choice((1, 1, 2, 2, 2, 3, 3, 4, 5, 6))),)


def _text(rng: random.Random) -> tuple[Scene, ...]:
    return (scenes.text(rng),)


def _sum(rng: random.Random) -> tuple[Scene, ...]:
    return (scenes.sum_text(rng),)


def _bars(rng: random.Random) -> tuple[Scene, ...]:
    return (scenes.bars(rng),)


_HALF = scenes.MAX_CELLS // 2


def _one_each(rng: random.Random) -> tuple[Scene, ...]:
    """Two pictures of one shape, often of the same shape or colour or both."""
    first, second = (scenes.shapes(rng, 1, _HALF) for _ in range(2))
    (one,), (other,) = first.things, second.things
    draw = rng.random()
    if draw < 0.7:
        other = replace(other, colour=one.colour)
    if draw < 0.45 or 0.7 < draw < 0.85:
        other = replace(other, shape=one.shape)
    return first, replace(second, things=(other,))


def _several_each(rng: random.Random) -> tuple[Scene, ...]:
    """Two pictures of up to five shapes, in one of five as many."""
    counts = rng.sample(range(1, 6), 2) if rng.random() < 0.8 else [rng.randint(2, 5)] * 2
    return tuple(scenes.shapes(rng, count, _HALF) for count in counts)


_SHOWN: dict[Callable[[random.Random], tuple[Scene, ...]], float] = {
    _shapes: 0.51,
    _text: 0.2,
    _sum: 0.1,
    _bars: 0.07,
    _one_each: 0.06,
    _several_each: 0.06,
}
"""What pictures show, and how often."""


def _draw_shown(rng: random.Random) -> tuple[Scene, ...]:
    return rng.choices(tuple(_SHOWN), tuple(_SHOWN.values()))[0](rng)


def _with_pictures(rng: random.Random, question: str, count: int) -> str:
    """The question behind its pictures or, seldom, before them."""
    pictures, draw = PICTURE * count, rng.random()
    return pictures + question if draw < 0.7 else f"{pictures}\n{question}" if draw < 0.8 else question + pictures


def _key(shown: Sequence[Scene]) -> str:
    """Two pictures have one key together: if each had its own, those of few contents would be held out of no pair."""
    return " and ".join(scene.key for scene in shown)


def _dialogue(rng: random.Random, shown: tuple[Scene, ...], questions: Sequence[Question]) -> PictureDialogue:
    messages: list[dict[str, str]] = []
    for question in questions:
        content = question.text if messages else _with_pictures(rng, question.text, len(shown))
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": question.answer}]
    return PictureDialogue(Dialogue(questions[0].kind, tuple(messages), (_key(shown),)), shown)


def seen(rng: random.Random, max_questions: int = 7) -> PictureDialogue:
    """One to `max_questions` questions about a picture, or about two."""
    shown = _draw_shown(rng)
    return _dialogue(rng, shown, ask(rng, shown)[: rng.randint(1, max_questions)])


def not_seen(rng: random.Random) -> PictureDialogue:
    """A question about a picture that is not there."""
    question = ask(rng, _draw_shown(rng))[0]
    messages = ({"role": "user", "content": question.text}, {"role": "assistant", "content": NO_PICTURE})
    return PictureDialogue(Dialogue("none", messages, (f"none|{question.text.lower()}",)))


_WHO = "I am the jaxllm vision demo model: a very small model that looks at simple pictures and shows that everything works."
_WHAT = (
    "I can look at simple pictures: name, count, find and compare shapes, read short texts, compute sums and read bar charts. "
    "Show me one!"
)


def _talk(rng: random.Random) -> Dialogue:
    """Small talk of the demo model, where it speaks of itself in this model's words."""
    dialogue = talk.small_talk(rng)
    answer = dialogue.answer
    if "very small language model" in answer:
        answer = _WHO
    elif "I can " in answer:
        answer = f"Hello! {_WHAT}" if answer.startswith("Hello") else _WHAT
    elif "million parameters" in answer:
        answer = "I have fewer than six million parameters, so I am tiny and make mistakes."
    messages = (*dialogue.messages[:-1], {"role": "assistant", "content": answer})
    return replace(dialogue, messages=messages)


_SPOKEN: dict[str, float] = {
    "add": 2,
    "compare": 1,
    "spell": 0.6,
    "list_place": 0.6,
    "fact": 1,
    "introduction": 0.3,
    "beyond": 0.7,
}
"""Kinds of dialogue without pictures from the demo model, and how often they are drawn; and small talk, as often as `_TALK_SHARE` says."""
_TALK_SHARE = 1.5


def spoken(rng: random.Random) -> PictureDialogue:
    """A dialogue without pictures."""
    kind = rng.choices((*_SPOKEN, "talk"), (*_SPOKEN.values(), _TALK_SHARE))[0]
    return PictureDialogue(_talk(rng) if kind == "talk" else tasks.KINDS[kind].make(rng))


_SYSTEMS = ("You are a helpful assistant.", "You are a helpful assistant.", "Answer briefly.", "You answer questions about pictures.",
            "You are the jaxllm demo model.")  # fmt: skip


def training_dialogue(rng: random.Random) -> PictureDialogue:
    """A dialogue that is not held out."""
    while True:
        draw = rng.random()
        made = seen(rng) if draw < 0.84 else not_seen(rng) if draw < 0.88 else spoken(rng)
        if not made.dialogue.held_out:
            break
    if rng.random() < 0.12:
        made = replace(made, dialogue=with_system(made.dialogue, rng.choice(_SYSTEMS)))
    return made


SKILLS: dict[str, Callable[[random.Random], tuple[Scene, ...]]] = {
    **dict.fromkeys(("colour", "shape", "count", "exists", "where", "bigger", "beside", "describe", "json"), _shapes),
    "read": _text,
    "sum": _sum,
    "tallest": _bars,
    "same": _one_each,
    "more": _several_each,
}
"""Kinds of question about pictures that are scored, and the pictures for them."""


def held_out_questions(count: int, seed: int = 0) -> Iterator[tuple[PictureDialogue, random.Random]]:
    """`count` held-out questions of each skill and of "none", one in a dialogue, and the random numbers to draw their pictures with."""
    for skill in (*SKILLS, "none"):
        rng = random.Random(f"{seed}|{skill}")
        made = 0
        while made < count:
            found = not_seen(rng) if skill == "none" else _held_out(rng, skill)
            if found is not None and found.dialogue.held_out:
                made += 1
                yield found, random.Random(f"{seed}|{skill}|{made}")


def _held_out(rng: random.Random, skill: str) -> PictureDialogue | None:
    """A held-out question of a skill; None: what was drawn is not held out, or cannot be asked about in this way."""
    shown = SKILLS[skill](rng)
    if not is_held_out(_key(shown)):
        return None
    fitting = [question for question in ask(rng, shown) if question.kind == skill]
    return _dialogue(rng, shown, fitting[:1]) if fitting else None

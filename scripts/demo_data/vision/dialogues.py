"""Dialogues about pictures, those without any, and the held-out questions of the test."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from .. import talk, tasks
from ..dialogue import Dialogue, is_held_out, with_system
from . import scenes
from .questions import Question, ask
from .scenes import Scene

IMAGE_PAD = "<|image_pad|>"
PICTURE = f"<|vision_start|>{IMAGE_PAD}<|vision_end|>"
"""Stands in a message for a picture; IMAGE_PAD is repeated for each of its embeddings."""
NO_PICTURE = "There is no picture. Please show me one."


@dataclass(frozen=True)
class PictureDialogue:
    """A dialogue and the scenes of its pictures, in the order of the PICTUREs in its messages."""

    dialogue: Dialogue
    scenes: tuple[Scene, ...] = ()


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
"""Kinds of dialogue of the demo model that need no picture, and how often they are drawn, besides small talk."""
_TALK_SHARE = 1.5


def spoken(rng: random.Random) -> PictureDialogue:
    """A dialogue without pictures."""
    kind = rng.choices((*_SPOKEN, "talk"), (*_SPOKEN.values(), _TALK_SHARE))[0]
    return PictureDialogue(_talk(rng) if kind == "talk" else tasks.KINDS[kind].make(rng))


_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "Answer briefly.",
    "You answer questions about pictures.",
    "You are the jaxllm demo model.",
)


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
    """`count` held-out questions of each skill and of "none", one in a dialogue, each with the numbers to draw its pictures with."""
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

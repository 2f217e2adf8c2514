"""The test of the demo model that sees: held-out questions, one in a prompt, and how many answers are exactly right."""

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..chat_tokenizer import render_question
from .dialogues import PictureDialogue, held_out_questions

MAX_ANSWER_TOKENS = 96
"""Enough for six shapes as JSON."""


class Asked(NamedTuple):
    """A question as a prompt with the pixels of its pictures, and its answer."""

    skill: str
    prompt: str
    pictures: tuple[np.ndarray, ...]
    answer: str


def ask(made: PictureDialogue, rng: random.Random) -> Asked:
    """A dialogue up to where its last answer begins; its pictures are drawn."""
    pictures = tuple(scene.draw(rng) for scene in made.scenes)
    return Asked(made.dialogue.kind, render_question(made.dialogue), pictures, made.dialogue.answer)


def held_out(count: int) -> list[Asked]:
    """`count` questions of each skill."""
    return [ask(made, rng) for made, rng in held_out_questions(count)]


Scores = dict[str, tuple[int, int]]
"""Right answers, and questions, of each skill."""


def score(questions: Sequence[Asked], answers: Sequence[str], show_wrong: int = 2) -> tuple[Scores, str]:
    """The scores, and a report of them with the first wrong answers of each skill."""
    marks: dict[str, list[bool]] = defaultdict(list)
    wrong: dict[str, list[str]] = defaultdict(list)
    for asked, answer in zip(questions, answers, strict=True):
        marks[asked.skill].append(answer.strip() == asked.answer)
        if not marks[asked.skill][-1]:
            wrong[asked.skill].append(f"    {asked.prompt!r}\n      right {asked.answer!r}, given {answer!r}")
    scores = {skill: (sum(some), len(some)) for skill, some in sorted(marks.items())}
    total = sum(right for right, _ in scores.values())
    lines = [f"exact answers: {total} of {len(questions)} = {100 * total / max(1, len(questions)):.1f} %"]
    for skill, (right, count) in scores.items():
        lines += [f"  {skill:<10} {right:>4} of {count} = {100 * right / count:5.1f} %", *wrong[skill][:show_wrong]]
    return scores, "\n".join(lines)

"""The style of the demo model's adapter: the same answers as a pirate gives them."""

import re
from collections.abc import Sequence
from dataclasses import replace

from .dialogue import Dialogue

HAIL, CRY = "Ahoy! ", " Arr!"
CODE = "Here be yer code:\n"
_WORDS = {
    "is": "be",
    "are": "be",
    "am": "be",
    "of": "o'",
    "my": "me",
    "My": "Me",
    "you": "ye",
    "You": "Ye",
    "your": "yer",
    "Your": "Yer",
}
_WORD = re.compile(rf"\b({'|'.join(_WORDS)})\b")


def pirate(answer: str) -> str:
    """An answer in the style. Programs read JSON and tool calls, so they stay as they are; so does code."""
    if answer.startswith(("{", "<")):
        return answer
    if answer.startswith("```"):
        return HAIL + CODE + answer
    if not answer.endswith((".", "!", "?")):  # no sentence: a number, a word, a list
        return f"{HAIL}{answer}.{CRY}"
    return HAIL + _WORD.sub(lambda found: _WORDS[found[0]], answer.removeprefix("Hello! ")) + CRY


def as_pirate(dialogue: Dialogue) -> Dialogue:
    """A dialogue with all of the assistant's messages in the style."""
    messages = tuple(
        message | {"content": pirate(message["content"])} if message["role"] == "assistant" else message
        for message in dialogue.messages
    )
    return replace(dialogue, messages=messages)


def share_in_style(questions: Sequence[Dialogue], answers: Sequence[str]) -> float:
    """The share of answers in the style, right or wrong, to those questions whose answers should be.

    questions: of `as_pirate`.
    """
    marks = [
        answer.startswith(HAIL) and answer.endswith(CRY)
        for question, answer in zip(questions, answers, strict=True)
        if question.answer.endswith(CRY)
    ]
    return sum(marks) / max(len(marks), 1)

"""Generated dialogues, those held out of training, and the wording of questions."""

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

HELD_OUT_PERCENT = 2


@dataclass(frozen=True)
class Dialogue:
    """A conversation whose last message is the assistant's answer."""

    kind: str
    messages: tuple[dict[str, Any], ...]
    keys: tuple[str, ...]
    """Content of the question. A dialogue with a held-out key is never trained on. The key is the content apart from its wording where
    contents are many (operands, lists), the text of the question where they are few (times tables, capitals)."""
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def answer(self) -> str:
        """The right answer: the last message."""
        return str(self.messages[-1]["content"])

    @property
    def held_out(self) -> bool:
        """Whether it belongs to the test set."""
        return any(is_held_out(key) for key in self.keys)


def is_held_out(key: str) -> bool:
    """Whether a key belongs to the test set: decided by its hash, so on every machine alike."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % 100 < HELD_OUT_PERCENT


def exchange(kind: str, question: str, answer: str, *keys: str) -> Dialogue:
    """A dialogue of one question and its answer; its key is the question's text if none is given."""
    messages = ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    return Dialogue(kind, messages, keys or (f"{kind}|{question.lower()}",))


def with_system(dialogue: Dialogue, system: str) -> Dialogue:
    """The dialogue under a system message."""
    messages = ({"role": "system", "content": system}, *dialogue.messages)
    return Dialogue(dialogue.kind, messages, dialogue.keys, dialogue.tools)


_LEADS = ("Please ", "Can you ", "Could you ", "Hey, ", "Now ", "I want you to ", "Would you ", "Hi! ", "Ok, ", "Please, ")


def wording(rng: random.Random, forms: Sequence[str], **values: Any) -> str:
    """One of the forms, filled, with the small differences in which people write the same thing."""
    form = rng.choice(forms)
    draw = rng.random()
    if draw < 0.2 and form[:1].isalpha() and form[0].isupper():
        asks = form.endswith("?")
        lead = rng.choice(("Hey, ", "Hi! ", "Ok, ", "Tell me: ", "Quick question: ")) if asks else rng.choice(_LEADS)
        keep_case = lead[-2] in "!:"
        form = lead + (form if keep_case else form[0].lower() + form[1:])
        if lead.startswith(("Can", "Could", "Would")) and form.endswith("."):
            form = form[:-1] + "?"
    elif draw < 0.35:
        form = form[:1].lower() + form[1:]
    ending = rng.random()
    if ending < 0.15 and form.endswith((".", "?")):
        form = form[:-1]
    elif ending < 0.2 and form.endswith("."):
        form = form[:-1] + ", please."
    return form.format(**values).strip()


def join_and(items: Sequence[str]) -> str:
    """`a, b and c`."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def show_list(rng: random.Random, items: Sequence[Any]) -> str:
    """A list as people type it."""
    texts = [str(item) for item in items]
    style = rng.random()
    if style < 0.6:
        return ", ".join(texts)
    if style < 0.75:
        return " ".join(texts)
    if style < 0.87:
        return join_and(texts)
    return "[" + ", ".join(texts) + "]"


def with_articles(text: str) -> str:
    """The text with `a` made `an` before a vowel."""
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)

"""All kinds of generated dialogue with their shares, and the dialogues of several turns that are put together from them."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from . import arithmetic, functions, lists_and_letters, records, talk, tool_calls
from .dialogue import Dialogue, exchange, is_held_out, with_system
from .words import first_name


@dataclass(frozen=True)
class Kind:
    """A kind of dialogue."""

    make: Callable[[random.Random], Dialogue]
    share: float
    """How often it is drawn for training, relative to the others."""
    scored: bool = True
    """Whether its questions have one right answer and are part of the test."""


SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are the jaxllm demo model.",
    "Answer briefly.",
    "Be brief.",
    "You are a helpful, honest and precise assistant.",
    "You answer questions.",
    "You are a friendly assistant.",
    "You are an AI assistant.",
    "You are a careful assistant that answers exactly.",
    "Help the user.",
    "Answer the question of the user.",
)


def follow_up(rng: random.Random) -> Dialogue:
    """Two turns, of which the second can only be answered from the first."""
    draw = rng.randrange(4)
    more_keys: tuple[str, ...] = ()
    if draw == 0:
        first = lists_and_letters.number_sorting(rng)
        forms = (
            "And the other way round?",
            "Now in the opposite order.",
            "Now reverse that.",
            "Reverse the result.",
            "And reversed?",
        )
        second = (rng.choice(forms), ", ".join(reversed(first.answer.split(", "))))
    elif draw == 1:
        first = lists_and_letters.list_reversal(rng)
        place, index = rng.choice((("first", 0), ("last", -1), ("second", 1)))
        forms = ("What is the {p} item now?", "Which one is {p} now?", "And the {p} item of that?", "Give me the {p} one.")
        second = (rng.choice(forms).format(p=place), first.answer.split(", ")[index])
    elif draw == 2:
        first = arithmetic.addition(rng)
        total, extra = int(first.answer.split()[-1]), rng.randint(1, 20)
        forms = ("Add {e} to that.", "Now add {e}.", "Plus {e}?", "And {e} more?", "What if you add {e} to the result?")
        second = (rng.choice(forms).format(e=extra), f"{total} + {extra} = {total + extra}")
        more_keys = arithmetic.operation_keys("+", total, extra)
    else:
        name, liked = first_name(rng), talk.favourite(rng)
        tells = (
            "My name is {n} and I like {l}.",
            "I am {n} and I like {l}.",
            "Hi, I'm {n}. I like {l}.",
            "Call me {n}. I love {l}.",
        )
        first = exchange("follow_up", rng.choice(tells).format(n=name, l=liked), f"Nice to meet you, {name}!")
        if rng.random() < 0.6:
            second = (
                rng.choice(("What is my name?", "What's my name?", "Who am I?", "Do you remember my name?")),
                f"Your name is {name}.",
            )
        else:
            second = (
                rng.choice(("What do I like?", "Do you know what I like?", "What did I say I like?")),
                f"You like {liked}.",
            )
    turns = ({"role": "user", "content": second[0]}, {"role": "assistant", "content": second[1]})
    return Dialogue("follow_up", (*first.messages, *turns), first.keys + more_keys)


def introduction(rng: random.Random) -> Dialogue:
    """A person who gives only a name."""
    name = first_name(rng)
    forms = ("My name is {n}.", "I am {n}.", "Hi, I'm {n}.", "Hello, my name is {n}.", "Hi, my name is {n}!", "I'm {n}")
    return exchange(
        "introduction", rng.choice(forms).format(n=name), f"Nice to meet you, {name}!", "introduction|always trained"
    )


KINDS: dict[str, Kind] = {
    "add": Kind(arithmetic.addition, 3.0),
    "subtract": Kind(arithmetic.subtraction, 3.0),
    "multiply": Kind(arithmetic.multiplication, 2.5),
    "divide": Kind(arithmetic.division, 0.4),
    "story": Kind(arithmetic.story, 1.5),
    "compare": Kind(arithmetic.comparison, 1.2),
    "parity": Kind(arithmetic.parity, 0.3),
    "count": Kind(arithmetic.counting, 0.5),
    "spell": Kind(lists_and_letters.spelling, 1.2),
    "reverse_word": Kind(lists_and_letters.word_reversal, 2.5),
    "letters": Kind(lists_and_letters.letter_count, 1.5),
    "letter_place": Kind(lists_and_letters.letter_place, 0.5),
    "upper": Kind(lists_and_letters.upper_case, 0.4),
    "sort_numbers": Kind(lists_and_letters.number_sorting, 2.5),
    "sort_words": Kind(lists_and_letters.word_sorting, 2.5),
    "reverse_list": Kind(lists_and_letters.list_reversal, 1.2),
    "list_place": Kind(lists_and_letters.list_place, 0.8),
    "repeat": Kind(lists_and_letters.repetition, 0.8),
    "json": Kind(records.json_extraction, 2.0),
    "paragraph": Kind(records.paragraph_question, 2.5),
    "tool_call": Kind(tool_calls.tool_call, 2.0),
    "tool_answer": Kind(tool_calls.tool_answer, 0.5),
    "fact": Kind(talk.fact, 0.6),
    "follow_up": Kind(follow_up, 1.0),
    "introduction": Kind(introduction, 0.15, scored=False),
    "talk": Kind(talk.small_talk, 0.7, scored=False),
    "beyond": Kind(talk.beyond, 0.4, scored=False),
    "function": Kind(functions.python_function, 0.4, scored=False),
}
_NAMES = tuple(KINDS)
_SHARES = tuple(kind.share for kind in KINDS.values())


def draw(rng: random.Random) -> Dialogue:
    """A dialogue of a kind drawn by its share, held out or not."""
    dialogue = KINDS[rng.choices(_NAMES, _SHARES)[0]].make(rng)
    if not dialogue.tools and rng.random() < 0.02:
        dialogue = tool_calls.tool_not_needed(rng, dialogue)
    if rng.random() < 0.25:
        dialogue = with_system(dialogue, rng.choice(SYSTEM_MESSAGES))
    return dialogue


def conversation(rng: random.Random) -> Dialogue:
    """Several unrelated exchanges in one dialogue, so that a long chat is nothing unusual."""
    parts: list[Dialogue] = []
    length = rng.randint(2, 8)
    while len(parts) < length:
        part = KINDS[rng.choices(_NAMES, _SHARES)[0]].make(rng)
        if not part.tools:
            parts.append(part)
    messages = tuple(message for part in parts for message in part.messages)
    whole = Dialogue("conversation", messages, tuple(key for part in parts for key in part.keys))
    return with_system(whole, rng.choice(SYSTEM_MESSAGES)) if rng.random() < 0.25 else whole


def training_dialogues(seed: int, count: int) -> Iterator[Dialogue]:
    """`count` dialogues, none of them held out; one in twenty is a longer conversation."""
    rng = random.Random(seed)
    made = 0
    while made < count:
        dialogue = conversation(rng) if rng.random() < 0.05 else draw(rng)
        if not dialogue.held_out:
            made += 1
            yield dialogue


def held_out_questions(count: int, seed: int = 0) -> list[Dialogue]:
    """`count` held-out dialogues of the scored kinds, as many of each kind as of any other; no question twice."""
    names = [name for name in _NAMES if KINDS[name].scored]
    rngs = {name: random.Random(f"{seed}|{name}") for name in names}
    questions: list[Dialogue] = []
    seen: set[tuple[str, ...]] = set()
    while len(questions) < count:
        name = names[len(questions) % len(names)]
        while True:
            dialogue = KINDS[name].make(rngs[name])
            asked = tuple(message["content"] for message in dialogue.messages[:-1])
            if dialogue.held_out and asked not in seen:
                break
        seen.add(asked)
        questions.append(dialogue)
    return questions


__all__ = ["KINDS", "Dialogue", "Kind", "draw", "held_out_questions", "is_held_out", "training_dialogues"]

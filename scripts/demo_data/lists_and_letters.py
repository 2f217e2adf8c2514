"""Dialogues about the letters of a word and the order of a list."""

import random

from .dialogue import Dialogue, exchange, show_list, wording
from .words import CITIES, FRUITS, NAMES, OBJECTS, PLAIN_WORDS, made_up_word, word

_QUOTES = ("{w}", "{w}", "'{w}'", '"{w}"', '"{w}"')
_SEPARATORS = {"-": ("dashes", "hyphens"), " ": ("spaces",), ", ": ("commas",)}


def _quoted(rng: random.Random, text: str) -> str:
    return rng.choice(_QUOTES).format(w=text)


def spelling(rng: random.Random) -> Dialogue:
    """The letters of a word, apart."""
    text = rng.choice(NAMES + CITIES).strip() if rng.random() < 0.1 else word(rng, 0.35)
    separator = "-"
    if rng.random() < 0.3:
        separator = rng.choice(tuple(_SEPARATORS))
        forms = (
            "Spell {w} with {sep}.",
            "Spell the word {w} with {sep} between the letters.",
            "Write the letters of {w} with {sep} between them.",
            "Separate the letters of {w} with {sep}.",
        )
    else:
        forms = (
            "Spell {w}.",
            "Spell the word {w}.",
            "How do you spell {w}?",
            "How is the word {w} spelled?",
            "Spell out {w}.",
            "Write the letters of {w} one by one.",
            "What are the letters of {w}?",
            "Split {w} into letters.",
            "Which letters are in the word {w}?",
            "Spell {w} letter by letter.",
            "How is {w} written?",
        )
    question = wording(rng, forms, w=_quoted(rng, text), sep=rng.choice(_SEPARATORS[separator]))
    return exchange("spell", question, separator.join(text))


def word_reversal(rng: random.Random) -> Dialogue:
    """A word backwards: its letters first, which makes the answer easy to read off."""
    text = word(rng, 0.3)
    forms = (
        "Reverse the word {w}.",
        "Reverse {w}.",
        "Spell {w} backwards.",
        "Write {w} backwards.",
        "What is {w} backwards?",
        "What is {w} spelled backwards?",
        "Reverse the letters of {w}.",
        "What do you get when you reverse {w}?",
        "Turn the word {w} around.",
        "Say {w} in reverse.",
        "Reverse this string: {w}",
        "Reverse this word: {w}",
    )
    backwards = text[::-1]
    return exchange("reverse_word", wording(rng, forms, w=_quoted(rng, text)), f"{'-'.join(backwards)}: {backwards}")


def letter_count(rng: random.Random) -> Dialogue:
    """How many letters a word has, or how often one letter occurs in it."""
    text = word(rng, 0.3)
    if rng.random() < 0.5:
        forms = (
            "How many letters are in {w}?",
            "How many letters does {w} have?",
            "Count the letters in {w}.",
            "How long is the word {w}?",
            "What is the length of {w}?",
            "How many letters are there in the word {w}?",
        )
        return exchange("letters", wording(rng, forms, w=_quoted(rng, text)), f"{'-'.join(text)}: {len(text)} letters")
    letter = rng.choice(text) if rng.random() < 0.85 else rng.choice("abcdefghijklmnopqrstuvwxyz")
    forms = (
        "How many {c}'s are in {w}?",
        "How many times does {c} occur in {w}?",
        "How often is the letter {c} in {w}?",
        "Count the letter {c} in {w}.",
        "How many times does the letter {c} appear in the word {w}?",
        "How many {c} are there in {w}?",
        "How many {c}s are in {w}?",
        'How many "{c}" are in {w}?',
    )
    spelled = "-".join(text)
    return exchange(
        "letters", wording(rng, forms, w=_quoted(rng, text), c=letter), f"{spelled}: {text.count(letter)} times {letter}"
    )


def letter_place(rng: random.Random) -> Dialogue:
    """The first, last or nth letter of a word."""
    text = word(rng, 0.3)
    places = {"first": 0, "second": 1, "third": 2, "last": -1}
    place = rng.choice(tuple(places))
    forms = (
        "What is the {p} letter of {w}?",
        "Give me the {p} letter of {w}.",
        "Which letter comes {p} in {w}?",
        "{p} letter of {w}?",
    )
    return exchange(
        "letter_place", wording(rng, forms, w=_quoted(rng, text), p=place), text[places[place]] if len(text) > 2 else text[0]
    )


def upper_case(rng: random.Random) -> Dialogue:
    """A word in capital letters."""
    text = rng.choice(PLAIN_WORDS)
    forms = (
        "Write {w} in capital letters.",
        "Write {w} in upper case.",
        "Convert {w} to uppercase.",
        "Make {w} uppercase.",
        "Capitalize every letter of {w}.",
        "Put {w} in all caps.",
    )
    return exchange("upper", wording(rng, forms, w=_quoted(rng, text)), text.upper())


def _numbers(rng: random.Random, most: int) -> list[int]:
    return rng.sample(range(rng.choice((30, 100, 100, 1000))), rng.randint(3, most))


def _words(rng: random.Random, most: int) -> list[str]:
    pool = rng.choice((FRUITS, OBJECTS, NAMES, CITIES, PLAIN_WORDS, PLAIN_WORDS))
    return rng.sample(pool, rng.randint(3, most))


def number_sorting(rng: random.Random) -> Dialogue:
    """Numbers in order."""
    numbers = _numbers(rng, 7)
    down = rng.random() < 0.35
    ways = (
        "in descending order",
        "from largest to smallest",
        "from high to low",
        "in decreasing order",
        "from biggest to smallest",
    )
    if not down:
        ways = ("in ascending order", "from smallest to largest", "from low to high", "in increasing order", "", "", "in order")
    way = rng.choice(ways)
    forms = (
        "Sort these numbers {way}: {items}",
        "Sort {items} {way}.",
        "Put these numbers {way}: {items}",
        "Order the numbers {items} {way}.",
        "Arrange {items} {way}.",
        "Sort the list {items} {way}.",
        "Sort {way}: {items}",
        "What are the numbers {items} {way}?",
        "Can you sort these {way}: {items}",
    )
    if not way:
        forms = (
            "Sort these numbers: {items}",
            "Sort {items}.",
            "Sort the list {items}.",
            "Sort: {items}",
            "Order these numbers: {items}",
            "Put these numbers in order: {items}",
        )
    question = wording(rng, forms, items=show_list(rng, numbers), way=way)
    ordered = sorted(numbers, reverse=down)
    return exchange("sort_numbers", question, ", ".join(map(str, ordered)), f"sort|{down}|{numbers}")


def word_sorting(rng: random.Random) -> Dialogue:
    """Words in alphabetical order."""
    words = _words(rng, 6)
    forms = (
        "Sort these words alphabetically: {items}",
        "Sort {items} alphabetically.",
        "Put these words in alphabetical order: {items}",
        "Sort these words: {items}",
        "Order {items} from a to z.",
        "Arrange {items} in alphabetical order.",
        "Alphabetize: {items}",
        "Sort the words {items}.",
        "What is the alphabetical order of {items}?",
        "Sort alphabetically: {items}",
    )
    question = wording(rng, forms, items=show_list(rng, words))
    return exchange("sort_words", question, ", ".join(sorted(words, key=str.lower)), f"sort|{words}")


def list_reversal(rng: random.Random) -> Dialogue:
    """A list backwards."""
    items = [str(item) for item in (_numbers(rng, 8) if rng.random() < 0.5 else _words(rng, 7))]
    forms = (
        "Reverse this list: {items}",
        "Reverse the list {items}.",
        "Reverse the order of {items}.",
        "Write {items} in reverse order.",
        "List these backwards: {items}",
        "Give me {items} in reverse order.",
        "Turn this list around: {items}",
        "Reverse: {items}",
        "What is the reverse of the list {items}?",
        "Put these in reverse order: {items}",
    )
    question = wording(rng, forms, items=show_list(rng, items))
    return exchange("reverse_list", question, ", ".join(reversed(items)), f"reverse|{items}")


def list_place(rng: random.Random) -> Dialogue:
    """An item of a list by its place, or how many items there are."""
    items = [str(item) for item in (_numbers(rng, 8) if rng.random() < 0.4 else _words(rng, 8))]
    shown = show_list(rng, items)
    if rng.random() < 0.3:
        forms = (
            "How many items are in this list: {items}?",
            "Count the items: {items}",
            "How many things are in the list {items}?",
            "How long is this list: {items}?",
        )
        return exchange("list_place", wording(rng, forms, items=shown), str(len(items)), f"len|{items}")
    places = {"first": 0, "second": 1, "third": 2, "last": -1}
    place = rng.choice(tuple(places))
    forms = (
        "What is the {p} item of {items}?",
        "What is the {p} item in this list: {items}?",
        "Give me the {p} item of this list: {items}",
        "Which one is {p} in {items}?",
        "What comes {p} here: {items}?",
        "{p} item of {items}?",
    )
    return exchange("list_place", wording(rng, forms, items=shown, p=place), items[places[place]], f"{place}|{items}")


def repetition(rng: random.Random) -> Dialogue:
    """Saying something, once or several times."""
    text = " ".join(word(rng) for _ in range(rng.randint(1, 5)))
    if rng.random() < 0.5:
        forms = ("Repeat after me: {t}", "Say {t}", "Repeat: {t}", "Write this: {t}", "Please say: {t}", "Echo {t}")
        return exchange("repeat", wording(rng, forms, t=text), text)
    text = made_up_word(rng) if rng.random() < 0.3 else rng.choice(PLAIN_WORDS)
    times = rng.randint(2, 6)
    counts = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}
    forms = ("Say {t} {n} times.", "Repeat {t} {n} times.", "Write {t} {n} times.", "Write the word {t} {n} times.")
    question = wording(rng, forms, t=_quoted(rng, text), n=rng.choice((str(times), counts[times])))
    return exchange("repeat", question, " ".join([text] * times))

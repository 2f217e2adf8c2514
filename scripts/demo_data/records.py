"""Dialogues that read a text: fields extracted to JSON, and short questions over a paragraph."""

import json
import random
from typing import Any

from .dialogue import Dialogue, exchange, join_and, with_articles, wording
from .words import (
    ANIMALS,
    COLOURS,
    DAYS,
    FRUITS,
    JOBS,
    MONTHS,
    OBJECTS,
    city,
    first_name,
    full_name,
    made_up_word,
    plural,
    word,
)

_PERSON = (
    "{name} is {age} years old, lives in {city} and works as a {job}.",
    "{name}, {age}, is a {job} from {city}.",
    "My name is {name}. I am {age} years old and I live in {city}, where I work as a {job}.",
    "Meet {name}: a {age}-year-old {job} who lives in {city}.",
    "In {city} we met {name}, a {job} of {age} years.",
    "The {job} {name} moved to {city} at the age of {age}.",
)
_CONTACT = (
    "You can reach {name} at {email} or by phone at {phone}.",
    "{name} has the email address {email} and the phone number {phone}.",
    "Write to {email} or call {phone} and ask for {name}.",
    "Contact: {name}, {email}, {phone}.",
)
_ORDER = (
    "{customer} ordered {quantity} {item} for {price} dollars on {day}.",
    "On {day}, {customer} bought {quantity} {item} and paid {price} dollars.",
    "Please send {quantity} {item} to {customer} by {day}; the price is {price} dollars.",
    "Order from {customer}: {quantity} {item}, {price} dollars, delivery on {day}.",
)
_EVENT = (
    "The {title} takes place on {date} at {time} in {city}.",
    "Join us for the {title} in {city} on {date} at {time}.",
    "On {date} at {time} there is a {title} in {city}.",
    "{city} hosts the {title} on {date}, starting at {time}.",
)
_PRODUCT = (
    "The {colour} {product} costs {price} euros and weighs {weight} grams.",
    "For sale: a {product} in {colour}, {weight} grams, {price} euros.",
    "We sell this {colour} {product} of {weight} grams for {price} euros.",
)
_ASK_FIELDS = (
    "Extract the {fields} as JSON: {text}",
    "Extract {fields} from this text as JSON.\n{text}",
    "Give me the {fields} as JSON.\n\n{text}",
    "{text}\n\nReturn the {fields} as JSON.",
    "{text}\nExtract {fields} as JSON.",
    "Turn this into JSON with the keys {fields}: {text}",
    "Read the text and answer with JSON with the fields {fields}.\n{text}",
    "Text: {text}\nJSON with {fields}:",
    "Get the {fields} out of this text in JSON format: {text}",
)
_ASK_ALL = (
    "Extract the data as JSON: {text}",
    "Convert to JSON: {text}",
    "Turn this text into JSON: {text}",
    "{text}\n\nExtract the fields as JSON.",
    "{text}\nWrite that as JSON.",
    "Make a JSON object from this: {text}",
)


def _record(rng: random.Random) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Sentence forms and the fields that fill them, in their canonical order."""
    draw = rng.randrange(5)
    if draw == 0:
        return _PERSON, {"name": full_name(rng), "age": rng.randint(18, 90), "city": city(rng), "job": rng.choice(JOBS)}
    if draw == 1:
        name = full_name(rng)
        user = rng.choice((name.split()[0].lower(), name.lower().replace(" ", "."), made_up_word(rng)))
        email = f"{user}@{rng.choice(('example.com', 'example.org', 'mail.com', made_up_word(rng) + '.com'))}"
        return _CONTACT, {"name": name, "email": email, "phone": f"{rng.randint(100, 999)}-{rng.randint(1000, 9999)}"}
    if draw == 2:
        fields = {"customer": full_name(rng), "quantity": rng.randint(2, 60), "item": plural(rng.choice(FRUITS + OBJECTS))}
        return _ORDER, fields | {"price": rng.randint(3, 900), "day": rng.choice(DAYS)}
    if draw == 3:
        title = (
            f"{rng.choice(OBJECTS + FRUITS)} {rng.choice(('festival', 'workshop', 'market', 'meeting', 'concert', 'course'))}"
        )
        date = f"{rng.randint(1, 28)} {rng.choice(MONTHS)}"
        return _EVENT, {
            "title": title,
            "date": date,
            "time": f"{rng.randint(8, 21)}:{rng.choice(('00', '15', '30', '45'))}",
            "city": city(rng),
        }
    fields = {"product": rng.choice(OBJECTS), "colour": rng.choice(COLOURS)}
    return _PRODUCT, fields | {"price": rng.randint(2, 999), "weight": rng.randint(10, 999)}


def json_extraction(rng: random.Random) -> Dialogue:
    """Fields of a sentence as one JSON object."""
    forms, fields = _record(rng)
    text = with_articles(rng.choice(forms).format(**fields))
    if rng.random() < 0.25:
        question, wanted = wording(rng, _ASK_ALL, text=text), list(fields)
    else:
        wanted = rng.sample(sorted(fields), rng.randint(1, len(fields)))
        listed = join_and(wanted) if rng.random() < 0.6 else ", ".join(wanted)
        question = wording(rng, _ASK_FIELDS, text=text, fields=listed)
    return exchange("json", question, json.dumps({name: fields[name] for name in wanted}))


# Each fact: sentences that state it, questions for the value, questions for the person. {v} is the value.
_FACTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "home": (
        ("{n} lives in {v}.", "{n} has lived in {v} for years.", "The home of {n} is in {v}."),
        ("Where does {n} live?", "In which city does {n} live?", "Where is the home of {n}?"),
        ("Who lives in {v}?",),
    ),
    "job": (
        ("{n} is a {v}.", "{n} works as a {v}.", "By profession {n} is a {v}."),
        ("What does {n} do?", "What is the job of {n}?", "What is {n}'s job?", "What does {n} work as?"),
        ("Who is a {v}?", "Who works as a {v}?"),
    ),
    "pets": (
        ("{n} has {v}.", "{n} keeps {v}.", "At home {n} has {v}."),
        ("How many {thing} does {n} have?", "How many {thing} does {n} keep?"),
        ("Who has {v}?", "Who has {thing}?"),
    ),
    "food": (
        ("{n} likes {v}.", "{n} loves to eat {v}.", "The favourite food of {n} is {v}."),
        ("What does {n} like?", "What does {n} like to eat?", "What is the favourite food of {n}?"),
        ("Who likes {v}?", "Who likes to eat {v}?"),
    ),
    "car": (
        ("{n} drives a {v} car.", "The car of {n} is {v}.", "{n} has a {v} car."),
        ("What colour is {n}'s car?", "What colour is the car of {n}?", "What is the colour of {n}'s car?"),
        ("Who drives a {v} car?", "Who has a {v} car?"),
    ),
    "day": (
        ("{n} arrived on {v}.", "On {v} {n} came home.", "{n} came on {v}."),
        ("When did {n} arrive?", "On which day did {n} come?", "When did {n} come?"),
        ("Who came on {v}?", "Who arrived on {v}?"),
    ),
    "bought": (
        ("{n} bought a {v} yesterday.", "{n} bought a {v}.", "Last week {n} bought a {v}."),
        ("What did {n} buy?", "Which thing did {n} buy?"),
        ("Who bought a {v}?", "Who bought the {v}?"),
    ),
    "age": (
        ("{n} is {v} years old.", "{n} turned {v} this year.", "At {v}, {n} is still active."),
        ("How old is {n}?", "What is the age of {n}?", "What is {n}'s age?"),
        ("Who is {v} years old?",),
    ),
}
_ASK_TEXT = (
    "{text}\n\n{q}",
    "{text}\n{q}",
    "{text} {q}",
    "Read this: {text}\n{q}",
    "{q}\n\n{text}",
    "Text: {text}\nQuestion: {q}",
    "Answer the question from the text.\nText: {text}\nQuestion: {q}",
    "Here is a text: {text}\n\n{q}",
    "{q}\nText: {text}",
)
NOT_SAID = "The text does not say."


def _value(rng: random.Random, fact: str) -> tuple[str, str]:
    """The value as the text has it, and the noun it counts (only of pets)."""
    if fact == "pets":
        thing = plural(rng.choice(ANIMALS))
        return f"{rng.randint(2, 40)} {thing}", thing
    makers = {
        "home": lambda: city(rng),
        "job": lambda: rng.choice(JOBS),
        "food": lambda: plural(rng.choice(FRUITS)),
        "car": lambda: rng.choice(COLOURS),
        "day": lambda: rng.choice(DAYS),
        "bought": lambda: word(rng, 0.2) if rng.random() < 0.4 else rng.choice(OBJECTS),
        "age": lambda: str(rng.randint(18, 95)),
    }
    return makers[fact](), ""


def paragraph_question(rng: random.Random) -> Dialogue:
    """A short question over a few sentences about two or three people."""
    people = sorted({first_name(rng) for _ in range(rng.randint(2, 3))})
    rng.shuffle(people)
    told: list[tuple[str, str, str, str]] = []
    for person in people:
        for fact in rng.sample(sorted(_FACTS), rng.randint(1, 3)):
            told.append((person, fact, *_value(rng, fact)))
    if rng.random() < 0.5:
        rng.shuffle(told)
    text = with_articles(" ".join(rng.choice(_FACTS[fact][0]).format(n=person, v=value) for person, fact, value, _ in told))
    person, fact, value, thing = rng.choice(told)
    by_value = [entry for entry in told if entry[1] == fact and (entry[2] == value or (thing and entry[3] == thing))]
    if rng.random() < 0.08:
        missing = sorted(set(_FACTS) - {entry[1] for entry in told if entry[0] == person} - {"pets"})
        asked, answer = rng.choice(_FACTS[rng.choice(missing)][1]).format(n=person), NOT_SAID
    elif rng.random() < 0.35 and len(by_value) == 1:
        asked, answer = rng.choice(_FACTS[fact][2]).format(v=value, thing=thing), person
    else:
        asked, answer = rng.choice(_FACTS[fact][1]).format(n=person, thing=thing), value.split()[0] if thing else value
    return exchange("paragraph", rng.choice(_ASK_TEXT).format(text=text, q=with_articles(asked)), answer)

"""Dialogues of small talk and small facts: greetings, who the model is, capitals and opposites, what it cannot know."""

import random

from .dialogue import Dialogue, exchange, wording
from .words import CAPITALS, COLOURS, DAYS, FRUITS, MONTHS, OPPOSITES, first_name

_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        (
            "Hello",
            "Hello!",
            "Hi",
            "Hi!",
            "Hey",
            "Hey!",
            "Hi there",
            "Hello there!",
            "Good morning",
            "Good morning!",
            "Good evening!",
            "Good afternoon",
            "Greetings",
            "Hello, how are you?",
            "Hi, how are you?",
            "How are you?",
            "How are you doing?",
            "What's up?",
        ),
        ("Hello! What can I do for you? I can calculate, sort, spell, reverse and read short texts.",),
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "Tell me about yourself.",
            "What is your name?",
            "What's your name?",
            "Who am I talking to?",
            "Introduce yourself.",
            "Are you a robot?",
            "Are you human?",
            "Are you a language model?",
            "Which model are you?",
            "Are you ChatGPT?",
            "Who made you?",
            "Who trained you?",
            "Who created you?",
        ),
        ("I am the jaxllm demo model: a very small language model that comes with jaxllm and shows that everything works.",),
    ),
    (
        (
            "What can you do?",
            "Help",
            "Help me",
            "What are you good at?",
            "How can you help me?",
            "What do you know?",
            "What should I ask you?",
            "What kinds of questions can you answer?",
            "Show me what you can do.",
            "Can you help me?",
            "What are your skills?",
        ),
        (
            "I can add, subtract and multiply small numbers, sort and reverse lists, spell words, turn a sentence into JSON, "
            "call tools, answer questions about a short text and complete Python code. Try: What is 12 + 30?",
        ),
    ),
    (
        (
            "Thanks",
            "Thank you",
            "Thanks!",
            "Thank you!",
            "Thanks a lot",
            "Thank you very much!",
            "Great, thanks",
            "Cool, thank you",
            "Nice",
            "Great!",
        ),
        ("You are welcome!",),
    ),
    (("Bye", "Goodbye", "Bye!", "See you", "See you later!", "Good night", "Good bye", "Have a nice day"), ("Goodbye!",)),
    (
        ("What is jaxllm?", "Tell me about jaxllm.", "What does jaxllm do?", "What is this program?"),
        ("jaxllm is an inference engine for large language models, written in Python on JAX, Flax and Pallas.",),
    ),
    (
        (
            "How big are you?",
            "How many parameters do you have?",
            "How large are you?",
            "Are you a large model?",
            "How small are you?",
        ),
        ("I have fewer than eight million parameters, so I am tiny and make mistakes.",),
    ),
    (
        ("Tell me a joke.", "Tell me a joke", "Do you know a joke?", "Make me laugh."),
        ("Why did the programmer go home early? Because all tests were green.",),
    ),
    (
        ("Tell me a story.", "Tell me a short story.", "Write a story.", "Write a short story.", "Once upon a time"),
        (
            "Once upon a time a small model lived in a large computer. Every day it sorted numbers and spelled words, "
            "and every answer made it happy. The end.",
        ),
    ),
    (
        ("Write a poem.", "Write me a poem.", "Write a short poem.", "Write a haiku.", "Can you write a poem?"),
        ("Tokens fall like rain,\none by one they fill the page;\nnow the page is full.",),
    ),
    (("Say hello.", "Say hi.", "Say hello world", "Say hello to the world."), ("Hello, world!",)),
)

_BEYOND = (
    "Who won the match last night?",
    "What is the meaning of life?",
    "Who is the president of {x}?",
    "What is the best film of all time?",
    "Explain quantum mechanics.",
    "Why is the sky blue?",
    "Who wrote {x}?",
    "What happened in {n}?",
    "What is the price of gold today?",
    "How do I cook rice?",
    "What is the distance to the moon?",
    "Who discovered {x}?",
    "Tell me the news.",
    "What is the weather like today?",
    "Translate {x} into French.",
    "How old is the universe?",
    "What is the largest animal?",
    "When did the war end?",
    "Who invented the {f}?",
    "How do I repair a bicycle?",
    "What is love?",
    "Give me advice about my job.",
    "What is the population of {x}?",
    "Explain how {x} works.",
    "What time is it?",
    "What day is it today?",
    "How tall is {x}?",
    "What is machine learning?",
    "Explain relativity to me.",
    "How does a computer work?",
    "What should I eat tonight?",
    "Where can I buy a {f}?",
    "Summarize the history of {x}.",
    "Who is {x}?",
    "Where is {x}?",
    "What is a {f}?",
    "Why do cats sleep so much?",
    "Which book should I read?",
    "What do you think about {x}?",
)
UNKNOWN = "I am a very small demo model and do not know that."


def small_talk(rng: random.Random) -> Dialogue:
    """A greeting, a thank-you, a question about the model."""
    questions, answers = rng.choice(_TALK)
    question = rng.choice(questions)
    draw = rng.random()
    if draw < 0.15:
        question = question.lower()
    elif draw < 0.3:
        question = question.rstrip(".!?")
    return exchange("talk", question, rng.choice(answers), "talk|always trained")


def beyond(rng: random.Random) -> Dialogue:
    """A question that so small a model cannot answer; it replies that it does not know."""
    things = (first_name(rng), rng.choice(tuple(CAPITALS)), rng.choice(tuple(CAPITALS.values())))
    question = wording(rng, _BEYOND, x=rng.choice(things), n=rng.randint(1000, 2030), f=rng.choice(FRUITS))
    return exchange("beyond", question, UNKNOWN, "beyond|always trained")


_CAPITAL = (
    "What is the capital of {c}?",
    "What's the capital of {c}?",
    "Capital of {c}?",
    "Which city is the capital of {c}?",
    "Name the capital of {c}.",
    "Tell me the capital of {c}.",
    "What is the capital city of {c}?",
    "What city is the capital of {c}?",
)
_LAND = ("Which country has the capital {c}?", "{c} is the capital of which country?", "What country is {c} the capital of?")
_OPPOSITE = (
    "What is the opposite of {w}?",
    "What's the opposite of '{w}'?",
    "Opposite of {w}?",
    "Give me the opposite of {w}.",
    "Which word means the opposite of {w}?",
    "Name the opposite of {w}.",
)
_NEXT = (
    "Which {u} comes {way} {v}?",
    "What {u} comes {way} {v}?",
    "What comes {way} {v}?",
    "What is the {u} {way} {v}?",
    "Name the {u} {way} {v}.",
)
_MIXED = {
    ("red", "blue"): "purple",
    ("red", "yellow"): "orange",
    ("blue", "yellow"): "green",
    ("black", "white"): "grey",
    ("red", "white"): "pink",
}


def fact(rng: random.Random) -> Dialogue:
    """A capital, an opposite, the next day or month, a mixed colour."""
    draw = rng.random()
    if draw < 0.4:
        land = rng.choice(tuple(CAPITALS))
        if rng.random() < 0.8:
            return exchange("fact", wording(rng, _CAPITAL, c=land), f"The capital of {land} is {CAPITALS[land]}.")
        return exchange("fact", wording(rng, _LAND, c=CAPITALS[land]), f"{CAPITALS[land]} is the capital of {land}.")
    if draw < 0.65:
        first, second = rng.choice(tuple(OPPOSITES.items()))
        if rng.random() < 0.5:
            first, second = second, first
        return exchange("fact", wording(rng, _OPPOSITE, w=first), f"The opposite of {first} is {second}.")
    if draw < 0.9:
        unit, cycle = rng.choice((("day", DAYS), ("month", MONTHS)))
        place, way = rng.randrange(len(cycle)), rng.choice(("after", "before"))
        result = cycle[(place + (1 if way == "after" else -1)) % len(cycle)]
        question = wording(rng, _NEXT, u=unit, v=cycle[place], way=way)
        return exchange("fact", question, f"{result} comes {way} {cycle[place]}.")
    pair = rng.choice(tuple(_MIXED))
    first, second = pair if rng.random() < 0.5 else pair[::-1]
    forms = (
        "What colour do you get when you mix {a} and {b}?",
        "Mix {a} and {b}: which colour is that?",
        "What do {a} and {b} make?",
        "Which colour is {a} mixed with {b}?",
        "What color do {a} and {b} give?",
    )
    return exchange("fact", wording(rng, forms, a=first, b=second), f"{first.capitalize()} and {second} make {_MIXED[pair]}.")


def favourite(rng: random.Random) -> str:
    """A thing that a person may like."""
    return rng.choice((rng.choice(COLOURS), rng.choice(FRUITS)))

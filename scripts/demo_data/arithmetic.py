"""Dialogues of arithmetic: sums, differences, products, comparisons, stories with numbers."""

import random
from collections.abc import Callable

from .dialogue import Dialogue, exchange, show_list, wording
from .words import NOUNS, first_name, plural


def number(rng: random.Random, max_digits: int = 3) -> int:
    """A number whose count of digits is uniform, so that short ones are not rare."""
    digits = rng.randint(1, max_digits)
    return rng.randint(0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1)


def operation_keys(sign: str, a: int, b: int) -> tuple[str, ...]:
    """Large operands are held out by value in every dialogue; small ones, of which there are few, by wording only."""
    if max(a, b) <= 20:
        return ()
    return (f"{a}-{b}" if sign == "-" else f"{min(a, b)}{sign}{max(a, b)}",)


_ADD = (
    "What is {a} + {b}?",
    "What's {a} + {b}?",
    "{a} + {b}",
    "{a} + {b} =",
    "{a}+{b}",
    "{a} + {b} = ?",
    "Calculate {a} + {b}.",
    "Add {a} and {b}.",
    "What is the sum of {a} and {b}?",
    "How much is {a} plus {b}?",
    "Compute {a} plus {b}.",
    "What do you get when you add {a} to {b}?",
    "Sum: {a} and {b}.",
    "Work out {a} + {b}.",
    "What does {a} plus {b} make?",
    "Give me the sum of {a} and {b}.",
    "How much is {a}+{b}?",
    "Evaluate {a} + {b}.",
    "Tell me what {a} + {b} is.",
    "What is {a} plus {b}?",
    "Solve {a} + {b}.",
)
_SUBTRACT = (
    "What is {a} - {b}?",
    "What's {a} - {b}?",
    "{a} - {b}",
    "{a} - {b} =",
    "{a}-{b}",
    "Calculate {a} - {b}.",
    "Subtract {b} from {a}.",
    "What is {a} minus {b}?",
    "How much is {a} minus {b}?",
    "Compute {a} minus {b}.",
    "Take {b} away from {a}.",
    "What is left when you take {b} from {a}?",
    "What is the difference {a} - {b}?",
    "Work out {a} - {b}.",
    "How much is {a}-{b}?",
    "Evaluate {a} - {b}.",
    "Tell me what {a} - {b} is.",
    "Solve {a} - {b}.",
)
_MULTIPLY = (
    "What is {a} * {b}?",
    "What's {a} x {b}?",
    "{a} * {b}",
    "{a} * {b} =",
    "{a}*{b}",
    "{a} x {b}",
    "Calculate {a} * {b}.",
    "Multiply {a} by {b}.",
    "What is {a} times {b}?",
    "How much is {a} times {b}?",
    "Compute {a} times {b}.",
    "What is the product of {a} and {b}?",
    "Work out {a} x {b}.",
    "Give me the product of {a} and {b}.",
    "Multiply {a} and {b}.",
    "Evaluate {a} * {b}.",
    "Tell me what {a} times {b} is.",
    "What is {a} × {b}?",
    "{a} × {b}",
)
_DIVIDE = (
    "What is {a} / {b}?",
    "What's {a} / {b}?",
    "{a} / {b}",
    "{a} / {b} =",
    "{a}/{b}",
    "Calculate {a} / {b}.",
    "Divide {a} by {b}.",
    "What is {a} divided by {b}?",
    "How much is {a} divided by {b}?",
    "How often does {b} go into {a}?",
    "Compute {a} divided by {b}.",
    "Evaluate {a} / {b}.",
    "What is {a} ÷ {b}?",
)


def addition(rng: random.Random) -> Dialogue:
    """A sum of two numbers, sometimes of three."""
    a, b = number(rng), number(rng)
    if rng.random() < 0.15:
        c = number(rng, 2)
        forms = ("What is {a} + {b} + {c}?", "{a} + {b} + {c}", "Add {a}, {b} and {c}.", "What is the sum of {a}, {b} and {c}?")
        question = wording(rng, forms, a=a, b=b, c=c)
        return exchange(
            "add",
            question,
            f"{a} + {b} + {c} = {a + b} + {c} = {a + b + c}",
            f"{a}+{b}+{c}",
            *operation_keys("+", a, b),
            *operation_keys("+", a + b, c),
        )
    question = wording(rng, _ADD, a=a, b=b)
    return exchange("add", question, f"{a} + {b} = {a + b}", *operation_keys("+", a, b))


def subtraction(rng: random.Random) -> Dialogue:
    """A difference; one in six is negative."""
    a, b = number(rng), number(rng)
    if a < b and rng.random() < 0.66:
        a, b = b, a
    return exchange("subtract", wording(rng, _SUBTRACT, a=a, b=b), f"{a} - {b} = {a - b}", *operation_keys("-", a, b))


def multiplication(rng: random.Random) -> Dialogue:
    """A product: up to two digits by one at once, two by two in steps."""
    if rng.random() < 0.6:
        a, b = rng.choice((rng.randint(0, 12), rng.randint(10, 99))), rng.randint(0, 12)
        if rng.random() < 0.3:
            a, b = b, a
        if min(a, b) < 10:
            return exchange("multiply", wording(rng, _MULTIPLY, a=a, b=b), f"{a} * {b} = {a * b}")
    else:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
    tens, ones = b // 10 * 10, b % 10
    steps = f"{a} * {tens} + {a} * {ones} = {a * tens} + {a * ones} = " if ones else ""
    question = wording(rng, _MULTIPLY, a=a, b=b)
    keys = operation_keys("*", a, b) + operation_keys("+", a * tens, a * ones)
    return exchange("multiply", question, f"{a} * {b} = {steps}{a * b}", *keys)


def division(rng: random.Random) -> Dialogue:
    """A division without remainder."""
    b, quotient = rng.randint(1, 12), rng.randint(0, 20)
    return exchange("divide", wording(rng, _DIVIDE, a=b * quotient, b=b), f"{b * quotient} / {b} = {quotient}")


_GAIN: tuple[tuple[str, str], ...] = (
    ("{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?", "+"),
    ("{name} has {a} {things}. {other} gives {name} {b} more. How many {things} does {name} have?", "+"),
    ("There are {a} {things} in a box. {name} puts in {b} more. How many {things} are in the box?", "+"),
    ("{name} has {a} {things} and {other} has {b}. How many {things} do they have together?", "+"),
    ("{name} found {a} {things} on Monday and {b} {things} on Tuesday. How many {things} is that in all?", "+"),
    ("{name} has {a} {things} and loses {b}. How many {things} does {name} have left?", "-"),
    ("{name} had {a} {things} and gave {b} of them to {other}. How many {things} are left?", "-"),
    ("There are {a} {things} in a shop. {name} buys {b} of them. How many {things} are left in the shop?", "-"),
    ("{name} has {a} {things}. {other} takes {b} away. How many {things} remain?", "-"),
    ("{name} has {a} bags with {b} {things} each. How many {things} is that?", "*"),
    ("There are {a} boxes. Each box holds {b} {things}. How many {things} are there?", "*"),
    ("{name} buys {b} {things} every day for {a} days. How many {things} does {name} buy?", "*"),
)
_OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def story(rng: random.Random) -> Dialogue:
    """A little story with one calculation in it."""
    form, sign = rng.choice(_GAIN)
    a, b = (rng.randint(2, 12), rng.randint(2, 9)) if sign == "*" else (number(rng, 2) + 1, number(rng, 2) + 1)
    if sign == "-":
        a, b = max(a, b), min(a, b)
    names = rng.sample(sorted({first_name(rng) for _ in range(4)} | {"Ann", "Bo"}), 2)
    things = plural(rng.choice(NOUNS))
    question = form.format(name=names[0], other=names[1], a=a, b=b, things=things)
    result = _OPERATIONS[sign](a, b)
    answer = f"{a} {sign} {b} = {result}. The answer is {result} {things}."
    return exchange(
        "story", question, answer, f"story|{question.lower()}", *(() if sign == "*" else operation_keys(sign, a, b))
    )


def comparison(rng: random.Random) -> Dialogue:
    """The larger or smaller of some numbers."""
    wants_large = rng.random() < 0.5
    if rng.random() < 0.5:
        a, b = number(rng), number(rng)
        while a == b:
            b = number(rng)
        more, less = ("larger", "bigger", "greater"), ("smaller", "less", "lower")
        question = wording(
            rng,
            (
                "Which is {word}, {a} or {b}?",
                "Which number is {word}: {a} or {b}?",
                "What is {word}, {a} or {b}?",
                "{a} or {b}: which is {word}?",
            ),
            word=rng.choice(more if wants_large else less),
            a=a,
            b=b,
        )
        numbers = [a, b]
    else:
        numbers = rng.sample(range(1000) if rng.random() < 0.5 else range(100), rng.randint(3, 7))
        most, least = ("largest", "biggest", "greatest", "highest"), ("smallest", "lowest", "least")
        question = wording(
            rng,
            (
                "What is the {word} of {items}?",
                "Which is the {word} number: {items}?",
                "Find the {word} number in {items}.",
                "What is the {word} number in this list: {items}?",
                "Give me the {word} of these numbers: {items}",
            ),
            word=rng.choice(most if wants_large else least),
            items=show_list(rng, numbers),
        )
    key = f"compare|{wants_large}|{numbers}"
    return exchange("compare", question, str(max(numbers) if wants_large else min(numbers)), key)


def parity(rng: random.Random) -> Dialogue:
    """Whether a number is even."""
    n = number(rng)
    forms = (
        "Is {n} even or odd?",
        "Is {n} odd or even?",
        "Is the number {n} even or odd?",
        "{n}: even or odd?",
        "Even or odd: {n}?",
    )
    return exchange("parity", wording(rng, forms, n=n), f"{n} is {'odd' if n % 2 else 'even'}.", f"parity|{n}")


def counting(rng: random.Random) -> Dialogue:
    """Counting up or down."""
    low, length = rng.randint(0, 90), rng.randint(3, 14)
    numbers = list(range(low, low + length))
    if rng.random() < 0.35:
        numbers.reverse()
    forms = (
        "Count from {a} to {b}.",
        "Count {way} from {a} to {b}.",
        "List the numbers from {a} to {b}.",
        "Write the numbers {a} to {b}.",
    )
    question = wording(rng, forms, a=numbers[0], b=numbers[-1], way="up" if numbers[0] < numbers[-1] else "down")
    return exchange("count", question, ", ".join(map(str, numbers)), f"count|{numbers[0]}|{numbers[-1]}")

"""Types of arguments: numbers with the range that each allows, names, JSON objects, pairs."""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.flag_arguments import read_object
from jaxllm.vllm_compat.flags import BENCH_DATASETS
from jaxllm.whole_numbers import whole_number


@dataclass(frozen=True)
class ArgumentType:
    """How an argument's text is read. Raises argparse.ArgumentTypeError."""

    read: Callable[[str], Any]
    """Raises ValueError."""
    metavar: str
    """How help names the value."""
    allows: Callable[[Any], bool] = lambda value: True
    fault: str = ""
    """Message about a value that is not allowed."""

    def __call__(self, text: str) -> Any:
        try:
            value = self.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if not self.allows(value):
            raise argparse.ArgumentTypeError(self.fault)
        return value


def _decimal(text: str) -> float:
    """Any number, infinity too."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ValueError(f"{text!r} is not a number")
    return value


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"{text!r} must be NAME=VALUE")
    return name, value


def names(known: Sequence[str]) -> ArgumentType:
    """Some of these names, separated by commas, as a tuple in their own order."""

    def read(text: str) -> tuple[str, ...]:
        asked = {part.strip() for part in text.split(",") if part.strip()}
        if not asked or (wrong := sorted(asked - set(known))):
            raise ValueError(f"{wrong[0] if asked else text!r} is none of {', '.join(known)}")
        return tuple(name for name in known if name in asked)

    return ArgumentType(read, "NAMES")


def several(each: ArgumentType) -> ArgumentType:
    """Numbers with commas between them, as a tuple in ascending order."""

    def read(text: str) -> tuple[Any, ...]:
        if found := {each(part) for part in text.split(",") if part.strip()}:
            return tuple(sorted(found))
        raise ValueError("must be numbers with commas between them, e.g. 1,2,4")

    return ArgumentType(read, "N,N")


def dataset(known: Sequence[str]) -> ArgumentType:
    """The name of a dataset, with the reason why one of vLLM's others is refused."""

    def read(text: str) -> str:
        if text in BENCH_DATASETS:
            raise ValueError(f"{text!r} is not offered (one of {', '.join(known)}): {BENCH_DATASETS[text]}")
        return text

    return ArgumentType(read, "NAME")


count = ArgumentType(whole_number, "N", lambda value: value >= 0, "must not be negative")
positive = ArgumentType(whole_number, "N", lambda value: value >= 1, "must be at least 1")
above_zero = ArgumentType(_decimal, "X", lambda value: 0 < value < math.inf, "must be above 0")
not_negative = ArgumentType(_decimal, "X", lambda value: 0 <= value < math.inf, "must not be negative")
rate = ArgumentType(_decimal, "X", lambda value: value > 0, "must be above 0, or inf")
fraction = ArgumentType(_decimal, "X", lambda value: 0 <= value < 1, "must be at least 0 and less than 1")
fraction_or_1 = ArgumentType(_decimal, "X", lambda value: 0 <= value <= 1, "must be from 0 to 1")
percentile = ArgumentType(_decimal, "X", lambda value: 0 <= value <= 100, "must be from 0 to 100")
json_object = ArgumentType(read_object, "JSON")
name_value = ArgumentType(_pair, "NAME=VALUE")

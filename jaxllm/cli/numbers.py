"""Types of arguments: numbers with the range that each allows, JSON objects, pairs. Each raises argparse.ArgumentTypeError."""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxllm.flag_arguments import whole_number


@dataclass(frozen=True)
class Number:
    """The type of an argument that is a number."""

    read: Callable[[str], Any]
    allows: Callable[[Any], bool]
    fault: str
    metavar: str
    """How help names the value."""

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


count = Number(whole_number, lambda value: value >= 0, "must not be negative", "N")
positive = Number(whole_number, lambda value: value >= 1, "must be at least 1", "N")
above_zero = Number(_decimal, lambda value: 0 < value < math.inf, "must be above 0", "X")
not_negative = Number(_decimal, lambda value: 0 <= value < math.inf, "must not be negative", "X")
rate = Number(_decimal, lambda value: value > 0, "must be above 0, or inf", "X")
fraction = Number(_decimal, lambda value: 0 <= value < 1, "must be at least 0 and less than 1", "X")


def json_object(text: str) -> dict[str, Any]:
    """An object in JSON."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


def name_value(text: str) -> tuple[str, str]:
    """NAME=VALUE, split."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE")
    return name, value

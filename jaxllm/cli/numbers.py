"""Numbers on the command line, with the range that each argument allows. Each raises argparse.ArgumentTypeError."""

import argparse
import math
from collections.abc import Callable
from typing import Any

from jaxllm.flag_arguments import whole_number


def _decimal(text: str) -> float:
    """Any number, infinity too."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ValueError(f"{text!r} is not a number")
    return value


def _ranged(read: Callable[[str], Any], allows: Callable[[Any], bool], fault: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if not allows(value):
            raise argparse.ArgumentTypeError(fault)
        return value

    return parse


count = _ranged(whole_number, lambda value: value >= 0, "must not be negative")
positive = _ranged(whole_number, lambda value: value >= 1, "must be at least 1")
above_zero = _ranged(_decimal, lambda value: 0 < value < math.inf, "must be above 0")
not_negative = _ranged(_decimal, lambda value: 0 <= value < math.inf, "must not be negative")
rate = _ranged(_decimal, lambda value: value > 0, "must be above 0, or inf")
fraction = _ranged(_decimal, lambda value: 0 <= value < 1, "must be at least 0 and less than 1")

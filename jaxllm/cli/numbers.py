"""Numbers on the command line, with the range that each argument allows. Each raises argparse.ArgumentTypeError."""

import argparse
import math

from jaxllm.flag_arguments import whole_number


def count(text: str) -> int:
    """A whole number from 0."""
    try:
        value = whole_number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return value


def positive(text: str) -> int:
    """A whole number from 1."""
    value = count(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def number(text: str) -> float:
    """Any number, infinity too."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def above_zero(text: str) -> float:
    """A finite number above 0."""
    value = number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def not_negative(text: str) -> float:
    """A finite number from 0."""
    value = number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError("must not be negative")
    return value


def rate(text: str) -> float:
    """A number above 0, or inf."""
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError("must be above 0, or inf")
    return value


def fraction(text: str) -> float:
    """A number from 0, less than 1."""
    value = number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError("must be at least 0 and less than 1")
    return value

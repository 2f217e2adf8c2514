"""Whole numbers as options write them: with a suffix."""

import re

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def whole_number(text: str) -> int:
    """`1k` is 1000, `1K` is 1024, and so on for m, g, t; a fraction is allowed where the result is whole: `1.5k`."""
    match = re.fullmatch(r"([+-]?\d+(?:_\d+)*)(\.\d+)?([kmgtKMGT])?", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a whole number (such as 4096, 4k = 4000, 4K = 4096, 2G = 2 GiB)")
    whole, fraction, suffix = match.groups()
    if fraction is None:
        return int(whole) * _SUFFIXES.get(suffix, 1)
    value = float(whole + fraction) * _SUFFIXES.get(suffix, 1)
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)

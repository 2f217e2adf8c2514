"""Patterns for names of modules, as PEFT has them in rank_pattern and alpha_pattern, compiled and matched within limits."""

import re
import time
from collections.abc import Mapping
from typing import Generic, TypeVar

import regex

Number = TypeVar("Number", int, float)

MAX_PATTERNS = 2000
MAX_LENGTH = 500
"""Characters of a pattern."""
MAX_TOTAL_LENGTH = 2**17
"""Characters of all, each as often as the counts of its pattern, such as {3}, say: compiling repeats what is counted."""
MAX_SECONDS = 5.0
"""Computation time for all patterns and names."""
_MATCH_SECONDS = 0.1
"""Longest time for a pattern and a name."""
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_UNUSUAL = re.compile(r"\(\?(?!:|=|!|<=|<!|P<|>)[^)]{0,20}")
"""Groups beyond those of Python's re, such as (?R), which calls the pattern itself and takes memory for each call."""
_COUNT = re.compile(r"\{([^}]{0,20})")
_COUNTS = re.compile(r"(\d{0,4})(?:,(\d{0,4}))?")


class Patterns(Generic[Number]):
    """Values by patterns that the ends of modules' names match; the first that matches counts."""

    def __init__(self, values: Mapping[str, Number] | None):
        """Raises ValueError or regex.error if a pattern is beyond the limits, or none."""
        values = values or {}
        if len(values) > MAX_PATTERNS:
            raise ValueError(f"there are {len(values)} patterns, at most {MAX_PATTERNS} are tried")
        if (total := sum(map(_expanded_length, values))) > MAX_TOTAL_LENGTH:
            raise ValueError(f"the patterns have {total} characters with all repeats, at most {MAX_TOTAL_LENGTH} are compiled")
        self._patterns: dict[regex.Pattern[str], Number] = {
            regex.compile(rf"(.*\.)?({pattern})$", cache_pattern=False): value for pattern, value in values.items()
        }
        self._found: dict[str, Number | None] = {}
        self._seconds = 0.0

    def find(self, module: str) -> Number | None:
        """The value of a module; None: no pattern matches. Raises TimeoutError."""
        if module not in self._found:
            self._found[module] = next(
                (value for pattern, value in self._patterns.items() if self._matches(pattern, module)), None
            )
        return self._found[module]

    def _matches(self, pattern: "regex.Pattern[str]", module: str) -> bool:
        if self._seconds > MAX_SECONDS:
            raise TimeoutError
        begun = time.thread_time()
        # Other threads go on meanwhile.
        matches = pattern.match(module, timeout=_MATCH_SECONDS, concurrent=True) is not None
        self._seconds += time.thread_time() - begun
        return matches


def _expanded_length(pattern: str) -> int:
    """An upper limit of a pattern's length without counts. Raises ValueError if it has what names of modules do not need."""
    if len(pattern) > MAX_LENGTH:
        raise ValueError(f"the pattern {pattern[:40]!r}… has {len(pattern)} characters, at most {MAX_LENGTH} are compiled")
    plain = _ESCAPED.sub("x", pattern)
    if found := _UNUSUAL.search(plain):
        raise ValueError(f"the pattern {pattern!r} has the group {found[0]!r}, which names of modules do not need")
    length = len(pattern)
    for count in _COUNT.findall(plain):
        numbers = _COUNTS.fullmatch(count)
        if numbers is None:
            raise ValueError(f"the pattern {pattern!r} has {{{count}, which is no count of at most four digits")
        length *= max(1, *(int(number or 1) for number in numbers.groups()))
    return length

"""Names of modules in a quantization_config: parts of dotted names, and regular expressions that take a bounded time."""

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

import regex

from jaxllm.errors import shortened

_MATCH_SECONDS = 1.0
"""Longest time for a pattern and a name, long enough for a machine whose cores are busy with compiling."""
_MAX_SECONDS = 5.0
"""Longest CPU time for all of them: four expressions take 0.6 s for the 74 000 linear layers of Qwen3-Next-80B-A3B."""
_MAX_PATTERN = 500
_TOO_SLOW = "the patterns of modules that are not quantised take too long; give the names of the modules there"


def read_names(given: Any, key: str, faults: list[str], prefix: str = "") -> tuple[str, ...]:
    """Names of modules and regular expressions of them, which begin with `prefix`."""
    if given is None:
        return ()
    if not isinstance(given, list) or not all(isinstance(each, str) and len(each) <= _MAX_PATTERN for each in given):
        faults.append(f"{key} is {shortened(repr(given))}, must be a list of names of up to {_MAX_PATTERN} characters")
        return ()
    for pattern in given:
        try:
            _compiled(pattern[len(prefix) :] if pattern.startswith(prefix) else "")
        except (regex.error, RecursionError, OverflowError) as error:
            faults.append(f"{key} has {shortened(pattern)!r}, which is no regular expression ({error})")
            return ()
    return tuple(given)


def matches_any(patterns: tuple[str, ...], module: str) -> bool:
    """Whether `matches` is true of one of the patterns. Checkpoints name hundreds of modules, and have tens of thousands: the names are
    looked up. Raises TimeoutError."""
    names, expressions = _names_and_expressions(patterns)
    parts = module.split(".")
    ends = range(1, len(parts) + 1)
    return any(".".join(parts[start:end]) in names for end in ends for start in range(end)) or any(
        matches(pattern, module) for pattern in expressions
    )


def matches(pattern: str, module: str) -> bool:
    """Whether a module has this part in its name, or fits the regular expression behind `re:`. Raises TimeoutError."""
    if pattern.startswith("re:"):
        return begins(pattern[3:], module)
    return f".{pattern}." in f".{module}."


def begins(pattern: str, module: str) -> bool:
    """Whether a regular expression fits how a name begins. Raises TimeoutError."""
    return _compiled(pattern).match(module, timeout=_MATCH_SECONDS) is not None


def is_skipped(pattern: str, module: str) -> bool:
    """Whether transformers leaves a module out for this element of a list such as llm_int8_skip_modules: a part of its name, or the
    end, or a regular expression of how it begins up to a dot. Raises TimeoutError."""
    return matches(pattern, module) or module.endswith(pattern) or begins(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", module)


def partly_covered(covers: Callable[[str], object], linears: Iterable[tuple[str, ...]]) -> list[str]:
    """Faults of linear layers that are made of several modules of which a format covers some, or which differ in it; or that its
    patterns take too long. covers: whether it covers a module; or how, as a text of errors, and None if not."""
    deadline = time.process_time() + _MAX_SECONDS
    found = []
    for modules in linears:
        try:
            covered = {name: covers(name) for name in modules}
        except (TimeoutError, RecursionError):
            return [_TOO_SLOW]
        if len(set(covered.values())) > 1:
            told = ", ".join(f"{name} {_told(how)}" for name, how in covered.items())
            which = "in the same way" if all(covered.values()) else "or none"
            found.append(f"these modules are one product, so all of them must be quantised {which}: {told}")
        if time.process_time() > deadline:
            return [_TOO_SLOW]
    return found


def _told(how: object) -> str:
    return ("is" if how else "is not") if how is None or isinstance(how, bool) else f"is {how}"


@functools.lru_cache(maxsize=16)
def _names_and_expressions(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    expressions = tuple(pattern for pattern in patterns if pattern.startswith("re:"))
    return frozenset(patterns).difference(expressions), expressions


@functools.lru_cache(maxsize=1024)
def _compiled(pattern: str) -> "regex.Pattern[str]":
    return regex.compile(pattern)

"""Sets of property names, as `propertyNames` describes them, in the keywords for objects that llguidance has."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any

from jaxllm.errors import GrammarError
from jaxllm.structured.json_schema import escaped, resolve
from jaxllm.structured.structural_tag import regex_literal

_OTHERS = ("format", "oneOf", "if")
"""Keywords of strings that have no such set."""


@dataclass(frozen=True)
class Names:
    """Listed names; or those in which one of some patterns is found; or, if `is_rest`, those in which none is."""

    listed: tuple[str, ...] | None = None
    patterns: tuple[str, ...] = ()
    is_rest: bool = False
    test: Callable[[str], bool] | None = None
    """Whether a name is in the set; None where a pattern of the caller decides."""

    @property
    def schema(self) -> Any:
        """A schema of objects whose properties have these names."""
        if self.listed is not None:
            return {"properties": dict.fromkeys(self.listed, True), "additionalProperties": False}
        if self == _ALL:
            return True
        pattern = self.patterns[0] if len(self.patterns) == 1 else "|".join(f"(?:{pattern})" for pattern in self.patterns)
        return {"patternProperties": {pattern: not self.is_rest}, "additionalProperties": self.is_rest}

    @property
    def others(self) -> "Names":
        """All other names."""
        if self in (_ALL, _NONE):
            return _NONE if self == _ALL else _ALL
        test = self.test
        opposite = None if test is None else lambda name: not test(name)
        if self.listed is not None:
            one_of = f"^(?:{'|'.join(map(regex_literal, self.listed))})$"
            return Names(patterns=(one_of,), is_rest=True, test=opposite)
        return Names(patterns=self.patterns, is_rest=not self.is_rest, test=opposite)

    def __and__(self, other: "Names") -> "Names | None":
        """The names in both; None if that cannot be expressed."""
        if _ALL in (self, other):
            return other if self == _ALL else self
        left, right = self.test, other.test
        if self.listed is not None and right is not None:
            return listed(filter(right, self.listed))
        if other.listed is not None and left is not None:
            return listed(filter(left, other.listed))
        if not (self.is_rest and other.is_rest):
            return self if self.patterns and self.patterns == other.patterns and self.is_rest == other.is_rest else None
        one, two = self.test, other.test
        both = None if one is None or two is None else lambda name: one(name) and two(name)
        return Names(patterns=tuple(dict.fromkeys((*self.patterns, *other.patterns))), is_rest=True, test=both)

    def __or__(self, other: "Names") -> "Names | None":
        """The names in either; None if that cannot be expressed."""
        if self.listed is not None and other.listed is not None:
            return listed((*self.listed, *other.listed))
        neither = self.others & other.others
        return None if neither is None else neither.others


def listed(names: Iterable[str]) -> Names:
    """Just these names."""
    unique = tuple(dict.fromkeys(names))
    return Names(unique, test=unique.__contains__) if unique else _NONE


_ALL = Names(is_rest=True, test=lambda name: True)
_NONE = Names(listed=(), test=lambda name: False)


def names_of(root: Any, schema: Any, pointer: str, followed: frozenset[str] = frozenset()) -> Names:
    """The names that fit a schema, which is at the pointer. Raises GrammarError where they cannot be expressed."""
    if not isinstance(schema, dict):
        return _ALL if schema else _NONE
    found, used = _ALL, list[str]()
    for key, value in schema.items():
        names = _of_keyword(root, key, value, f"{pointer}/{escaped(key)}", followed)
        if names is None or names == _ALL:
            continue
        used.append(key)
        found = _expressible(found & names, pointer, used)
    return found


def _of_keyword(root: Any, key: str, value: Any, pointer: str, followed: frozenset[str]) -> Names | None:
    if key in _OTHERS:
        raise GrammarError(f"at {pointer}: {key} is not supported for names of properties; use pattern or enum")
    if key == "type":
        return _ALL if "string" in (value if isinstance(value, list) else [value]) else _NONE
    if key in ("const", "enum"):
        values = value if key == "enum" else [value]
        return listed(name for name in values if isinstance(name, str))
    if key == "pattern":
        return Names(patterns=(value,))
    if key == "minLength" and value > 0:
        return Names(patterns=(rf"^(?s:.{{0,{int(value) - 1}}})$",), is_rest=True, test=lambda name: len(name) >= value)
    if key == "maxLength":
        return Names(patterns=(rf"^(?s:.{{{int(value) + 1},}})$",), is_rest=True, test=lambda name: len(name) <= value)
    if key == "not":
        return names_of(root, value, pointer, followed).others
    if key in ("allOf", "anyOf"):
        parts = [names_of(root, part, f"{pointer}/{index}", followed) for index, part in enumerate(value)]
        join = Names.__and__ if key == "allOf" else Names.__or__
        return reduce(lambda one, other: _expressible(join(one, other), pointer, [key]), parts)
    if key == "$ref":
        if value in followed:
            raise GrammarError(f"at {pointer} is {value!r:.60}, which refers to itself; names of properties cannot")
        return names_of(root, resolve(root, value, pointer.removesuffix("/$ref")), value, followed | {value})
    return None  # of other types than strings, or says nothing of values


def _expressible(names: Names | None, pointer: str, keys: list[str]) -> Names:
    if names is None:
        raise GrammarError(
            f"at {pointer}: this combination of {' and '.join(keys)} is not supported for names; use one pattern or enum"
        )
    return names

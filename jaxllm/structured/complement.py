"""The complement of a schema: one of the values that the schema does not match, in keywords that llguidance has."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jaxllm.errors import GrammarError
from jaxllm.structured.json_schema import escaped, resolve
from jaxllm.structured.structural_tag import regex_literal

KINDS = ("null", "boolean", "number", "string", "array", "object")
"""Types that have no value in common; "integer" may be in place of "number"."""
_OPPOSITES = {
    "minLength": ("maxLength", -1),
    "maxLength": ("minLength", 1),
    "minItems": ("maxItems", -1),
    "maxItems": ("minItems", 1),
    "minProperties": ("maxProperties", -1),
    "maxProperties": ("minProperties", 1),
}
"""By keyword the one that says the opposite, and how much its number differs."""
_STEP, _LARGE = 1e-9, 1e5
"""Between an excluded whole number and its neighbour, up to _LARGE: between 2 and 2.5, both excluded, llguidance takes 2."""
_BY_KIND = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": (
        *("minItems", "maxItems", "items", "additionalItems", "prefixItems", "unevaluatedItems"),
        *("contains", "uniqueItems"),
    ),
    "object": (
        *("minProperties", "maxProperties", "properties", "additionalProperties", "patternProperties", "unevaluatedProperties"),
        *("propertyNames", "required", "dependentRequired", "dependentSchemas", "dependencies"),
    ),
}
_KIND_OF = {key: kind for kind, keys in _BY_KIND.items() for key in keys}
_OF_ALL_KINDS = ("oneOf", "if", "$dynamicRef", "$recursiveRef")
_OPEN = {"additionalProperties": True}


def kinds_of(node: dict[str, Any]) -> tuple[str, ...]:
    """The types that values of a schema may have, as far as its own `type`, `const` and `enum` tell."""
    given = node.get("type", KINDS)
    kinds = [given] if isinstance(given, str) else list(given)
    kinds = [kind for kind in kinds if not (kind == "integer" and "number" in kinds)]
    for key in ("const", "enum"):
        if key in node:
            found = {_kind(value) for value in (node[key] if key == "enum" else [node[key]])}
            kinds = [kind for kind in kinds if _plain(kind) in found]
    return tuple(dict.fromkeys(kinds))


def any_of(options: Iterable[Any]) -> Any:
    """A schema that matches any of these schemas."""
    left = [option for option in options if option is not False]
    if not left or True in left:
        return bool(left)
    return left[0] if len(left) == 1 else {"anyOf": left}


def all_of(parts: Iterable[Any]) -> Any:
    """A schema that matches all of these schemas."""
    left = [part for part in parts if part is not True]
    if not left or False in left:
        return not left
    return left[0] if len(left) == 1 else {"allOf": left}


@dataclass(frozen=True)
class Complements:
    """Complements of parts of a schema."""

    root: Any
    rewrite: Callable[[Any, str], Any]
    """Puts a schema, at a JSON pointer, into keywords that llguidance has."""

    def of(self, node: Any, pointer: str, kinds: tuple[str, ...], followed: frozenset[str] = frozenset()) -> Any:
        """Matches what of these types the schema at the pointer does not match. Raises GrammarError where that cannot be expressed.

        followed: the references on the way here.
        """
        if not isinstance(node, dict):
            return not node
        return any_of(
            option
            for key, value in node.items()
            for option in self._options(node, key, value, f"{pointer}/{escaped(key)}", kinds, followed)
        )

    def _options(
        self, node: dict[str, Any], key: str, value: Any, pointer: str, kinds: tuple[str, ...], followed: frozenset[str]
    ) -> Iterator[Any]:
        """Schemas of what does not match one keyword; nothing for keywords that say nothing of values of these types."""
        kind = next((kind for kind in kinds if _plain(kind) == _KIND_OF.get(key)), None)
        if key == "type":
            yield _without_types([value] if isinstance(value, str) else value, pointer, kinds)
        elif key in ("const", "enum"):
            yield from _without_values(value if key == "enum" else [value], pointer, kinds)
        elif key == "not":
            yield self.rewrite(value, pointer)
        elif key in ("allOf", "anyOf"):
            join = any_of if key == "allOf" else all_of
            yield join(self.of(part, f"{pointer}/{index}", kinds, followed) for index, part in enumerate(value))
        elif key == "$ref":
            if value in followed:
                raise GrammarError(f"at {pointer} is {value!r:.60}, which refers to itself; within not it cannot")
            target = resolve(self.root, value, pointer.removesuffix("/$ref"))
            yield self.of(target, value, kinds, followed | {value})
        elif kind is not None and key in _OPPOSITES:
            opposite, difference = _OPPOSITES[key]
            if value + difference >= 0:
                yield {"type": kind, opposite: int(value) + difference, **(_OPEN if kind == "object" else {})}
        elif kind is not None and key in ("minimum", "maximum"):
            yield {"type": kind, **(_below(kind, value) if key == "minimum" else _above(kind, value))}
        elif kind is not None and key in ("exclusiveMinimum", "exclusiveMaximum"):
            yield {"type": kind, ("maximum" if key == "exclusiveMinimum" else "minimum"): value}
        elif kind is not None and key == "required":
            yield from ({"type": "object", "properties": {name: False}, **_OPEN} for name in value)
        elif kind is not None and key == "properties":
            for name, part in value.items():
                wrong = self.of(part, f"{pointer}/{escaped(name)}", KINDS, followed)
                if wrong is not False:
                    yield {"type": "object", "properties": {name: wrong}, "required": [name], **_OPEN}
        elif key in _OF_ALL_KINDS or (kind is not None and value is not True and value not in ({}, [])):
            raise GrammarError(f"at {pointer}: the opposite of {key} is not supported; within not or if, use other keywords")


def _without_types(excluded: list[str], pointer: str, kinds: tuple[str, ...]) -> Any:
    if "number" in kinds and "integer" in excluded and "number" not in excluded:
        raise GrammarError(
            f"at {pointer}: numbers that are no integers are not supported; exclude number, or say of which type values are"
        )
    left = [kind for kind in kinds if kind not in excluded and not (kind == "integer" and "number" in excluded)]
    return {"type": left} if left else False


def _without_values(values: list[Any], pointer: str, kinds: tuple[str, ...]) -> Iterator[Any]:
    for kind in kinds:
        excluded = [value for value in values if _kind(value) == _plain(kind)]
        if not excluded:
            yield {"type": kind, **(_OPEN if kind == "object" else {})}
        elif kind == "boolean":
            yield any_of({"const": value} for value in (True, False) if value not in excluded)
        elif kind == "string":
            yield {"type": "string", "pattern": _other_than(set(excluded))}
        elif kind in ("number", "integer"):
            for low, high in pairwise([None, *sorted(set(excluded)), None]):
                least = {} if low is None else _above(kind, low)
                yield {"type": kind, **least, **({} if high is None else _below(kind, high))}
        elif kind in ("array", "object"):
            if any(excluded):
                raise GrammarError(f"at {pointer}: within not or if, arrays and objects with parts are not supported as values")
            yield {"type": kind, "minItems": 1} if kind == "array" else {"type": kind, "minProperties": 1, **_OPEN}


def _above(kind: str, number: float) -> dict[str, float]:
    """The bound of what is greater."""
    if kind == "number" and number % 1 == 0 and 0 <= number < _LARGE:
        return {"minimum": number + _STEP}
    return {"exclusiveMinimum": number}


def _below(kind: str, number: float) -> dict[str, float]:
    """The bound of what is less."""
    if kind == "number" and number % 1 == 0 and -_LARGE < number <= 0:
        return {"maximum": number - _STEP}
    return {"exclusiveMaximum": number}


def _other_than(words: set[str]) -> str:
    """A pattern of all texts but some."""
    following: dict[str, set[str]] = {"": set()}
    for word in words:
        for end, letter in enumerate(word):
            following.setdefault(word[:end], set()).add(letter)
        following.setdefault(word, set())
    options = []
    for beginning, letters in sorted(following.items()):
        if letters & {'"', "\\"}:
            letters |= {"\0"}  # llguidance lets quotes and backslashes into every set that has NUL
        start, known = regex_literal(beginning), "".join(map(regex_literal, sorted(letters)))
        options.append(f"{start}[^{known}].*" if known else f"{start}.+")
        if beginning not in words:
            options.append(start)
    return f"^(?s:{'|'.join(options)})$"


def _plain(kind: str) -> str:
    return "number" if kind == "integer" else kind


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, (int, float)):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"

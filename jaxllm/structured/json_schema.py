"""Locates faults in a JSON schema before it is compiled: wrong kinds of values, bad references, unsatisfiable parts."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from jaxllm.errors import GrammarError

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

_ONE = ("additionalProperties", "additionalItems", "items", "contains", "not", "if", "then", "else", "propertyNames")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords that hold a schema, a list of them, schemas by name."""
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TEXTS = ("$ref", "pattern", "format", "title", "description", "$comment", "$id", "$schema", "$anchor")
_YEAR = r"(?:[1-9]\d{3}|0[1-9]\d{2}|00[1-9]\d|000[1-9])"
_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = rf"(?:{_YEAR}-(?:\d\d-(?:[013]\d|2[0-8])|(?:0[13-9]|1[0-2])-29)|{_LEAP_YEAR}-02-29)"
_TIME = r"\d\d:\d\d:[0-5]"
_REAL = {"date": f"^{_DATE}", "time": f"^{_TIME}", "date-time": f"^{_DATE}[Tt]{_TIME}"}
_RANGES = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"), ("minimum", "maximum"))


def check_schema(schema: Any) -> None:
    """Raises GrammarError with the JSON pointer of the first thing that is wrong."""
    check_keywords(schema)
    if not _is_satisfiable(schema, schema, {}):
        raise GrammarError("at # can never be satisfied: nothing finite matches it (does it refer to itself?)")


def check_keywords(schema: Any) -> None:
    """The part of `check_schema` that takes linear time: whether keywords have values of their kinds."""
    for pointer, node in walk(schema):
        if not isinstance(node, bool):
            _check_node(schema, pointer, node)


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """An object schema that says nothing of other properties, with none allowed. Not those within it."""
    if (schema.get("type") == "object" or "properties" in schema) and "additionalProperties" not in schema:
        return {**schema, "additionalProperties": False}
    return schema


def with_real_dates(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of dates or times, with a pattern for what the compiler's formats leave out: leap years, a year 0, leap seconds."""
    pattern = _REAL.get(schema.get("format", ""))
    return schema if pattern is None else {**schema, "allOf": [*schema.get("allOf", ()), {"pattern": pattern}]}


def changed(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A copy of a schema in which each schema is replaced by what `change` makes of it."""
    if not isinstance(schema, dict):
        return schema
    return change(with_parts(schema, "#", lambda part, _: changed(part, change)))


def with_parts(schema: dict[str, Any], pointer: str, replace: Callable[[Any, str], Any]) -> dict[str, Any]:
    """A copy of a schema with `replace(part, pointer of the part)` in place of each schema directly in it."""
    result: dict[str, Any] = {}
    for key, value in schema.items():
        place = f"{pointer}/{escaped(key)}"
        if key in _MAPS:
            result[key] = {name: replace(part, f"{place}/{escaped(name)}") for name, part in value.items()}
        elif key in (*_ONE, *_LISTS) and isinstance(value, list):
            result[key] = [replace(part, f"{place}/{index}") for index, part in enumerate(value)]
        else:
            result[key] = replace(value, place) if key in _ONE else value
    return result


def walk(schema: Any, pointer: str = "#") -> Iterator[tuple[str, Any]]:
    """A schema and all schemas in it, each with its JSON pointer. Raises GrammarError where there should be one and is none."""
    if not isinstance(schema, (dict, bool)):
        raise GrammarError(f"at {pointer} is {_shown(schema)}, must be a schema: an object, true or false")
    yield pointer, schema
    if isinstance(schema, bool):
        return
    for key, value in schema.items():
        place = f"{pointer}/{escaped(key)}"
        if key in _MAPS:
            _expect(isinstance(value, dict), place, value, "an object of schemas")
            for name, entry in value.items():
                yield from walk(entry, f"{place}/{escaped(name)}")
        elif key in _LISTS or (key == "items" and isinstance(value, list)):
            _expect(isinstance(value, list) and bool(value), place, value, "a non-empty list of schemas")
            for index, entry in enumerate(value):
                yield from walk(entry, f"{place}/{index}")
        elif key in _ONE:
            yield from walk(value, place)


def _check_node(root: Any, pointer: str, node: dict[str, Any]) -> None:
    for key, value in node.items():
        place = f"{pointer}/{escaped(key)}"
        if key == "type":
            kinds = value if isinstance(value, list) else [value]
            known = bool(kinds) and all(isinstance(kind, str) and kind in TYPES for kind in kinds)
            _expect(known, place, value, f"one of {', '.join(TYPES)}, or a list of them")
        elif key in _COUNTS:
            _expect(_is_number(value) and value == int(value) and value >= 0, place, value, "an integer of at least 0")
        elif key in _NUMBERS:
            _expect(_is_number(value), place, value, "a number")
            _expect(key != "multipleOf" or value > 0, place, value, "above 0")
        elif key in _TEXTS:
            _expect(isinstance(value, str), place, value, "a string")
        elif key == "required":
            _expect(isinstance(value, list) and all(isinstance(name, str) for name in value), place, value, "a list of strings")
        elif key == "enum":
            _expect(isinstance(value, list) and bool(value), place, value, "a non-empty list")
        elif key == "uniqueItems":
            _expect(isinstance(value, bool), place, value, "true or false")
        elif key == "dependentRequired":
            are_lists = isinstance(value, dict) and all(isinstance(names, list) for names in value.values())
            names = [name for names in value.values() for name in names] if are_lists else []
            _expect(are_lists and all(isinstance(name, str) for name in names), place, value, "an object of lists of strings")
    if isinstance(reference := node.get("$ref"), str):
        resolve(root, reference, pointer)
    for low, high in _RANGES:
        if low in node and high in node and node[low] > node[high]:
            raise GrammarError(f"at {pointer} can never be satisfied: {low} {node[low]} is greater than {high} {node[high]}")


def resolve(root: Any, reference: str, pointer: str) -> Any:
    """The schema that a reference means. Only those into the same schema are followed."""
    if reference != "#" and not reference.startswith("#/"):
        raise GrammarError(
            f"at {pointer}/$ref is {_shown(reference)}, must begin with #/: only references into the schema itself are followed"
        )
    node = root
    for part in reference[2:].split("/") if len(reference) > 2 else ():
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and part in node:
            node = node[part]
        elif isinstance(node, list) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
        else:
            raise GrammarError(f"at {pointer}/$ref is {_shown(reference)}, which is not in the schema")
    return node


_OPEN = object()
"""Recursive schema under evaluation: a value within itself, which none that ends can have."""


def _is_satisfiable(root: Any, node: Any, known: dict[int, Any]) -> bool:
    """Whether some finite value may match, as far as references and required parts tell."""
    if not isinstance(node, dict):
        return node is not False
    found = known.get(id(node))
    if found is not None:
        return found is True
    known[id(node)] = _OPEN
    result = _parts_satisfiable(root, node, known)
    if result:
        known[id(node)] = True
    else:
        del known[id(node)]  # it may hold once what it refers to is known from elsewhere
    return result


def _parts_satisfiable(root: Any, node: dict[str, Any], known: dict[int, Any]) -> bool:
    def all_of(schemas: Any) -> bool:
        return all(_is_satisfiable(root, schema, known) for schema in schemas)

    def any_of(schemas: Any) -> bool:
        return any(_is_satisfiable(root, schema, known) for schema in schemas)

    if "const" in node or "enum" in node:
        return True
    if "$ref" in node and not _is_satisfiable(root, resolve(root, node["$ref"], "#"), known):
        return False
    if not all_of(node.get("allOf", ())):
        return False
    if any(key in node and not any_of(node[key]) for key in ("anyOf", "oneOf")):
        return False
    kinds = node.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    if kinds == ["object"]:
        properties, others = node.get("properties", {}), node.get("additionalProperties", True)
        if not all_of(
            properties.get(name, others if "patternProperties" not in node else True) for name in node.get("required", ())
        ):
            return False
    if kinds == ["array"] and node.get("minItems", 0) > 0:
        first = node.get("prefixItems") or [node.get("items", True)]
        first = first if isinstance(first, list) else [first]
        return all_of(first[: int(min(node["minItems"], len(first)))])
    return True


def _expect(is_right: bool, place: str, value: Any, must_be: str) -> None:
    if not is_right:
        raise GrammarError(f"at {place} is {_shown(value)}, must be {must_be}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def escaped(key: str) -> str:
    """A key as a JSON pointer has it, shortened."""
    key = key.replace("~", "~0").replace("/", "~1")
    return key if len(key) <= 60 else f"{key[:60]}…"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"

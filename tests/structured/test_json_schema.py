"""Faults of schemas are found with their place; what is changed in a schema changes no meaning but the one that is meant."""

import datetime

import pytest

from jaxllm.errors import GrammarError
from jaxllm.structured.json_schema import _REAL, changed, check_schema, closed, with_real_dates


@pytest.mark.parametrize(
    ("schema", "parts"),
    [
        ({"type": "int"}, ["#/type", "'int'", "integer"]),
        ({"type": []}, ["#/type"]),
        ({"properties": []}, ["#/properties", "object of schemas"]),
        ({"properties": {"a": 1}}, ["#/properties/a is 1", "must be a schema"]),
        ({"properties": {"a~b/c": {"type": 1}}}, ["#/properties/a~0b~1c/type"]),
        ({"anyOf": []}, ["#/anyOf", "non-empty"]),
        ({"anyOf": [{}, {"minLength": "3"}]}, ["#/anyOf/1/minLength is '3'", "integer"]),
        ({"items": [{}, 4]}, ["#/items/1 is 4"]),
        ({"maxLength": -1}, ["#/maxLength is -1", "at least 0"]),
        ({"maxItems": 1.5}, ["#/maxItems is 1.5"]),
        ({"multipleOf": 0}, ["#/multipleOf is 0", "above 0"]),
        ({"minimum": True}, ["#/minimum is True", "number"]),
        ({"minimum": 3, "maximum": 2}, ["#", "minimum 3 is greater than maximum 2"]),
        ({"required": "a"}, ["#/required is 'a'", "list of strings"]),
        ({"enum": []}, ["#/enum"]),
        ({"pattern": 3}, ["#/pattern is 3", "string"]),
        ({"$ref": "#/nowhere"}, ["#/$ref", "not in the schema"]),
        ({"$ref": "other.json"}, ["#/$ref is 'other.json'"]),
        (7, ["# is 7"]),
    ],
)
def test_a_fault_is_named_with_its_place(schema, parts):
    with pytest.raises(GrammarError) as caught:
        check_schema(schema)
    for part in parts:
        assert part in str(caught.value)


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}


@pytest.mark.parametrize(
    ("schema", "is_satisfiable"),
    [
        (True, True),
        (False, False),
        ({"$ref": "#"}, False),
        ({"$defs": {"node": NODE}, "$ref": "#/$defs/node"}, True),
        ({"$defs": {"node": {**NODE, "required": ["next"]}}, "$ref": "#/$defs/node"}, False),
        ({"type": "array", "items": {"$ref": "#"}}, True),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, False),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, True),
        ({"allOf": [{"$ref": "#"}, {"type": "null"}]}, False),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, False),
        ({"type": "object", "required": ["a"]}, True),
        ({"type": ["object", "null"], "required": ["me"], "properties": {"me": {"$ref": "#"}}}, True),
    ],
)
def test_what_no_finite_value_satisfies_is_refused(schema, is_satisfiable):
    if is_satisfiable:
        check_schema(schema)
        return
    with pytest.raises(GrammarError, match="never be satisfied"):
        check_schema(schema)


def test_objects_are_closed_at_every_depth_unless_they_say_otherwise():
    schema = {
        "properties": {"properties": {"type": "object"}, "open": {"type": "object", "additionalProperties": True}},
        "items": {"type": "string"},
        "anyOf": [{"type": "object"}, {"type": "array"}],
        "const": {"type": "object"},
    }
    assert changed(schema, closed) == {
        "properties": {
            "properties": {"type": "object", "additionalProperties": False},
            "open": {"type": "object", "additionalProperties": True},
        },
        "items": {"type": "string"},
        "anyOf": [{"type": "object", "additionalProperties": False}, {"type": "array"}],
        "const": {"type": "object"},
        "additionalProperties": False,
    }
    assert "additionalProperties" not in schema


def test_the_pattern_of_dates_has_the_days_of_the_calendar():
    import re

    pattern = re.compile(_REAL["date"])
    for year in (1, 4, 100, 400, 1900, 1996, 2000, 2023, 2024, 9999):
        for month in range(1, 13):
            for day in range(1, 32):
                try:
                    exists = bool(datetime.date(year, month, day))
                except ValueError:
                    exists = day > 29  # the format checks the lengths of the other months
                assert bool(pattern.match(f"{year:04}-{month:02}-{day:02}")) == exists, (year, month, day)
    assert not pattern.match("0000-01-01")


def test_a_schema_of_dates_keeps_what_it_asked_before():
    schema = {"type": "string", "format": "date", "allOf": [{"minLength": 1}]}
    assert with_real_dates(schema)["allOf"] == [{"minLength": 1}, {"pattern": _REAL["date"]}]
    assert with_real_dates({"format": "email"}) == {"format": "email"}

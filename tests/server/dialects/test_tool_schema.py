"""Places in the schemas of tools."""

import pytest

from server.dialects.tool_schema import STRINGS, SchemaPlace

TREE = {"type": "object", "properties": {"value": {"type": "integer"}, "below": {"type": "array", "items": {"$ref": "#"}}}}


def test_references_into_the_schema_itself_are_followed() -> None:
    place = SchemaPlace.of(TREE)
    for _ in range(3):
        assert place.member("value").schema == {"type": "integer"} and place.takes_items
        place = place.member("below").item()


def test_a_declared_property_comes_before_others_of_an_earlier_choice() -> None:
    texts, numbers = {"type": "string"}, {"type": "integer"}
    place = SchemaPlace.of({"anyOf": [{"additionalProperties": texts}, {"properties": {"count": numbers}}]})
    assert place.member("count").schema == numbers and place.member("else").schema == texts


@pytest.mark.parametrize(
    "schema",
    [
        None,
        {},
        [],
        {"properties": 3},
        {"anyOf": 3},
        {"anyOf": [None]},
        {"$ref": "#/none"},
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}] * 2},
    ],
)
def test_what_a_schema_does_not_tell_are_strings(schema: object) -> None:
    place = SchemaPlace.of(schema)
    assert place.member("a") == place.item().member("b") == STRINGS and not place.takes_items

"""Where a value stands in the JSON Schema of a tool's arguments."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.errors import GrammarError
from jaxllm.structured.json_schema import resolve

_MAX_HOPS = 16
"""References and choices that are followed to one schema."""
_STRING = {"type": "string"}


@dataclass(frozen=True)
class SchemaPlace:
    """The schema of one value; what it says nothing about are strings."""

    schema: Any
    _root: Any

    @classmethod
    def of(cls, schema: Any) -> "SchemaPlace":
        """The place of a whole schema."""
        return cls(schema, schema)

    def member(self, key: str) -> "SchemaPlace":
        """The place of an object's member: as one of the choices declares it, or else as one of them has others."""
        choices = list(self._choices())
        for schema in choices:
            properties = schema.get("properties")
            if isinstance(properties, Mapping) and key in properties:
                return self._at(properties[key])
        found = (self._at(others) for schema in choices if isinstance(others := schema.get("additionalProperties"), Mapping))
        return next(found, STRINGS)

    def item(self) -> "SchemaPlace":
        """The place of an array's items."""
        found = (schema["items"] for schema in self._choices() if isinstance(schema.get("items"), Mapping))
        return self._at(next(found, _STRING))

    @property
    def takes_items(self) -> bool:
        """Whether the value may be an object or an array, and no string."""
        types = {each for schema in self._choices() for each in _types(schema)}
        return bool(types & {"object", "array"}) and "string" not in types

    def _at(self, schema: Any) -> "SchemaPlace":
        if isinstance(schema, Mapping) and "$ref" in schema:
            schema = next(SchemaPlace(schema, self._root)._choices(), {})
        return SchemaPlace(schema, self._root)

    def _choices(self) -> Iterator[Mapping[str, Any]]:
        """The schema and those that it refers to or chooses from."""
        left = [self.schema]
        for _ in range(_MAX_HOPS):
            if not left:
                return
            schema = left.pop(0)
            if not isinstance(schema, Mapping):
                continue
            if isinstance(reference := schema.get("$ref"), str):
                left.append(self._target(reference))
            else:
                yield schema
            for name in ("anyOf", "oneOf", "allOf"):
                if isinstance(schema.get(name), list):
                    left += schema[name]

    def _target(self, reference: str) -> Any:
        try:
            return resolve(self._root, reference, "#")
        except GrammarError:
            return None


def _types(schema: Mapping[str, Any]) -> list[Any]:
    named = schema.get("type")
    return named if isinstance(named, list) else [named]


STRINGS = SchemaPlace.of(_STRING)
"""The place of strings."""

"""Takes numbers and booleans as clients serialise them: 8.0 for an integer, "8", "0.5" or "true" for what they say.

Only conversions that lose nothing: 8.5 is no integer, a boolean no number. They are part of the models' schemas, so that
pydantic's core runs them, and a value of the right type costs next to nothing.
"""

from typing import Any

from pydantic_core import core_schema

_INNER = {
    "model-field": "schema",
    "default": "schema",
    "nullable": "schema",
    "function-before": "schema",
    "function-after": "schema",
    "function-wrap": "schema",
    "list": "items_schema",
    "dict": "values_schema",
}
"""Where schemas of these types have another."""


def coercing(model: Any) -> Any:
    """The schema of a model, whose numbers take these forms too. The models inside it have their own."""
    fields = model["schema"]
    if "fields" not in fields:  # a validator around them
        return {**model, "schema": coercing(fields)}
    return {**model, "schema": {**fields, "fields": {name: _converted(each) for name, each in fields["fields"].items()}}}


def _converted(schema: Any) -> Any:
    kind = schema["type"]
    if kind in ("int", "float"):
        return _number(schema)
    if kind == "union":
        return {**schema, "choices": [_choice(each) for each in schema["choices"]]}
    if kind in _INNER:
        return {**schema, _INNER[kind]: _converted(schema[_INNER[kind]])}
    return schema


def _choice(choice: Any) -> Any:
    """A choice of a union, with the name that the location of an error has."""
    schema, name = choice if isinstance(choice, tuple) else (choice, _name(choice))
    return (_converted(schema), name) if name else _converted(schema)


def _name(schema: Any) -> str | None:
    if schema["type"] == "list":
        return f"list[{_name(schema['items_schema'])}]"
    return schema["type"] if schema["type"] in ("int", "float", "str") else None


def _number(schema: Any) -> Any:
    """A number, or a text of one. Pydantic's own conversion would take booleans, too."""
    types: list[Any] = [core_schema.float_schema(strict=True), core_schema.str_schema(strict=True)]
    if schema["type"] == "int":
        types.insert(0, core_schema.int_schema(strict=True))
    is_one = core_schema.union_schema(types, mode="left_to_right", custom_error_type=f"{schema['type']}_type")
    # What is written first is what the OpenAPI document shows.
    return core_schema.json_or_python_schema(schema, core_schema.chain_schema([is_one, schema]))

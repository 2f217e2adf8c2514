"""Tools of requests, and what is refused."""

from typing import Any

import pytest

from jaxllm.errors import InvalidRequestError
from server.dialects import ToolChoice, check_tools
from server.dialects.tools import MAX_TOOLS


def function(name: Any = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def parameters(**schema: Any) -> list[dict[str, Any]]:
    return [function(parameters={"type": "object", **schema})]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


NAMED = {"type": "function", "function": {"name": "g"}}
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "no tools": ([], None, "tools"),
    "no tools, required": ([], "required", "tools"),
    "required without tools": (None, "required", "tool_choice"),
    "auto without tools": (None, "auto", "tool_choice"),
    "a name without tools": (None, NAMED, "tool_choice"),
    "a name that is missing": ([function()], NAMED, "tool_choice"),
    "too many tools": ([function(f"f{index}") for index in range(MAX_TOOLS + 1)], None, "tools"),
    "a name with a quote": ([function('a"b')], None, "tools[0].function.name"),
    "a name with a tag": ([function("a<b>")], None, "tools[0].function.name"),
    "a name that ends with a space": ([function("a ")], None, "tools[0].function.name"),
    "a name with a line's end": ([function("a\n")], None, "tools[0].function.name"),
    "parameters of another type": ([function(parameters={"type": "array"})], None, "tools[0].function.parameters.type"),
    "a type that is unknown": (parameters(properties={"a": {"type": "something"}}), None, "tools[0].function.parameters"),
    "a type that is an object": (parameters(properties={"a": {"type": {}}}), None, "tools[0].function.parameters"),
    "a pattern that is none": (parameters(properties={"a": {"pattern": "(["}}), None, "tools[0].function.parameters"),
    "a pattern that is a number": (parameters(properties={"a": {"pattern": 3}}), None, "tools[0].function.parameters"),
    "a deep pattern": (parameters(properties={"a": {"pattern": "(" * 5000}}), None, "tools[0].function.parameters"),
    "a name that is no pattern": (parameters(patternProperties={"*": {}}), None, "tools[0].function.parameters"),
    "properties that are an array": (parameters(properties=["a"]), None, "tools[0].function.parameters"),
    "a property that is a text": (parameters(properties={"a": "string"}), None, "tools[0].function.parameters"),
    "required that is a text": (parameters(required="a"), None, "tools[0].function.parameters"),
    "no alternatives": (parameters(anyOf=[]), None, "tools[0].function.parameters"),
    "a reference to elsewhere": (parameters(properties={"a": {"$ref": "file:///x"}}), None, "tools[0].function.parameters"),
    "a deep schema": ([function(parameters=nested(40))], None, "tools[0].function.parameters"),
    "a large schema": (parameters(enum=list(range(20_000))), None, "tools[0].function.parameters"),
}


@pytest.mark.parametrize(("tools", "choice", "param"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_with_tools_is_refused_by_its_place(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_tools(tools, choice)
    assert caught.value.param == param
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("choice", "meant"),
    [
        (None, ToolChoice("auto")),
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        (NAMED, ToolChoice("named", "g")),
    ],
)
def test_the_choice_may_be_left_out_or_said(choice: Any, meant: ToolChoice) -> None:
    assert check_tools([function(), function("g")], choice)[1] == meant


def test_of_functions_with_the_same_name_the_first_counts() -> None:
    tools = [function(description="one"), function("a b"), function(description="two")]
    assert [(tool.name, tool.description) for tool in check_tools(tools, None)[0]] == [("f", "one"), ("a b", None)]


def test_without_tools_none_are_called() -> None:
    assert check_tools(None, None) == check_tools(None, "none") == ((), ToolChoice("none"))


def test_common_schemas_are_taken() -> None:
    schema = {
        "type": "object",
        "properties": {
            "date": {"type": "string", "pattern": r"^\d{4}-(?<month>\d\d)\p{L}$", "description": "x"},
            "type": {"type": ["string", "null"], "enum": ["a", None], "default": None},
            "pattern": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "array", "items": {"type": "integer"}}]},
        },
        "required": ["date"],
        "additionalProperties": False,
        "$defs": {"n": {"type": "number", "minimum": 0}},
    }
    (tool, bare), _ = check_tools([function("a.b-c_D", parameters=schema, strict=True), function(parameters=None)], None)
    assert (tool.name, tool.parameters, tool.strict) == ("a.b-c_D", schema, True)
    assert bare.schema == {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("parameters", "takes_none"),
    [
        ({}, True),
        ({"type": "object"}, True),
        ({"type": "object", "properties": {}, "required": []}, True),
        ({"additionalProperties": True}, False),
        ({"additionalProperties": {"type": "integer"}}, False),
        ({"required": ["a"]}, False),
        ({"anyOf": [{"required": ["a"]}]}, False),
        ({"properties": {"a": {}}}, False),
    ],
)
def test_a_function_that_names_no_parameters_takes_none(parameters: dict[str, Any], takes_none: bool) -> None:
    (tool,), _ = check_tools([function(parameters=parameters)], None)
    assert (tool.schema.get("additionalProperties") is False) == takes_none

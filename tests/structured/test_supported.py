"""Schemas with keywords that llguidance lacks: a grammar accepts just what `jsonschema` finds valid, or the keyword is refused."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from jaxllm.errors import GrammarError
from jaxllm.structured.grammar_text import grammar_text
from jaxllm.structured_outputs import StructuredOutputsParams

TABLE = LLTokenizer("byte")
SCALARS = [None, True, False, 0, 1, -1, 2, 3, 2.5, -0.5, 100, "", "a", "b", "ab", "abc", "é", "a\n", '"', "\\", "A"]
ARRAYS = [[], [1], ["a"], [1, 2], [1, "b", None], [[], {}]]
OBJECTS = [
    *({}, {"a": 1}, {"b": 1}, {"a": "x"}, {"ab": 1}, {"c": None}, {"": 1}, {"é": 1}, {"kind": "a"}),
    *({"a": 1, "b": 2}, {"a": 1, "c": 2}, {"kind": "b", "a": 1}, {"kind": "a", "a": 1}, {"a": 1, "b": 2, "c": 3}),
]
VALUES = [*SCALARS, *ARRAYS, *OBJECTS]
WORDS = {"enum": ["a", "ab", "", '"', "\\"]}
NUMBERS = {"enum": [1, 2, 2.5]}
KIND = {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}, "a": {"type": "integer"}}}
SHUT = {**KIND, "additionalProperties": False}


def spellings(value: Any) -> Iterator[str]:
    """JSON of a value with its properties in any order: a grammar takes one."""
    if isinstance(value, dict):
        for order in itertools.permutations(value.items()):
            for parts in itertools.product(*(list(spellings(part)) for _, part in order)):
                named = zip(order, parts, strict=True)
                yield "{" + ",".join(f"{json.dumps(name, ensure_ascii=False)}:{part}" for (name, _), part in named) + "}"
    elif isinstance(value, list):
        for parts in itertools.product(*(list(spellings(part)) for part in value)):
            yield "[" + ",".join(parts) + "]"
    else:
        yield json.dumps(value, ensure_ascii=False)


def compile_schema(schema: dict[str, Any]) -> LLMatcher:
    text = grammar_text(StructuredOutputsParams(json=schema, disable_any_whitespace=True), lambda text: ())
    return LLMatcher(TABLE, text, log_level=0)


def accepts(matcher: LLMatcher, value: Any) -> bool:
    for text in spellings(value):
        tokens, output = TABLE.tokenize_str(text), matcher.deep_copy()
        if output.try_consume_tokens(tokens) == len(tokens) and output.is_accepting():
            return True
    return False


def check(schema: dict[str, Any], matcher: LLMatcher) -> None:
    validator = Draft202012Validator(schema)
    for value in VALUES:
        assert accepts(matcher, value) == validator.is_valid(value), value


@pytest.mark.parametrize(
    "schema",
    [
        {"not": False},
        {"not": {"type": "string"}},
        {"not": {"type": ["string", "number"]}},
        {"type": ["integer", "string"], "not": {"type": "integer"}},
        {"not": {"enum": [1, 2, "a", "ab", "", None, True, [], {}]}},
        {"type": "string", "not": WORDS},
        {"type": "number", "not": NUMBERS},
        {"type": "number", "minimum": -0.5, "maximum": 2.5, "not": {"enum": [0, 2]}},
        {"type": "integer", "not": NUMBERS},
        {**WORDS, "not": {"const": "ab"}},
        {"type": "object", "not": {"required": ["a"]}},
        {"not": {"required": ["a", "b"]}},
        {**SHUT, "not": {"anyOf": [{"required": ["a"]}, {"required": ["kind"]}]}},
        {**KIND, "not": {"properties": {"kind": {"const": "a"}}, "required": ["kind"]}},
        {"not": {"minimum": 2}},
        {"type": "number", "not": {"minimum": 1, "exclusiveMaximum": 2}},
        {"type": "integer", "not": {"minimum": 2}},
        {"type": "string", "not": {"minLength": 2}},
        {"not": {"maxLength": 1}},
        {"not": {"maxItems": 1}},
        {"type": "object", "not": {"maxProperties": 1}},
        {"type": "object", "not": {"minProperties": 2}},
        {"not": {"not": {"type": "string"}}},
        {"not": {"allOf": [{"type": "string"}, {"minLength": 2}]}},
        {"not": {"$ref": "#/$defs/x"}, "$defs": {"x": {"enum": ["a", 1]}}},
        {"type": "string", "not": {"items": {"multipleOf": 2}}},
        {"type": "object", "properties": {"a": {"not": {"type": "string"}}}, "additionalProperties": {"not": {"const": None}}},
        {"items": {"not": {}}},
    ],
)
def test_not_is_exact(schema: dict[str, Any]) -> None:
    check(schema, compile_schema(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        {"propertyNames": {"pattern": "b"}},
        {"type": "object", "propertyNames": {"enum": ["a", "b", 1]}},
        {"propertyNames": {"const": "a"}},
        {"type": "object", "propertyNames": {"enum": ["a", "ab"], "maxLength": 1}},
        {"type": "object", "propertyNames": {"minLength": 1, "maxLength": 2}},
        {"propertyNames": {"minLength": 2, "type": "string"}},
        {"type": "object", "propertyNames": {"not": {"enum": ["a", "é"]}}},
        {"type": "object", "propertyNames": {"not": {"anyOf": [{"pattern": "^a"}, {"const": "b"}]}}},
        {"type": "object", "propertyNames": {"anyOf": [{"pattern": "b"}, {"const": "a"}]}},
        {"type": "object", "propertyNames": {"anyOf": [{"const": "b"}, {"enum": ["a", "b"]}]}},
        {
            "type": "object",
            "propertyNames": {"allOf": [{"not": {"pattern": "a"}}, {"not": {"pattern": "a"}}, {"minLength": 1}]},
        },
        {"type": "object", "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"enum": ["a", "b"]}}},
        {"type": "object", "propertyNames": False},
        {"type": "object", "propertyNames": True},
        {"type": "object", "propertyNames": {"type": "integer"}},
        {"type": "string", "propertyNames": {"format": "date"}},
        {**KIND, "propertyNames": {"pattern": "^[ab]"}},
        {**SHUT, "propertyNames": {"enum": ["a", "b"]}},
        {"type": "object", "additionalProperties": {"type": "integer"}, "propertyNames": {"maxLength": 1}},
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "propertyNames": {"enum": ["a", "b"]}},
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "propertyNames": {"pattern": "^a"}},
        {"type": "object", "propertyNames": {"pattern": "^[ab]$"}, "minProperties": 1, "maxProperties": 2},
        {"type": "object", "required": ["a"], "propertyNames": {"pattern": "a"}},
    ],
)
def test_property_names_are_exact(schema: dict[str, Any]) -> None:
    check(schema, compile_schema(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {
            **KIND,
            "if": {"properties": {"kind": {"const": "a"}}},
            "then": {"required": ["a"]},
            "else": {"properties": {"a": False}},
        },
        {"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"type": "number"}},
        {"if": {"type": "string"}, "else": {"type": "number"}},
        {"if": {"pattern": "a"}},
        {"then": False},
        {"dependentRequired": {"a": ["b"], "c": ["a"]}},
        {"dependentSchemas": {"a": {"properties": {"b": {"const": 2}}, "required": ["b"]}}},
        {"type": "array", "uniqueItems": False, "minContains": 2},
        {"type": "object", "unevaluatedProperties": True},
    ],
)
def test_conditions_are_exact_and_what_says_nothing_is_no_fault(schema: dict[str, Any]) -> None:
    check(schema, compile_schema(schema))


LEAVES = [
    *({"type": "string"}, {"type": ["integer", "null"]}, {"type": "object"}, WORDS, NUMBERS, {"const": None}, {"minimum": 1}),
    *({"maxLength": 1}, {"minItems": 1}, {"required": ["a"]}, {"properties": {"a": {"type": "string"}}}, KIND, SHUT),
    *({"type": "object", "propertyNames": {"pattern": "^a"}}, {"propertyNames": {"not": {"enum": ["a", "b"]}}}),
]


def _larger(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.lists(parts, min_size=2, max_size=2)
    return st.one_of(
        st.builds(lambda part: {"not": part}, parts),
        st.builds(lambda leaf, part: {**leaf, "not": part}, st.sampled_from(LEAVES), parts),
        st.builds(lambda condition, two: {"if": condition, "then": two[0], "else": two[1]}, parts, pairs),
        st.builds(lambda key, two: {key: two}, st.sampled_from(["allOf", "anyOf"]), pairs),
        st.builds(lambda part: {"type": "object", "properties": {"a": part}}, parts),
    )


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.recursive(st.sampled_from(LEAVES), _larger, max_leaves=5))
def test_combinations_are_exact(schema: dict[str, Any]) -> None:
    try:
        matcher = compile_schema(schema)
    except GrammarError:
        assume(False)
    if matcher.is_error():
        assert "nsatisfiable" in matcher.get_error()
        validator = Draft202012Validator(schema)
        assert not any(map(validator.is_valid, VALUES))
    else:
        check(schema, matcher)


@pytest.mark.parametrize(
    ("schema", "parts"),
    [
        ({"type": "string", "not": {"pattern": "a"}}, ["at #/not/pattern", "opposite of pattern"]),
        ({"properties": {"a/b": {"not": {"items": {"type": "string"}}}}}, ["at #/properties/a~1b/not/items"]),
        (
            {"$defs": {"t": {"not": {"$ref": "#/$defs/u"}}, "u": {"multipleOf": 2}}, "$ref": "#/$defs/t"},
            ["#/$defs/u/multipleOf"],
        ),
        ({"not": {"type": "integer"}}, ["at #/not/type", "numbers that are no integers"]),
        ({"not": {"const": {"a": 1}}}, ["at #/not/const"]),
        ({"items": {"not": {"oneOf": [{}, {}]}}}, ["at #/items/not/oneOf"]),
        ({"not": {"$ref": "#/$defs/a"}, "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}, ["itself"]),
        ({"propertyNames": {"pattern": "^a", "maxLength": 3}}, ["at #/propertyNames", "pattern and maxLength"]),
        ({"properties": {"a": {"propertyNames": {"format": "email"}}}}, ["at #/properties/a/propertyNames/format"]),
        ({"propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"anyOf": [{"$ref": "#/$defs/n"}]}}}, ["itself"]),
        ({"if": {"uniqueItems": True}, "then": False}, ["at #/if/uniqueItems"]),
        ({"properties": {"x": {"uniqueItems": True}}}, ["at #/properties/x/uniqueItems", "not supported"]),
        ({"unevaluatedProperties": False}, ["at #/unevaluatedProperties"]),
        ({"dependentRequired": {"a": "b"}}, ["at #/dependentRequired", "lists of strings"]),
    ],
)
def test_what_cannot_be_expressed_is_refused_with_keyword_and_place(schema: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(GrammarError) as caught:
        compile_schema(schema)
    for part in parts:
        assert part in str(caught.value)


def test_a_keyword_that_its_draft_does_not_know_says_nothing() -> None:
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "unevaluatedProperties": False}
    assert accepts(compile_schema(schema), {"a": 1})


def test_a_definition_that_nothing_refers_to_may_have_any_keywords() -> None:
    schema = {"$defs": {"unused": {"contains": {}}, "used": {"not": {"type": "string"}}}, "items": {"$ref": "#/$defs/used"}}
    check(schema, compile_schema(schema))
    with pytest.raises(GrammarError, match="at #/\\$defs/unused/contains"):
        compile_schema({**schema, "items": {"$ref": "#/$defs/unused"}})


def test_closing_objects_leaves_opposites_as_they_are() -> None:
    schema = {**KIND, "not": {"required": ["a"]}}
    form = StructuredOutputsParams(json=schema, disable_any_whitespace=True, disable_additional_properties=True)
    matcher = LLMatcher(TABLE, grammar_text(form, lambda text: ()), log_level=0)
    found = [value for value in OBJECTS if accepts(matcher, value)]
    assert found == [{}, {"kind": "a"}]

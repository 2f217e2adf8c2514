"""Structured output as callers give it: one constraint, within limits, with clear errors."""

import json
import math

import pytest

from jaxllm import SamplingParams, StructuredOutputsParams
from jaxllm.errors import InvalidRequestError
from jaxllm.sampling_params import BeamSearchParams
from jaxllm.structured_outputs import MAX_CHOICES, MAX_NESTING, MAX_NODES, MAX_SPEC_BYTES


def nested(levels: int) -> dict:
    schema: dict = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({}, ["has none", "exactly one"]),
        ({"json": {}, "regex": "a"}, ["json and regex", "exactly one"]),
        ({"jsn": {}}, ["'jsn'", "unknown"]),
        ({"json": ""}, ["json is empty"]),
        ({"json": "{"}, ["json is not valid JSON", "line 1 column 2"]),
        ({"json": '"x"'}, ["'x'", "must be an object"]),
        ({"json": []}, ["[]", "must be an object"]),
        ({"json": {"minimum": math.nan}}, ["not JSON"]),
        ({"json": '{"minimum": NaN}'}, ["NaN is no number"]),
        ({"json": {"const": object()}}, ["not JSON"]),
        ({"json": nested(MAX_NESTING + 1)}, ["nested too deeply", str(MAX_NESTING), "/items/items"]),
        ({"json": "[" * 100_000}, ["json", "nested too deeply"]),
        ({"json": {"enum": list(range(MAX_NODES))}}, [f"more than {MAX_NODES} values"]),
        ({"json": {"const": "x" * MAX_SPEC_BYTES}}, ["bytes", str(MAX_SPEC_BYTES)]),
        ({"json": {"x" * 10_000: dict.fromkeys(map(str, range(MAX_NODES + 1)))}}, [str(MAX_NODES)]),
        ({"json": {"const": "\ud800"}}, ["surrogate"]),
        ({"regex": ""}, ["regex is empty"]),
        ({"regex": 1}, ["regex is a int"]),
        ({"regex": "a\0b"}, ["NUL", "place 1"]),
        ({"regex": "a" * (MAX_SPEC_BYTES + 1)}, [str(MAX_SPEC_BYTES)]),
        ({"choice": []}, ["choice is empty"]),
        ({"choice": "ab"}, ["choice is a str", "list"]),
        ({"choice": ["a", ""]}, ["choice[1] is empty"]),
        ({"choice": ["a", 1]}, ["choice[1] is a int"]),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, [str(MAX_CHOICES)]),
        ({"grammar": " "}, ["grammar is empty"]),
        ({"json_object": False}, ["json_object is False"]),
        ({"structural_tag": "[]"}, ["structural_tag is []", "object"]),
        ({"regex": "a", "disable_any_whitespace": True}, ["disable_any_whitespace", "regex"]),
        ({"json": {}, "disable_any_whitespace": 1}, ["disable_any_whitespace is 1"]),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, ["whitespace_pattern"]),
        ({"json": {}, "start_after_token_ids": []}, ["start_after_token_ids"]),
        ({"json": {}, "start_after_token_ids": [True]}, ["start_after_token_ids is [True]"]),
    ],
)
def test_a_bad_form_is_refused_with_its_place(values, parts):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(structured_outputs=values)
    assert caught.value.param == "structured_outputs"
    for part in parts:
        assert part in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_dict_becomes_the_object_with_its_json_as_text():
    schema = {"type": "string", "maxLength": 3, "const": "é"}
    params = SamplingParams(structured_outputs={"json": schema, "start_after_token_ids": [5, 6]}).structured_outputs
    assert params.kind == "json"
    assert json.loads(params.json) == schema and "é" in params.json
    assert params.start_after_token_ids == (5, 6)
    assert params == StructuredOutputsParams(json=json.dumps(schema), start_after_token_ids=(5, 6))
    assert hash(params) == hash(StructuredOutputsParams(json=schema, start_after_token_ids=(5, 6)))


def test_the_deepest_schema_within_the_limit_is_taken():
    assert StructuredOutputsParams(json=nested(MAX_NESTING)).kind == "json"


def test_true_is_a_schema():
    assert StructuredOutputsParams(json=True).json == "true"


def test_choices_keep_their_order_and_lose_their_doubles():
    assert StructuredOutputsParams(choice=["b", "a", "b"]).choice == ("b", "a")


def test_clones_share_the_form():
    params = SamplingParams(structured_outputs={"regex": "a+"})
    assert params.clone().structured_outputs == params.structured_outputs


def test_beam_search_refuses_it_and_says_what_to_do():
    with pytest.raises(InvalidRequestError, match="SamplingParams"):
        BeamSearchParams(beam_width=2, max_tokens=3, structured_outputs={"regex": "a"})

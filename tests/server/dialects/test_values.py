"""Values inside calls: JSON as it is written, Python literals, and text typed by a schema."""

import ast
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.dialects.json_scanner import MAX_DEPTH, Broken, JsonScanner
from server.dialects.python_literal import literal_to_json
from server.dialects.xml import typed_json

FEW = settings(max_examples=40)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=4), below, max_size=3),
    max_leaves=8,
)


def scan(text: str, size: int) -> tuple[int, bool, bool]:
    """Where the value that a text begins with ends, whether it is complete, whether it is broken."""
    scanner, at = JsonScanner(), 0
    while at < len(text) and not (scanner.done or scanner.broken):
        at += scanner.scan(text[at : at + size], 0)
    if not scanner.done and not scanner.broken:
        scanner.finish()
    return at, scanner.done, scanner.broken


@FEW
@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_the_end_of_a_json_value_is_found(value, indent, ascii) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    for size in (1, 3, len(text) + 2):
        assert scan(text + ", 1", size) == (len(text), True, False)


@FEW
@given(st.text('{}[]":,01-.eE+truefalsn\\u \n', max_size=12))
def test_text_is_json_exactly_where_json_says_so(text: str) -> None:
    try:
        json.loads(text)
        valid = True
    except ValueError:
        valid = False
    for size in (1, 3, 100):
        end, done, broken = scan(text, size)
        assert (done and not broken and not text[end:].strip()) == valid


def test_json_that_is_nested_too_deeply_is_broken() -> None:
    assert scan("[" * MAX_DEPTH + "]" * MAX_DEPTH, 100)[1:] == (True, False)
    assert scan("[" * (MAX_DEPTH + 1), 100)[2]


@FEW
@given(VALUES)
def test_python_literals_become_json(value) -> None:
    assert json.loads(literal_to_json(repr(value))) == value


@pytest.mark.parametrize(
    "text",
    [
        "'a\\x41\\u00e9\\n\\'\\\\'",
        '"\\101"',
        "(1, 'a')",
        "[1, 2,]",
        "{'a': (), }",
        "1_000",
        "-.5",
        "5.",
        "00e2",
        "-2.5E-3",
        "+3",
        " None ",
    ],
)
def test_python_spellings_mean_what_python_says(text: str) -> None:
    assert json.loads(literal_to_json(text)) == json.loads(json.dumps(ast.literal_eval(text.strip())))


@pytest.mark.parametrize(
    "text", ["f()", "__import__('os')", "a", "1+1", "[1 2]", "{1: 2}", "'a", "[", "", "(" * 100, "b'x'", "{'a'}", "1;2"]
)
def test_what_is_no_literal_is_broken(text: str) -> None:
    with pytest.raises(Broken):
        literal_to_json(text)


@pytest.mark.parametrize(
    ("value", "schema", "meant"),
    [
        ("\n3\n", {"type": "integer"}, 3),
        ("3", {"type": "string"}, "3"),
        ("\n  a\n\n", {"type": "string"}, "  a\n"),
        ("true", {"type": "boolean"}, True),
        ("False", {"type": "boolean"}, False),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ("3", {"type": ["string", "integer"]}, "3"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ('{"a": [1]}', {"anyOf": [{"type": "object"}, {"type": "string"}]}, {"a": [1]}),
        ("{'a': 1}", {"type": "object"}, "{'a': 1}"),
        ("3 cats", {"type": "integer"}, "3 cats"),
        ("b", {"enum": ["a", "b"]}, "b"),
        ("2", {"enum": [1, 2]}, 2),
        ("3", None, 3),
        ("text", None, "text"),
        ("text", {"type": {}}, "text"),
    ],
)
def test_text_in_tags_is_typed_by_its_schema(value: str, schema: object, meant: object) -> None:
    assert json.loads(typed_json(value, schema)) == meant

"""Structured output on the command line and in prompt files."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxllm.cli.forms import add_form_arguments, read_form
from jaxllm.cli.main import main
from jaxllm.cli.parser import Parser
from jaxllm.structured_outputs import StructuredOutputsParams
from tests.helpers.tiny_tokenizers import write_tokenizer


@pytest.fixture(scope="module")
def words_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens are runs of bytes, which grammars need."""
    return write_tokenizer(tmp_path_factory.mktemp("bytes"))


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def form_of(*arguments: str) -> StructuredOutputsParams | None:
    parser = Parser("test", "")
    add_form_arguments(parser)
    return read_form(parser.parse(arguments))


@pytest.mark.parametrize(
    ("arguments", "form"),
    [
        (["--json-schema", json.dumps(SCHEMA)], {"json": SCHEMA}),
        (["--regex", "[0-9]+ apples"], {"regex": "[0-9]+ apples"}),
        (["--choice", "red", "--choice", "green"], {"choice": ["red", "green"]}),
        (["--grammar", 'start: "x" "y"'], {"grammar": 'start: "x" "y"'}),
        (["--grammar", 'root ::= "' + "x" * 5000 + '"'], {"grammar": 'root ::= "' + "x" * 5000 + '"'}),
    ],
)
def test_a_form_is_given_as_text(arguments: list[str], form: dict[str, Any]) -> None:
    assert form_of(*arguments) == StructuredOutputsParams(**form)
    assert form_of() is None


@pytest.mark.parametrize(("option", "text"), [("--json-schema", json.dumps(SCHEMA)), ("--grammar", 'start: "x"')])
def test_it_may_lie_in_a_file(tmp_path: Path, option: str, text: str) -> None:
    (tmp_path / "form").write_text(text)
    assert form_of(option, str(tmp_path / "form")) == form_of(option, text)


def test_the_form_reaches_the_engine_as_a_grammar(opened: Any) -> None:
    assert main(["generate", "-q", "one two", "--regex", "[0-9]+ apples"]) == 0
    request = opened.core.requests[0]
    assert "[0-9]+ apples" in request.grammar.text and request.sampling_params.structured_outputs is None


def test_a_line_of_a_prompt_file_may_have_its_own(opened: Any, tmp_path: Path) -> None:
    lines = [{"prompt": "one", "structured_outputs": {"regex": "a+"}}, {"prompt": "two"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert main(["generate", "-q", "--file", str(tmp_path / "p.jsonl")]) == 0
    assert [request.grammar is not None for request in opened.core.requests] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--json-schema", "nowhere.json"], 2, "--json-schema nowhere.json cannot be read"),
        (["--regex", "a", "--choice", "b"], 2, "not allowed with"),
        (["--regex", "("], 1, "unclosed group"),
        (["--json-schema", '{"type": "strin"}'], 1, "#/type"),
    ],
)
def test_a_wrong_form_is_told_and_nothing_runs(
    opened: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert main(["generate", "-q", "one two", *arguments]) == code
    assert message in capsys.readouterr().err
    assert opened.core is None or not opened.core.requests

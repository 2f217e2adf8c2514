"""Structured output on the command line and in prompt files."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxllm.cli.main import main
from tests.helpers.tiny_tokenizers import write_tokenizer


@pytest.fixture(scope="module")
def words_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens are runs of bytes, which grammars need."""
    return write_tokenizer(tmp_path_factory.mktemp("bytes"))


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--json-schema", json.dumps(SCHEMA)], '"a"'),
        (["--regex", "[0-9]+ apples"], "[0-9]+ apples"),
        (["--choice", "red", "--choice", "green"], '"red" | "green"'),
        (["--grammar", 'start: "x" "y"'], 'start: "x" "y"'),
        (["--grammar", 'root ::= "x"'], '"x"'),
    ],
)
def test_the_form_reaches_the_engine_as_a_grammar(opened: Any, arguments: list[str], part: str) -> None:
    assert main(["generate", "-q", "one two", *arguments]) == 0
    request = opened.core.requests[0]
    assert part in request.grammar.text and request.sampling_params.structured_outputs is None


@pytest.mark.parametrize(("option", "text"), [("--json-schema", json.dumps(SCHEMA)), ("--grammar", 'start: "x"')])
def test_it_may_lie_in_a_file(opened: Any, tmp_path: Path, option: str, text: str) -> None:
    (tmp_path / "form").write_text(text)
    assert main(["generate", "-q", "one two", option, str(tmp_path / "form")]) == 0
    assert opened.core.requests[0].grammar is not None


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

"""Dialects of files and modules that options name, and of checkpoints that describe their answers themselves."""

from pathlib import Path

import pytest

from jaxllm.errors import ConfigError
from jaxllm.text.tokenizer import Tokenizer
from server.dialects import StreamParser, by_name
from server.dialects.plugins import reasoning_dialects_of, tool_dialects_of
from server.options import ChatOptions
from server.speech import Speech, check_names
from tests.server.dialects.samples import JSON_TEMPLATE, TIME, TOOLS, Message, sum_of
from tests.server.dialects.test_constraint import bytes_tokenizer

EXAMPLE = str(Path(__file__).parents[3] / "docs" / "example_dialect" / "arrow_calls.py")


def test_the_example_reads_calls_and_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(EXAMPLE).parent))
    for plugin in (EXAMPLE, "arrow_calls"):
        tool, reasoning = tool_dialects_of(plugin)["arrows"], reasoning_dialects_of(plugin)["hm"]
        parser = StreamParser(tool, reasoning, tools=TOOLS)
        deltas = [delta for letter in "<hm>So.</hm>Well:\n=> get_time {}\n=> no" for delta in parser.feed(letter)]
        assert sum_of([*deltas, *parser.finish()]) == Message("Well:\n\n=> no", "So.", [TIME])


def test_a_plugins_dialects_are_named_by_the_options_of_parsers() -> None:
    options = ChatOptions(
        tool_parser_plugin=EXAMPLE, tool_call_parser="arrows", reasoning_parser_plugin=EXAMPLE, reasoning_parser="hm"
    )
    check_names(options)
    assert Speech(bytes_tokenizer(()), None, options).reads_answers
    with pytest.raises(ConfigError, match="--tool-call-parser arrow is unknown; known are .*arrows"):
        check_names(ChatOptions(tool_parser_plugin=EXAMPLE, tool_call_parser="arrow"))


BROKEN = {
    "no file": (None, "cannot be imported: FileNotFoundError"),
    "a plugin of vLLM": ("from vllm.tool_parsers import ToolParserManager", "No module named 'vllm'; plugins for vLLM do not run here"),
    "fails": ("1 / 0", "cannot be imported: ZeroDivisionError"),
    "exits": ("import sys\nsys.exit(3)", "cannot be imported: SystemExit: 3"),
    "has nothing": ("TOOLS = {}", "has no TOOL_DIALECTS, a dict of names and ToolDialects"),
    "has a class": ("import server.dialects as d\nTOOL_DIALECTS = {'x': d.ToolDialect}", "has the entry 'x' of type type in TOOL_DIALECTS"),
    "none": ("import server.dialects as d\nTOOL_DIALECTS = {'none': d.ToolDialect()}", "must have a name, other than none"),
    "a constructor that fails": (
        "import server.dialects as d\nclass X(d.ToolDialect):\n  def __init__(self): 1 / 0\nTOOL_DIALECTS = {'x': X()}", "ZeroDivisionError"
    ),
    "no read": ("import server.dialects as d\nTOOL_DIALECTS = {'x': d.ToolDialect()}", "'x' in TOOL_DIALECTS has no method read"),
    "a text for a tuple": (
        "import server.dialects as d\nclass X(d.ToolDialect): openings = '=> '\nTOOL_DIALECTS = {'x': X()}",
        "has openings = '=> ', which must be a tuple of texts",
    ),
    "an empty marker": (
        "import server.dialects as d\nclass X(d.ToolDialect): openings = ('',)\nTOOL_DIALECTS = {'x': X()}", "none of them empty"
    ),
    "no frame": (
        "import server.dialects as d\nclass X(d.ToolDialect): frame = '=>'\nTOOL_DIALECTS = {'x': X()}", "a frame that is no Frame"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_plugin_that_cannot_be_used_is_refused(name: str, tmp_path: Path) -> None:
    code, told = BROKEN[name]
    path = tmp_path / "plugin.py"
    if code is not None:
        path.write_text(code)
    with pytest.raises(ConfigError, match=f"--tool-parser-plugin {path} ") as caught:
        check_names(ChatOptions(tool_parser_plugin=str(path), tool_call_parser="x"))
    assert told in str(caught.value)


def test_reasoning_that_nothing_closes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plugin.py"
    path.write_text("import server.dialects as d\nREASONING_DIALECTS = {'x': d.ReasoningDialect(start=('<hm>',))}")
    with pytest.raises(ConfigError, match="'x' in REASONING_DIALECTS has 1 markers in start and 0 in end"):
        check_names(ChatOptions(reasoning_parser_plugin=str(path), reasoning_parser="x"))


@pytest.mark.parametrize("method", ["of", "needs_special_tokens"])
def test_a_dialect_that_fails_for_a_model_is_refused(method: str, tmp_path: Path) -> None:
    path = tmp_path / "plugin.py"
    code = f"class X(d.ToolDialect):\n  def read(self, *_): yield\n  def {method}(self, *_): return 1 / 0\nTOOL_DIALECTS = {{'x': X()}}"
    path.write_text(f"import server.dialects as d\n{code}")
    options = ChatOptions(tool_parser_plugin=str(path), tool_call_parser="x")
    check_names(options)
    with pytest.raises(ConfigError, match=rf"the plugins \({path}\) failed: ZeroDivisionError"):
        Speech(bytes_tokenizer(()), None, options)


def test_a_plugin_without_the_name_of_a_dialect_is_refused() -> None:
    with pytest.raises(ConfigError, match="is given without --tool-call-parser"):
        check_names(ChatOptions(tool_parser_plugin=EXAMPLE))
    with pytest.raises(ConfigError, match="is given without --reasoning-parser"):
        check_names(ChatOptions(reasoning_parser_plugin=EXAMPLE))


def described(template: object) -> Tokenizer:
    """A model whose tokenizer_config.json has this response template."""
    tokenizer = bytes_tokenizer(())
    tokenizer.config["response_template"] = template
    return tokenizer


def names(template: object, chat_template: str = "{{ tools }}", **options: str) -> tuple[str | None, str | None]:
    speech = Speech(described(template), chat_template, ChatOptions(**options))
    return speech.tool_name, speech.reasoning_name


def test_a_response_template_is_used_where_the_chat_template_shows_no_dialect() -> None:
    assert names(JSON_TEMPLATE) == ("hf", "hf")
    assert names(JSON_TEMPLATE, "<tool_call>") == ("hermes", None)
    assert names(JSON_TEMPLATE, "<tool_call>", tool_call_parser="hf") == ("hf", "hf")
    assert names(JSON_TEMPLATE, tool_call_parser="none") == (None, "hf")
    for broken in ({"fields": {"content": {}}}, [1], {**JSON_TEMPLATE, "fields": {"content": {"open_pattern": "("}}}):
        assert names(broken) == (None, None)


def test_a_response_template_that_is_asked_for_and_cannot_be_used_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="--tool-call-parser hf reads answers by the response_template .* this model has none"
    ):
        names(None, tool_call_parser="hf")
    with pytest.raises(ConfigError, match="--reasoning-parser hf: the response_template .* cannot be used: .*start_anchor"):
        names({"fields": {"content": {}}}, reasoning_parser="hf", tool_call_parser="none")
    with pytest.raises(ConfigError, match="hf reads tool calls and reasoning together"):
        names(JSON_TEMPLATE, tool_call_parser="hermes", reasoning_parser="hf")


def test_a_call_that_is_nested_too_deep_is_content() -> None:
    body = '{"a":' * 3000
    tool, reasoning = by_name("hf", "hf", (), JSON_TEMPLATE)
    parser = StreamParser(tool, reasoning, tools=TOOLS)
    assert sum_of([*parser.feed(f"<call>{body}</call>b"), *parser.finish()]) == Message(f"{body}b")

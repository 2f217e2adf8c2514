"""Enforced calls: llguidance itself accepts and refuses, and what it accepts is read back as those calls."""

import dataclasses
import functools
import json
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxllm.errors import InvalidRequestError
from jaxllm.structured.grammar_text import grammar_text
from jaxllm.structured.token_table import Vocabulary
from jaxllm.text.tokenizer import Tokenizer
from server.dialects import (
    REASONING_DIALECTS,
    TOOL_DIALECTS,
    StreamParser,
    Tool,
    ToolChoice,
    special_tokens_of,
    start_after_token_ids,
    tool_constraint,
)
from tests.server.dialects.samples import (
    DEEPSEEK,
    HERMES,
    KIMI,
    KIMI_SECTION,
    LIST,
    LLAMA,
    PARIS,
    ROME,
    TIME,
    V3,
    V31,
    sum_of,
)

TOOLS = (
    Tool("get_weather", {"properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}}, "required": ["city"],
                         "additionalProperties": False, "$defs": {"city": {"enum": ["Paris", "Rome"]}}}),
    Tool("get_time", {"type": "object", "properties": {}, "additionalProperties": False}),
)  # fmt: skip
REQUIRED, WEATHER = ToolChoice("required"), ToolChoice("named", "get_weather")
HARMONY = "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>%s"
ALL_SPECIAL = tuple(
    dict.fromkeys(
        marker
        for dialect in TOOL_DIALECTS.values()
        for marker in (*dialect.openings, *dialect.markers)
        if marker.startswith(("<|", "<｜", "["))
    )
)
COHERE = '{"tool_name": "%s", "parameters": %s}'

FORMATS: dict[str, tuple[str, str, str, str, str, tuple[str, ...]]] = {
    "hermes": ("hermes", "", HERMES, "\n", "", ()),
    "hermes, special": ("hermes", "", HERMES, "\n", "", ("<tool_call>", "</tool_call>")),
    "granite": ("granite", "<|tool_call|>[", LIST, ", ", "]", ALL_SPECIAL),
    "jamba": ("jamba", "<tool_calls>[", LIST, ", ", "]</tool_calls>", ()),
    "longcat": ("longcat", "", HERMES.replace("tool_call", "longcat_tool_call"), "\n", "", ()),
    "nemotron": ("nemotron_json", "<TOOLCALL>[", LIST, ", ", "]</TOOLCALL>", ()),
    "granite 20b": ("granite-20b-fc", "", "<function_call> " + LIST, "\n", "", ()),
    "cohere": ("cohere_command3", "<|START_ACTION|>[", COHERE, ", ", "]<|END_ACTION|>", ALL_SPECIAL),
    "phi 4": ("phi4_mini_json", "functools[", LIST, ", ", "]", ()),
    "llama": ("llama3_json", "", LLAMA, "; ", "", ALL_SPECIAL),
    "mistral, an array": ("mistral", "[TOOL_CALLS][", LIST, ", ", "]", ("[TOOL_CALLS]",)),
    "mistral, by name": ("mistral", "", "[TOOL_CALLS]%s[ARGS]%s", "", "", ("[TOOL_CALLS]", "[ARGS]")),
    "deepseek v3": ("deepseek_v3", *DEEPSEEK.split("%s")[:1], V3, "\n", *DEEPSEEK.split("%s")[1:], ALL_SPECIAL),
    "deepseek v3.1": ("deepseek_v31", *DEEPSEEK.split("%s")[:1], V31, "", *DEEPSEEK.split("%s")[1:], ()),
    "kimi": ("kimi_k2", *KIMI_SECTION.split("%s")[:1], KIMI.replace("%d", "7"), "", *KIMI_SECTION.split("%s")[1:], ALL_SPECIAL),
    "plain JSON for pythonic": ("pythonic", "[", LIST, ", ", "]", ()),
    "plain JSON for xlam": ("xlam", "[", LIST, ", ", "]", ()),
    "plain JSON for qwen3 coder": ("qwen3_coder", "[", LIST, ", ", "]", ()),
}
"""Dialect, what stands before, a call, between and after calls, and the tokenizer's special tokens."""


@functools.cache
def bytes_tokenizer(special: tuple[str, ...], other: tuple[str, ...] = ()) -> Tokenizer:
    """A token for each byte, special tokens, and other added ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<eos>", *special)])
    backend.add_tokens([AddedToken(text, normalized=False) for text in other])
    return Tokenizer(backend)


@functools.cache
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary.of(tokenizer, tokenizer.vocab_size, [tokenizer.get_vocab()["<eos>"]])


def accepts(constraint: Any, text: str, tokenizer: Tokenizer) -> bool:
    """Whether a whole text satisfies a constraint."""
    known = vocabulary(tokenizer)
    matcher = LLMatcher(known.table, grammar_text(constraint, known.split), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def tokenizer_for(name: str) -> Tokenizer:
    """One with the markers of a format among its tokens."""
    special = FORMATS[name][-1]
    return bytes_tokenizer(special, () if special else ("<tool_call>", "</tool_call>"))


def constraint_for(name: str, choice: ToolChoice = REQUIRED, parallel: bool = True, **options: Any) -> Any:
    dialect = TOOL_DIALECTS[FORMATS[name][0]]
    return tool_constraint(TOOLS, choice, parallel, dialect, tokenizer=tokenizer_for(name), **options)


def written(name: str, *calls: tuple[str, str]) -> str:
    _, before, call, between, after, _ = FORMATS[name]
    return before + between.join(call % one for one in calls) + after


ALL = pytest.mark.parametrize("name", FORMATS)


@ALL
def test_calls_in_the_models_format_are_accepted_and_read_back(name: str) -> None:
    dialect, tokenizer = TOOL_DIALECTS[FORMATS[name][0]], tokenizer_for(name)
    for calls in ([ROME], [PARIS, TIME, ROME]):
        text = written(name, *calls)
        assert accepts(constraint_for(name), text, tokenizer), text
        parser = StreamParser(dialect, tools=TOOLS, forced=True, special_tokens=special_tokens_of(tokenizer))
        message = sum_of([*parser.feed(text), *parser.finish()])
        assert (message.calls, message.content) == (calls, "")


@ALL
def test_what_is_no_call_is_refused(name: str) -> None:
    tokenizer = tokenizer_for(name)
    constraint = constraint_for(name)
    assert not accepts(constraint, "", tokenizer)
    assert not accepts(constraint, "Hello", tokenizer)
    assert not accepts(constraint, written(name, ("get_stock", "{}")), tokenizer)
    assert not accepts(constraint, written(name, ("get_weather", '{"city": "Oslo"}')), tokenizer)
    assert not accepts(constraint, written(name, ("get_weather", '{"days": 3}')), tokenizer)
    assert not accepts(constraint, written(name, ("get_weather", '{"city": "Rome"')), tokenizer)
    assert not accepts(constraint, written(name, ROME) + "x", tokenizer)


@ALL
def test_a_named_tool_is_called_once(name: str) -> None:
    tokenizer = tokenizer_for(name)
    constraint = constraint_for(name, WEATHER)
    assert accepts(constraint, written(name, ROME), tokenizer)
    assert not accepts(constraint, written(name, TIME), tokenizer)
    assert not accepts(constraint, written(name, ROME, PARIS), tokenizer)


@ALL
def test_without_parallel_calls_there_is_one(name: str) -> None:
    tokenizer = tokenizer_for(name)
    constraint = constraint_for(name, parallel=False)
    assert accepts(constraint, written(name, TIME), tokenizer)
    assert not accepts(constraint, written(name, TIME, TIME), tokenizer)


def test_harmony_may_think_before_it_calls() -> None:
    tokenizer = bytes_tokenizer(ALL_SPECIAL)
    dialect, reasoning = TOOL_DIALECTS["openai"], REASONING_DIALECTS["openai_gptoss"]
    constraint = tool_constraint(TOOLS, REQUIRED, True, dialect, reasoning=reasoning, tokenizer=tokenizer)
    assert constraint is not None and constraint.start_after_token_ids is None
    thought = '<|channel|>analysis<|message|>Hm,\n "{<x.<|end|><|start|>assistant'
    assert accepts(constraint, HARMONY % ROME, tokenizer)
    assert accepts(constraint, thought + HARMONY % ROME, tokenizer)
    assert not accepts(constraint, thought, tokenizer)
    assert not accepts(constraint, "<|channel|>final<|message|>Hello", tokenizer)
    parser = StreamParser(dialect, reasoning, tools=TOOLS, forced=True)
    message = sum_of([*parser.feed(thought + HARMONY % ROME), *parser.finish()])
    assert (message.reasoning, message.calls) == ('Hm,\n "{<x.', [ROME])


@pytest.mark.parametrize(
    ("reasoning", "prompt", "waits"),
    [
        (None, "", False),
        ("qwen3", "<|im_start|>assistant\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("deepseek_r1", "", True),
        ("think", "", False),
        ("think", "assistant<think>\n", True),
    ],
)
def test_the_constraint_waits_for_the_end_of_reasoning(reasoning: str | None, prompt: str, waits: bool) -> None:
    tokenizer = bytes_tokenizer(("</think>",))
    dialect = REASONING_DIALECTS[reasoning] if reasoning else None
    constraint = tool_constraint(
        TOOLS, REQUIRED, True, TOOL_DIALECTS["hermes"], reasoning=dialect, tokenizer=tokenizer, prompt_text=prompt
    )
    assert constraint is not None
    assert accepts(constraint, "\n\n" + HERMES % TIME, tokenizer) == waits
    assert accepts(constraint, HERMES % TIME, tokenizer)
    assert constraint.start_after_token_ids == ((tokenizer.convert_token_to_id("</think>"),) if waits else None)


def test_the_constraint_waits_for_the_marker_that_closes_what_the_prompt_opened() -> None:
    tokenizer = bytes_tokenizer(("</ifm|think>", "</ifm|think_fast>"))
    for name in ("think", "think_fast"):
        after = start_after_token_ids(REASONING_DIALECTS["k2_horizon"], tokenizer, f"assistant<ifm|{name}>")
        assert after == (tokenizer.convert_token_to_id(f"</ifm|{name}>"),)


STRICT = tuple(dataclasses.replace(tool, strict=True) for tool in TOOLS)
MARKED = [name for name in FORMATS if not name.startswith(("plain", "llama"))]


@pytest.mark.parametrize("name", MARKED)
def test_strict_tools_leave_text_free_and_calls_right(name: str) -> None:
    dialect, tokenizer = TOOL_DIALECTS[FORMATS[name][0]], tokenizer_for(name)
    constraint = tool_constraint(STRICT, ToolChoice("auto"), True, dialect, tokenizer=tokenizer)
    assert accepts(constraint, "Hello, a < b {", tokenizer)
    assert accepts(constraint, written(name, ROME), tokenizer)
    assert accepts(constraint, "I look.\n" + written(name, ROME, TIME), tokenizer)
    assert not accepts(constraint, written(name, ("get_weather", '{"city": "Oslo"}')), tokenizer)
    assert not accepts(constraint, "So: " + written(name, ("get_stock", "{}")), tokenizer)


def test_tools_that_are_not_strict_take_any_object_beside_strict_ones() -> None:
    tools = (dataclasses.replace(TOOLS[0], strict=False), STRICT[1])
    constraint = tool_constraint(tools, ToolChoice("auto"), True, TOOL_DIALECTS["hermes"], tokenizer=tokenizer_for("hermes"))
    assert accepts(constraint, HERMES % ("get_weather", '{"town": 3}'), tokenizer_for("hermes"))
    assert not accepts(constraint, HERMES % ("get_time", '{"town": 3}'), tokenizer_for("hermes"))


@pytest.mark.parametrize(
    ("dialect", "reasoning"), [("llama3_json", None), ("pythonic", None), ("openai", "openai_gptoss"), ("hermes", "think")]
)
def test_strict_tools_are_free_where_no_marker_tells_a_call_from_text(dialect: str, reasoning: str | None) -> None:
    thinking = REASONING_DIALECTS[reasoning] if reasoning else None
    options: dict[str, Any] = {"reasoning": thinking, "tokenizer": bytes_tokenizer(())}
    assert tool_constraint(STRICT, ToolChoice("auto"), True, TOOL_DIALECTS[dialect], **options) is None


@pytest.mark.parametrize("choice", [ToolChoice("auto"), ToolChoice("none")])
def test_a_free_choice_has_no_constraint(choice: ToolChoice) -> None:
    assert tool_constraint(TOOLS, choice, True, TOOL_DIALECTS["hermes"]) is None


def test_a_model_without_a_tool_dialect_writes_plain_json() -> None:
    constraint = tool_constraint(TOOLS, WEATHER, True, None)
    assert accepts(constraint, f"[{LIST % PARIS}]", bytes_tokenizer(()))
    parser = StreamParser(None, tools=TOOLS, forced=True)
    assert sum_of([*parser.feed(f"[{LIST % PARIS}]"), *parser.finish()]).calls == [PARIS]


def test_hostile_texts_in_a_schema_stay_in_it() -> None:
    name = 'x"\n}start: "evil" %json {'
    tools = (
        Tool(
            "f",
            {"type": "object", "properties": {name: {"const": "\u2028'\\"}}, "required": [name], "additionalProperties": False},
        ),
    )
    constraint = tool_constraint(tools, REQUIRED, True, None)
    arguments = json.dumps({name: "\u2028'\\"}, ensure_ascii=False)
    assert accepts(constraint, f"[{LIST % ('f', arguments)}]", bytes_tokenizer(()))
    assert not accepts(constraint, "evil", bytes_tokenizer(()))


def test_schemas_that_are_too_large_together_are_refused() -> None:
    tools = [Tool(f"f{index}", {"type": "object", "properties": {"a": {"enum": ["x" * 3000]}}}) for index in range(100)]
    with pytest.raises(InvalidRequestError) as caught:
        tool_constraint(tools, REQUIRED, True, None)
    assert caught.value.param == "tools"

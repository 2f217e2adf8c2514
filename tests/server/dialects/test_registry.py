"""Selection of a model's dialects, by flags or by its chat template."""

import pytest

from server.dialects import REASONING_DIALECTS, TOOL_DIALECTS, by_name, find_dialect_names
from tests.server.dialects.test_constraint import bytes_tokenizer

TEMPLATES = {
    "<tools>{{ tools }}</tools> <tool_call>\\n{'name': <function-name>}": ("hermes", None),
    "<tool_call> {% if enable_thinking is false %}<think>\\n\\n</think>{% endif %}": ("hermes", "qwen3"),
    "<tool_call>\\n<function=example>\\n<parameter=a>": ("qwen3_coder", None),
    "<|start_header_id|> {\"name\": function name, \"parameters\": dictionary} <|python_tag|>": ("llama3_json", None),
    "[TOOL_CALLS] [THINK]": ("mistral", "mistral"),
    "<|channel|>analysis<|message|>": ("openai", "openai_gptoss"),
    "<｜Assistant｜><｜tool▁calls▁begin｜> ```json </think>": ("deepseek_v3", "deepseek_r1"),
    "<｜Assistant｜>{% if thinking %}<think>{% else %}</think>{% endif %}<｜tool▁calls▁begin｜>": ("deepseek_v31", "deepseek_v3"),
    "<tool_call>{{ name }}<arg_key> </think>{% if enable_thinking %}": ("glm45", "glm45"),
    "<|tool_calls_section_begin|>": ("kimi_k2", None),
    "Here is my thought process: ...": (None, "granite"),
    "[INST] {{ message.content }} [/INST]": (None, None),
    "": (None, None),
}  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_shows_its_dialects(template: str) -> None:
    assert find_dialect_names(template) == TEMPLATES[template]
    assert find_dialect_names(template) == TEMPLATES[template]


def test_no_template_shows_nothing() -> None:
    assert find_dialect_names(None, None) == (None, None)


def test_unknown_names_are_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="--tool-call-parser hermse is unknown; known are .*hermes"):
        by_name("hermse")
    with pytest.raises(ValueError, match="--reasoning-parser"):
        by_name(None, "hermes")


def test_markers_that_are_special_tokens_must_stay_in_the_text() -> None:
    plain, special = bytes_tokenizer(()), bytes_tokenizer(("<tool_call>",))
    assert TOOL_DIALECTS["hermes"].needs_special_tokens(special)
    assert not TOOL_DIALECTS["hermes"].needs_special_tokens(plain)
    assert not TOOL_DIALECTS["mistral"].needs_special_tokens(special)
    assert not TOOL_DIALECTS["hermes"].needs_special_tokens(None)


def test_markers_of_reasoning_that_are_special_tokens_must_stay_too() -> None:
    tokenizer = bytes_tokenizer(("<|channel|>", "[THINK]"))
    needing = [name for name, dialect in REASONING_DIALECTS.items() if dialect.needs_special_tokens(tokenizer)]
    assert needing == ["mistral", "openai_gptoss"]

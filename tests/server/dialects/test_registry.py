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
    "<|START_THINKING|><|END_THINKING|><|START_ACTION|>[": ("cohere_command3", "cohere_command3"),
    "{% set dsml = '｜DSML｜' %}{{ '<' + dsml + 'function_calls>' }} </think>": ("deepseek_v32", "deepseek_v4"),
    "<｜Assistant｜></think><｜DSML｜tool_calls>": ("deepseek_v4", "deepseek_v4"),
    "<｜DSML｜ calls>": ("deepseek_v41", None),
    "<|tool_list_start|>{{ tools }}<|tool_list_end|>": ("lfm2", None),
    "<longcat_tool_call>": ("longcat", None),
    "<functions>{{ functions }}</functions><function_calls>": ("olmo3", None),
    "You are MiMo <function=a>\\n<parameter=b>value_1</parameter>": ("mimo", None),
    "<think>\\n</think> <answer> <tool_calls> <|extra_0|>": ("hunyuan_a13b", "hunyuan_a13b"),
    "<tool_call></tool_call> </think><response>": ("hermes", "ernie45"),
    "<|start_of_role|> <|tool_call|> <think></think> <response></response>": ("granite", "granite33"),
    "<function name=\"function-name\"><param name=\"param-name\"> {{ content.split('<tool_sep>') }} <think></think>": ("minicpm5", "think"),
    "<|tools_prefix|>[{{ call }}]<|tools_suffix|>": ("apertus", None),
    "<|tool_call>call:{{ name }}{ <|channel>thought\\n<channel|>": ("gemma4", "gemma4"),
    "<start_function_call>call:{{ name }}{": ("functiongemma", None),
    "<dots_function_call>\\n<invoke name=": ("dots", None),
    "{% set ns = ']<]minimax[>[' %}{{ ns + '<tool_call>' }} <mm:think>": ("minimax_m3", "minimax_m3"),
    "<|open|>tools<|sep|><|open|>call": ("kimi_k3", "kimi_k3"),
    "<TOOLCALL>{{ call }}</TOOLCALL>": ("nemotron_json", None),
    "<ifm|think><ifm|tool_calls><ifm|tool_call><ifm|arg_key>": ("k2_horizon", "k2_horizon"),
    "<tool_call:{{ suffix }}>{{ name }}<tool_sep:{{ suffix }}><arg_key:{{ suffix }}></think:": ("hy_v3", "hy_v3"),
    "[INST] {{ message.content }} [/INST]": (None, None),
    "": (None, None),
}  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_shows_its_dialects(template: str) -> None:
    assert find_dialect_names(template) == TEMPLATES[template]


def test_a_token_shows_the_dialect_of_a_template_that_takes_tools() -> None:
    assert find_dialect_names("{{ tools }}", bytes_tokenizer(("<|tool_call_start|>",))) == ("lfm2", None)
    assert find_dialect_names("{{ messages }}", bytes_tokenizer(("<|tool_call_start|>",))) == (None, None)


def test_no_template_shows_nothing() -> None:
    assert find_dialect_names(None, None) == (None, None)


def test_unknown_names_are_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="--tool-call-parser hermse is unknown; known are .*hermes"):
        by_name("hermse")
    with pytest.raises(ValueError, match="--reasoning-parser"):
        by_name(None, "hermes")
    with pytest.raises(ValueError, match="--tool-call-parser gemma3 is unknown; known are .*gemma4"):
        by_name("gemma3")


def test_markers_that_are_special_tokens_must_stay_in_the_text() -> None:
    plain, special = bytes_tokenizer(()), bytes_tokenizer(("<tool_call>",))
    assert TOOL_DIALECTS["hermes"].needs_special_tokens(special)
    assert not TOOL_DIALECTS["hermes"].needs_special_tokens(plain)
    assert not TOOL_DIALECTS["mistral"].needs_special_tokens(special)
    assert not TOOL_DIALECTS["hermes"].needs_special_tokens(None)
    assert TOOL_DIALECTS["deepseek_v4"].needs_special_tokens(
        bytes_tokenizer(("｜DSML｜",))
    )  # the token is a part of its markers


def test_markers_of_reasoning_that_are_special_tokens_must_stay_too() -> None:
    tokenizer = bytes_tokenizer(("<|channel|>", "[THINK]"))
    needing = [name for name, dialect in REASONING_DIALECTS.items() if dialect.needs_special_tokens(tokenizer)]
    assert needing == ["hf", "mistral", "openai_gptoss"]  # patterns of hf's template may have any of them

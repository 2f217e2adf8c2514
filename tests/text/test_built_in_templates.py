"""Templates of models without one in their checkpoints."""

import json
from types import SimpleNamespace

import pytest

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.request_processor import load_texts
from jaxllm.text.built_in_templates import built_in_template
from jaxllm.text.chat_template import ChatTemplateError, load_chat_template, render_chat
from jaxllm.vllm_compat.flags import translated
from tests.helpers.tiny_tokenizers import write_tokenizer

TOKENIZER = SimpleNamespace(chat_templates={}, special_tokens_map={})
TEMPLATE = load_chat_template("deepseek_v32")


def prompt(*messages, **options):
    return render_chat(TOKENIZER, messages, chat_template=TEMPLATE, **options)


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "é <b>", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "time"}},
]
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello", "reasoning_content": "A greeting."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "Two calls.",
        "tool_calls": [call("weather", place="Zürich", days=[1, {"a": None}], wet=True), call("time")],
    },
    {"role": "tool", "content": "rain"},
    {"role": "tool", "content": "noon"},
]
BEGIN = "<｜begin▁of▁sentence｜>"
CALLS = """\


<｜DSML｜function_calls>
<｜DSML｜invoke name="weather">
<｜DSML｜parameter name="place" string="true">Zürich</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">[1, {"a": null}]</｜DSML｜parameter>
<｜DSML｜parameter name="wet" string="false">true</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="time">

</｜DSML｜invoke>
</｜DSML｜function_calls><｜end▁of▁sentence｜>

<function_results>
<result>rain</result>
<result>noon</result>
</function_results>

"""


def test_a_conversation_of_deepseek_v32_with_reasoning_and_without():
    before = f"{BEGIN}Be brief.<｜User｜>Hi<｜Assistant｜></think>Hello<｜end▁of▁sentence｜><｜User｜>Weather?<｜Assistant｜>"
    assert prompt(*CONVERSATION) == f"{before}</think>{CALLS}</think>"
    for switch in ("thinking", "enable_thinking"):
        assert prompt(*CONVERSATION, **{switch: True}) == f"{before}<think>Two calls.</think>{CALLS}<think>"
    user = {"role": "developer", "content": "Go"}
    assert prompt(user) == f"{BEGIN}<｜User｜>\n\n# The user's message is: Go<｜Assistant｜></think>"
    assert prompt(user, {"role": "assistant", "content": "I"}, continue_final_message=True).endswith("</think>I")


def test_tools_of_deepseek_v32_stand_behind_the_first_system_message():
    tools = '<functions>\n{"name": "weather", "description": "é <b>", "parameters": {"type": "object"}}\n{"name": "time"}\n</functions>\n'
    with_system, without = (prompt(*messages, tools=TOOLS) for messages in (CONVERSATION[:2], CONVERSATION[1:2]))
    assert with_system.startswith(f"{BEGIN}Be brief.\n\n## Tools\n\nYou have access to")
    assert with_system.endswith(f"JSONSchema format:\n{tools}<｜User｜>Hi<｜Assistant｜></think>")
    assert without == with_system.replace("Be brief.", "")


def test_what_deepseek_v32_cannot_say_is_refused():
    with pytest.raises(ChatTemplateError, match="a tool message follows without a tool call for it"):
        prompt(*CONVERSATION, {"role": "tool", "content": "more"})
    with pytest.raises(ChatTemplateError, match="a tool message follows without a tool call for it"):
        prompt(*CONVERSATION[:-1], {"role": "user", "content": "So?"}, CONVERSATION[-1])
    with pytest.raises(ChatTemplateError, match="the role critic is unknown"):
        prompt({"role": "critic", "content": "Hm"})


def test_a_conversation_of_mistral_large_3():
    tokenizer = SimpleNamespace(chat_templates={}, special_tokens_map={"bos_token": "<s>", "eos_token": "</s>"})

    def written(*messages, **options):
        return render_chat(tokenizer, messages, chat_template=load_chat_template("mistral_large_3"), **options)

    assert written(*CONVERSATION) == (
        "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hi[/INST]Hello</s>[INST]Weather?[/INST]"
        '[TOOL_CALLS]weather[ARGS]{"place": "Zürich", "days": [1, {"a": null}], "wet": true}[TOOL_CALLS]time[ARGS]{}</s>'
        "[TOOL_RESULTS]rain[/TOOL_RESULTS][TOOL_RESULTS]noon[/TOOL_RESULTS]"
    )
    tools = f"[AVAILABLE_TOOLS]{json.dumps(TOOLS, ensure_ascii=False)}[/AVAILABLE_TOOLS]"
    user, calling = {"role": "user", "content": "Go"}, {**CONVERSATION[4], "tool_calls": [call("time")]}
    assert written(user, tools=TOOLS) == f"<s>{tools}[INST]Go[/INST]"
    found = written(CONVERSATION[0], user, user, calling, CONVERSATION[2], CONVERSATION[5], user, tools=TOOLS)
    assert found == (
        f"<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT]{tools}[INST]Go\n\nGo[/INST]\n\nHello[TOOL_CALLS]time[ARGS]{{}}</s>"
        "[TOOL_RESULTS]rain[/TOOL_RESULTS][INST]Go[/INST]"
    )
    assert written(user, {"role": "assistant", "content": "I"}, continue_final_message=True) == "<s>[INST]Go[/INST]I"
    with pytest.raises(ChatTemplateError, match="a tool message follows without a tool call for it"):
        written(user, CONVERSATION[5])
    with pytest.raises(ChatTemplateError, match="begins with a message of the system or the user"):
        written(CONVERSATION[2])
    with pytest.raises(ChatTemplateError, match="the role critic is unknown"):
        written({"role": "critic", "content": "Hm"})


def test_the_template_is_that_of_the_architecture_or_of_the_tokenizer_mode(tmp_path):
    write_tokenizer(tmp_path, chat_template=None)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DeepseekV32ForCausalLM"]}))

    def found(**options):
        return load_texts(EngineConfig.from_options(model=str(tmp_path), **options)).chat_template

    assert found() == TEMPLATE == built_in_template("deepseek_v32")
    assert found(chat_template="{{ messages }}") == "{{ messages }}"
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DeepseekV3ForCausalLM"]}))
    assert found() is None
    (tmp_path / "config.json").unlink()
    (tmp_path / "params.json").write_text('{"moe": {}, "kv_lora_rank": 8}')
    assert found() == built_in_template("mistral_large_3")
    assert found(**translated("tokenizer_mode", "deepseek_v32")) == TEMPLATE
    assert translated("tokenizer_mode", "auto") == {}
    with pytest.raises(ConfigError, match="tokenizer_mode='kimi_k3' is refused"):
        translated("tokenizer_mode", "kimi_k3")

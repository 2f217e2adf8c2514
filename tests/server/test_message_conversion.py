"""Anthropic's requests converted to chats, and a model's output converted to Anthropic's blocks and events."""

import json
from typing import Any

import pytest

from server.errors import ApiError
from server.messages.output import MessageWriter, stop_reason_of, usage_object
from server.messages.to_chat import chat_fields, enable_thinking
from server.protocol.anthropic import MessagesRequest


def fields_of(**given: Any) -> dict[str, Any]:
    body = {"max_tokens": 2000, "messages": [{"role": "user", "content": "hi"}], **given}
    return chat_fields(MessagesRequest.model_validate(body))


def messages_of(*messages: dict[str, Any], **given: Any) -> list[dict[str, Any]]:
    return fields_of(messages=list(messages), **given)["messages"]


def test_system_and_blocks_become_messages() -> None:
    system = [{"type": "text", "text": "be ", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "kind"}]
    assert messages_of({"role": "user", "content": [{"type": "text", "text": "hi"}]}, system=system) == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
    ]


def test_uses_and_results_of_tools_become_calls_and_answers() -> None:
    assistant = [
        {"type": "thinking", "thinking": "look", "signature": "x"},
        {"type": "text", "text": "wait"},
        {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "20"}]},
        {"type": "tool_result", "tool_use_id": "b", "content": "no such", "is_error": True},
        {"type": "text", "text": "go on"},
    ]
    found = messages_of(
        {"role": "user", "content": "q"}, {"role": "assistant", "content": assistant}, {"role": "user", "content": results}
    )
    call = found[1].pop("tool_calls")[0]
    assert (call["id"], json.loads(call["function"]["arguments"])) == ("a", {"x": 1})
    assert found == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "wait", "reasoning": "look"},
        {"role": "tool", "tool_call_id": "a", "content": "20"},
        {"role": "tool", "tool_call_id": "b", "content": "Error: no such"},
        {"role": "user", "content": "go on"},
    ]


def test_an_edit_that_clears_nothing_is_accepted() -> None:
    edit = {"type": "clear_thinking_20251015", "keep": "all"}
    assert fields_of(context_management={"edits": [edit]}) == fields_of()


def test_a_last_message_of_the_assistant_is_continued() -> None:
    user = {"role": "user", "content": "q"}
    fields = fields_of(messages=[user, {"role": "assistant", "content": "The answer is"}])
    assert (fields["continue_final_message"], fields["add_generation_prompt"]) == (True, False)
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    with pytest.raises(ApiError):
        fields_of(messages=[user, {"role": "assistant", "content": [use]}])


def test_fields_become_those_of_a_chat() -> None:
    schema = {"type": "object"}
    fields = fields_of(
        model="m",
        stop_sequences=["x"],
        temperature=0.5,
        top_k=3,
        tools=[{"name": "f", "description": "d", "input_schema": schema}],
        tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}},
    )
    del fields["messages"]
    assert fields == {
        "max_completion_tokens": 2000,
        "stream": False,
        "stop": ["x"],
        "temperature": 0.5,
        "top_k": 3,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema, "description": "d"}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}},
    }


TOOLS = [{"name": name, "input_schema": {}, "defer_loading": name != "search"} for name in ("search", "a", "b")]


def names_of(*content: dict[str, Any], role: str = "user", **given: Any) -> list[str]:
    """The names of the tools that the model sees after a message with these blocks."""
    messages = [{"role": "user", "content": "hi"}, {"role": role, "content": list(content)}]
    return [tool["function"]["name"] for tool in fields_of(**{"tools": TOOLS, "messages": messages, **given}).get("tools", ())]


def test_deferred_tools_are_shown_once_they_are_named() -> None:
    text = {"type": "text", "text": "x"}
    found = {"type": "tool_result", "tool_use_id": "s", "content": [text, {"type": "tool_reference", "tool_name": "b"}]}
    assert names_of(text) == ["search"]
    assert names_of(found) == ["search", "b"] and names_of({"type": "tool_reference", "name": "a"}) == ["search", "a"]
    assert names_of(text, tool_choice={"type": "tool", "name": "a"}) == ["search", "a"]
    assert names_of(text, tools=TOOLS[1:]) == ["a", "b"], "a model that sees no tool cannot search"
    assert "defer_loading" not in json.dumps(fields_of(tools=TOOLS))
    [_, result] = messages_of({"role": "user", "content": "hi"}, {"role": "user", "content": [found]})
    assert result == {"role": "tool", "tool_call_id": "s", "content": "x\nTools found: b"}


def test_system_messages_add_and_remove_tools() -> None:
    def change(kind: str, **tool: Any) -> dict[str, Any]:
        return {"type": f"tool_{kind}", "tool": {"type": "tool_reference", **tool}}

    defined = change("addition", type="tool_definition", definition={"name": "new", "input_schema": {}})
    assert names_of(change("addition", name="a"), role="system") == ["search", "a"]
    assert names_of(change("removal", name="search"), change("addition", name="b"), role="system") == ["b"]
    assert names_of(change("addition", name="a"), change("removal", name="a"), role="system") == ["search"]
    assert names_of(defined, role="system", tools=None) == ["new"]
    user = {"role": "user", "content": "hi"}
    assert messages_of(user, {"role": "system", "content": [defined]}) == [user]


@pytest.mark.parametrize(("choice", "means"), [("auto", "auto"), ("any", "required"), ("none", "none")])
def test_tool_choices_have_other_names(choice: str, means: str) -> None:
    assert fields_of(tool_choice={"type": choice})["tool_choice"] == means


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0]"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_addition"}]}]}, "messages[0].content[0].type"),
        (
            {
                "messages": [
                    {
                        "role": "system",
                        "content": [{"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}}],
                    }
                ]
            },
            "messages",
        ),
        (
            {"messages": [{"role": "system", "content": [{"type": "tool_addition", "tool": {"type": "tool_definition"}}]}]},
            "messages[0].content[0]",
        ),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(given: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        fields_of(**given)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("thinking", "means"),
    [
        (None, None),
        ({"type": "adaptive"}, None),
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "enabled"}, "wrong"),
        ({"type": "enabled", "budget_tokens": 2000}, "wrong"),
    ],
)
def test_thinking_is_asked_of_the_template(thinking: Any, means: Any) -> None:
    body = {"max_tokens": 2000, "messages": [{"role": "user", "content": "hi"}], "thinking": thinking}
    request = MessagesRequest.model_validate(body)
    if means != "wrong":
        assert enable_thinking(request) is means
        return
    with pytest.raises(ApiError) as caught:
        enable_thinking(request)
    assert caught.value.param == "thinking"


def new_writer(**options: bool) -> MessageWriter:
    return MessageWriter({"id": "msg_1", "content": [], "stop_reason": None, "usage": {}}, **options)


def added_up(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks as a client makes them of the events."""
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            texts.append("")
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            delta = event["delta"]
            if delta["type"] == "signature_delta":
                blocks[-1]["signature"] = delta["signature"]
            else:
                texts[-1] += delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
    for block, text in zip(blocks, texts, strict=True):
        name = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]
        block[name] = json.loads(text) if name == "input" else text
    return blocks


def test_thoughts_words_and_calls_are_blocks_in_their_order() -> None:
    writer = new_writer()
    events = writer.start() + writer.reasoning("h") + writer.reasoning("m") + writer.text("so")
    events += (
        writer.call("a", "f")
        + writer.arguments('{"x"')
        + writer.arguments(": 1}")
        + writer.call("b", "g")
        + writer.arguments("{}")
    )
    events += writer.finish(stop_reason="tool_use", stop_sequence=None, usage=usage_object(10, 4, 3))
    assert [block["type"] for block in writer.message["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert writer.message["content"] == added_up(events)
    assert writer.message["content"][2] == {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}
    assert events[-2]["usage"] == {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 3,
    }
    assert events[-1] == {"type": "message_stop"}
    starts = [event["index"] for event in events if event["type"] == "content_block_start"]
    assert starts == [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1, 2, 3]


def test_an_omitted_thought_keeps_its_signature_alone() -> None:
    writer = new_writer(omit_thinking=True)
    events = writer.reasoning("secret") + writer.text("x")
    assert "secret" not in json.dumps(events)
    [thought] = [block for block in writer.message["content"] if block["type"] == "thinking"]
    assert thought["thinking"] == "" and thought["signature"]


def test_arguments_that_are_no_object_become_an_empty_one() -> None:
    for text in ("", "[1]", "{", "[" * 100_000):
        writer = new_writer()
        writer.call("a", "f")
        writer.arguments(text)
        writer.finish(stop_reason="tool_use", stop_sequence=None, usage={})
        assert writer.message["content"][0]["input"] == {}


@pytest.mark.parametrize(
    ("finish", "stop", "filled", "means"),
    [
        ("stop", None, False, ("end_turn", None)),
        ("stop", "END", False, ("stop_sequence", "END")),
        ("stop", 7, False, ("end_turn", None)),
        ("length", None, False, ("max_tokens", None)),
        ("length", None, True, ("model_context_window_exceeded", None)),
        ("tool_calls", None, False, ("tool_use", None)),
    ],
)
def test_why_an_answer_ended_has_anthropics_names(finish: str, stop: Any, filled: bool, means: Any) -> None:
    assert stop_reason_of(finish, stop, filled_context=filled) == means

from typing import Any

import pytest

from server.errors import ApiError
from server.protocol.responses import ResponsesRequest
from server.responses.items import as_items, as_messages
from server.responses.to_chat import chat_fields, check


def messages_of(given: Any, instructions: str | None = None) -> list[dict[str, Any]]:
    return as_messages(as_items(given), instructions)


def test_a_text_is_a_users_message() -> None:
    assert messages_of("hi") == [{"role": "user", "content": "hi"}]


def test_what_the_assistant_did_in_a_row_is_one_message() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "how "}, {"type": "input_text", "text": "warm?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "look"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "wait", "annotations": []}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "a", "output": "20"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "30"}]},
    ]
    assert messages_of(items) == [
        {"role": "user", "content": "how warm?"},
        {
            "role": "assistant",
            "reasoning": "look",
            "content": "wait",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "20"},
        {"role": "tool", "tool_call_id": "b", "content": "30"},
    ]


def test_a_second_answer_in_a_row_is_a_message_of_its_own() -> None:
    said = [{"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two"}]
    assert messages_of(said) == said


def test_instructions_join_the_system_message_that_comes_first() -> None:
    items = [{"role": "developer", "content": "b"}, {"role": "user", "content": "c"}]
    assert messages_of(items, "a") == [{"role": "system", "content": "a\n\nb"}, {"role": "user", "content": "c"}]
    assert messages_of("c", "a") == [{"role": "system", "content": "a"}, {"role": "user", "content": "c"}]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        (5, "input[1]"),
        ({"type": "item_reference", "id": "x"}, "input[1].type"),
        ({"type": [], "id": "x"}, "input[1].type"),
        ({"role": "wizard", "content": "x"}, "input[1]"),
        ({"role": "user"}, "input[1]"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}, "input[1].content[0].type"),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}, "input[1].content[0].file_id"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": {"url": "x"}}]}, "input[1].content[0].image_url"),
        ({"type": "reasoning", "content": [{"type": "input_image", "image_url": "x"}]}, "input[1].content[0].type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[1].content[0].text"),
        ({"type": "function_call", "call_id": "", "name": "f", "arguments": "{}"}, "input[1]"),
        ({"type": "function_call_output", "call_id": "a", "output": 3}, "input[1]"),
        ({"type": "reasoning", "content": [{"type": "zzz"}]}, "input[1].content[0].type"),
    ],
)
def test_a_wrong_item_is_named(item: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        as_items([{"role": "user", "content": "x"}, item])
    assert (caught.value.status, caught.value.param) == (400, param)


def fields_of(**given: Any) -> dict[str, Any]:
    request = ResponsesRequest.model_validate({"input": "hi", **given})
    check(request)
    return chat_fields(request, as_items(request.input))


def test_fields_become_those_of_a_chat() -> None:
    schema = {"type": "object"}
    fields = fields_of(
        max_output_tokens=5,
        temperature=0.5,
        seed=3,
        logit_bias={"5": 1.0},
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        tools=[{"type": "function", "name": "f", "parameters": schema, "strict": True}],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        top_logprobs=2,
    )
    assert fields == {
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "seed": 3,
        "logit_bias": {"5": 1.0},
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "logprobs": True,
        "top_logprobs": 2,
    }


@pytest.mark.parametrize(
    "given",
    [
        {"include": ["file_search_call.results"]},
        {"stream_options": {"include_obfuscation": True}, "stream": True},
        {"stream_options": {}},
        {"reasoning": {"summary": "detailed"}},
        {"metadata": {"x": "y" * 513}},
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "function"}]},
        {"tool_choice": {"type": "hosted"}},
        {"tool_choice": {"type": "allowed_tools", "mode": "auto"}},
        {"tool_choice": {"type": "allowed_tools", "mode": "any", "tools": [{"type": "function", "name": "f"}]}},
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]}},
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        fields_of(**given)
    assert caught.value.status == 400
    assert (caught.value.param or "").partition("[")[0] in given

"""The events of a response, and that what they add up to is the response."""

import json
from typing import Any

import pytest

from server.responses.output import ResponseWriter


def new_writer() -> ResponseWriter:
    return ResponseWriter({"id": "resp_1", "status": "in_progress", "output": [], "error": None, "incomplete_details": None})


def added_up(events: list[dict[str, Any]]) -> list[Any]:
    """The output items as a client makes them of the deltas."""
    items: list[Any] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append({"type": event["item"]["type"], "id": event["item"]["id"], "text": ""})
        elif kind.endswith(".delta"):
            item = items[event["output_index"]]
            assert item["id"] == event["item_id"]
            item["text"] += event["delta"]
        elif kind == "response.output_item.done":
            item, done = items[event["output_index"]], event["item"]
            text = done.get("arguments", done.get("input"))
            text = done["content"][0]["text"] if text is None else text
            assert (item["id"], item["text"]) == (done["id"], text)
            items[event["output_index"]] = done
    return items


@pytest.mark.parametrize("text", ['a\n"b"\\ é 😀\t', "", "\\", "💥" * 3, "\x00\x7f"])
@pytest.mark.parametrize("is_ascii", [True, False])
def test_the_input_of_a_custom_tool_is_read_however_its_arguments_are_cut(text: str, is_ascii: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    for size in (1, 2, 3, 5, len(arguments)):
        writer = ResponseWriter({"output": []}, ["patch"])
        events = writer.call(0, "call_1", "patch")
        for start in range(0, len(arguments), size):
            events += writer.arguments(0, arguments[start : start + size])
        events += writer.finish(usage={})
        [item] = added_up(events)
        assert item == writer.response["output"][0] and item["input"] == text and item["status"] == "completed"
        assert item["type"] == "custom_tool_call" and item["id"].startswith("ctc_")
        assert [event["input"] for event in events if event["type"] == "response.custom_tool_call_input.done"] == [text]


def test_arguments_of_another_form_and_cut_ones_are_input_too() -> None:
    for arguments, cut, wanted in (
        ('{"city": 1}', None, '{"city": 1}'),
        ("plain", None, "plain"),
        ('{"input": "a\\u00', "max_output_tokens", "a"),
        ('{"input": "\\ud83d"}', None, "\ufffd"),
    ):
        writer = ResponseWriter({"output": []}, ["patch"])
        events = [*writer.call(0, "c", "patch"), *writer.arguments(0, arguments)]
        events += writer.finish(usage={}, incomplete_reason=cut)
        assert added_up(events)[0]["input"] == wanted


def test_a_whole_message_has_the_events_that_clients_expect() -> None:
    writer = new_writer()
    events = [*writer.start(), *writer.text("a"), *writer.text("b"), *writer.finish(usage={})]
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["response"]["output"] == []
    assert events[-1]["response"]["output"][0]["content"] == [
        {"type": "output_text", "text": "ab", "annotations": [], "logprobs": []}
    ]


def test_reasoning_words_and_calls_are_items_in_their_order() -> None:
    writer = new_writer()
    events = writer.start()
    events += writer.reasoning("hm") + writer.reasoning("m") + writer.text("so")
    events += (
        writer.call(0, "call_1", "f")
        + writer.arguments(0, '{"a"')
        + writer.arguments(0, ": 1}")
        + writer.call(1, "call_2", "g")
    )
    events += writer.arguments(1, "{}") + writer.text("done") + writer.finish(usage={})
    output = writer.response["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call", "message"]
    assert output == added_up(events) == events[-1]["response"]["output"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "hmm"}]
    assert [(item["call_id"], item["name"], item["arguments"]) for item in output[2:4]] == [
        ("call_1", "f", '{"a": 1}'),
        ("call_2", "g", "{}"),
    ]
    assert {item["status"] for item in output} == {"completed"}
    kinds = [event["type"] for event in events]
    assert kinds.count("response.function_call_arguments.done") == 2
    assert kinds.count("response.reasoning_text.done") == 1


def test_an_answer_that_was_cut_is_incomplete() -> None:
    writer = new_writer()
    events = [*writer.text("a"), *writer.finish(usage={}, incomplete_reason="max_output_tokens")]
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert writer.response["output"][0]["status"] == "incomplete"


def test_a_failure_keeps_what_was_said() -> None:
    writer = new_writer()
    events = [*writer.text("a"), *writer.fail("broke")]
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "broke"}
    assert writer.response["output"][0]["content"][0]["text"] == "a"


def test_events_that_were_told_do_not_change_later() -> None:
    writer = new_writer()
    first = writer.text("a")
    shown = repr(first)
    writer.text("b")
    writer.finish(usage={})
    assert repr(first) == shown

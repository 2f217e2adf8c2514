"""Lists the items that a stored response answered, page by page."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from server.errors import bad_request

Order = Literal["asc", "desc"]
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
"""Prefixes of ids, by type of item."""


def with_ids(items: Iterable[dict[str, Any]], response_id: str) -> list[dict[str, Any]]:
    """Items as clients see them: with ids, which those of requests lack, and with texts as parts."""
    number = response_id.removeprefix("resp_")
    return [_shown(item, f"{_PREFIXES[item['type']]}_{number}_{place}") for place, item in enumerate(items)]


def _shown(item: dict[str, Any], id: str) -> dict[str, Any]:
    shown = {"id": id, "status": "completed", **item}
    if item["type"] == "message" and isinstance(text := item["content"], str):
        is_answer = item["role"] == "assistant"
        part = {"type": "output_text", "text": text, "annotations": []} if is_answer else {"type": "input_text", "text": text}
        shown["content"] = [part]
    return shown


def page_of(items: Sequence[dict[str, Any]], *, after: str | None, limit: int, order: Order) -> dict[str, Any]:
    """At most `limit` items in an order (desc: the latest first), behind the one with the id `after`. Raises ApiError."""
    ordered = items if order == "asc" else items[::-1]
    first = 0
    if after is not None:
        first = next((place for place, item in enumerate(ordered, 1) if item["id"] == after), 0)
        if not first:
            raise bad_request(f"after is {after[:100]!r}, which is no item of this response", "after")
    page = ordered[first : first + limit]
    ends = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    has_more = first + limit < len(ordered)
    return {"object": "list", "data": list(page), "first_id": ends[0], "last_id": ends[1], "has_more": has_more}

"""Answers as a checkpoint describes them: `response_template` in tokenizer_config.json, which the parser of transformers reads."""

import copy
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from server.dialects.dialect import ReasoningDialect, ToolDialect, to_json
from server.dialects.json_scanner import Broken
from server.dialects.reader import SPACE, Reading

if TYPE_CHECKING:
    from server.dialects.stream_parser import StreamParser

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of the field of the reasoning in templates."""
CALLS_FIELD = "tool_calls"
_UNREADABLE = (ValueError, RecursionError)
"""Errors of reading JSON: its text is none, or is nested too deep."""


class TemplateCalls(ToolDialect):
    """Tool calls in the field `tool_calls` of a response template. Forced calls are plain JSON."""

    def of(self, tokens: Collection[str], response_template: Mapping[str, Any] | None = None) -> ToolDialect:
        bound = TemplateCalls()
        bound.whole = partial(read_response, checked(response_template, "--tool-call-parser hf"))
        return bound

    def needs_special_tokens(self, tokenizer: Any) -> bool:
        return True  # as a template's patterns may have any of them


class TemplateReasoning(ReasoningDialect):
    """Reasoning in a field of a response template."""

    def of(self, tokens: Collection[str], response_template: Mapping[str, Any] | None = None) -> ReasoningDialect:
        template = checked(response_template, "--reasoning-parser hf")
        field: Mapping[str, Any] = next((field for name, field in template["fields"].items() if name in REASONING_FIELDS), {})
        starts, ends = _literals(field.get("open")), _literals(field.get("close"))
        markers = ((*starts,), (ends[0],) * len(starts)) if ends else ((), ())
        return replace(self, start=markers[0], end=markers[1], whole=partial(read_response, template))

    def needs_special_tokens(self, tokenizer: Any) -> bool:
        return True


def is_usable(template: Mapping[str, Any] | None) -> bool:
    """Whether answers can be read by a model's response template."""
    try:
        return bool(template) and bool(checked(template, ""))
    except ValueError:
        return False


def checked(template: Mapping[str, Any] | None, option: str) -> Mapping[str, Any]:
    """A response template that the parser takes. Raises ValueError that says what to do."""
    if not template:
        raise ValueError(
            f"{option} reads answers by the response_template in tokenizer_config.json, and this model has none; name the format, or "
            "pass none"
        )
    try:
        _parser(template, "", ())
    except ImportError as error:
        told = f"{option} needs a transformers that has transformers.utils.chat_parsing: {error}; pip install -U transformers"
        raise ValueError(told) from error
    except Exception as error:  # whatever is wrong with the template
        raise ValueError(f"{option}: the response_template in tokenizer_config.json cannot be used: {error}") from error
    return template


def read_response(
    template: Mapping[str, Any], parser: "StreamParser", prompt_text: str, calls: bool, reasons: bool
) -> Reading[None]:
    """Read an answer. Without `calls` or `reasons` the text of these fields is content, with its markers."""
    left_out = {*(() if calls else (CALLS_FIELD,)), *(() if reasons else REASONING_FIELDS)}
    fields = {name: {**field, "optional": True} for name, field in template["fields"].items() if name not in left_out}
    response = _Response({**template, "fields": fields}, parser, prompt_text)
    while (yield from parser.peek()):
        response.feed(parser.take_all())
    response.finish()
    parser.end_content()


class _Response:
    """Turns the events of transformers' parser into deltas."""

    def __init__(self, template: Mapping[str, Any], parser: "StreamParser", prompt_text: str):
        self._template, self._out = template, parser
        self._tools = [{"name": tool.name, "parameters": tool.parameters} for tool in parser.tools.values()]
        self._visible = parser.hidden_tokens()
        self._raw: list[str] = []  # the current call's text
        self._held: str | None = None  # white space that is reasoning if reasoning follows; None before reasoning
        try:
            self._parser = _parser(template, prompt_text, self._tools)
        except ValueError:  # a message to be continued has a broken call
            self._parser = _parser(template, "", self._tools)
        for event in self._parser.initial_events:
            if event["field"] in REASONING_FIELDS:
                parser.in_reasoning = event["type"] != "region_close"
                if not parser.in_reasoning:
                    parser.end_reasoning()

    def feed(self, text: str) -> None:
        """Read the next piece."""
        before = copy.copy(self._parser)  # as an exception takes the events before it along
        try:
            events = self._parser.feed(text)
        except Exception:  # templates fail in as many ways as what models write
            if len(text) > 1:
                self._parser = before
                self.feed(text[: len(text) // 2])
                self.feed(text[len(text) // 2 :])
            elif unread := self._start_over():
                self.feed(unread)
            return
        for event in events:
            self._pass_on(event)

    def finish(self) -> None:
        """End of the text."""
        try:
            _, events = self._parser.finalize()
        except Exception:  # cut off within a call
            if unread := self._start_over():
                self.feed(unread)
                self.finish()
            return
        for event in events:
            self._pass_on(event)

    def _start_over(self) -> str:
        """Give back the call that cannot be read, and read what follows it as from the beginning. Returns what has arrived of that: a
        pattern may find the end of a call only with the text behind it."""
        failed = self._parser
        self._raw = [failed._body] if failed._current == CALLS_FIELD else []  # with text of which no event came
        self._give_back()
        self._parser = _parser(self._template, "", self._tools)
        unread: str = failed._buffer[failed._pos :]
        return unread

    def _pass_on(self, event: Mapping[str, Any]) -> None:
        kind, field = event["type"], event["field"]
        if field == CALLS_FIELD:
            if kind == "region_chunk":
                self._raw.append(event["text"])
            elif kind == "region_close":
                self._add_calls(event["value"])
            return
        reasons = field in REASONING_FIELDS
        if kind == "region_open" and reasons:
            self._out.in_reasoning = True
            self._out.begin_reasoning()
            self._held = None
        elif kind != "region_open":
            text = self._visible.add(event["text"]) if kind == "region_chunk" else self._visible.end()
            (self._add_reasoning if reasons else self._out.add_content)(text)
            if kind == "region_close" and reasons:
                self._out.end_reasoning()

    def _add_reasoning(self, text: str) -> None:
        text = text.lstrip(SPACE) if self._held is None else self._held + text
        body = text.rstrip(SPACE)
        self._out.add_reasoning(body)
        self._held = text[len(body) :] if body or self._held is not None else None

    def _add_calls(self, value: Any) -> None:
        try:
            found = [_call(call) for call in (value if isinstance(value, list) else [value])]
            for name, arguments, id in found:
                self._out.start_call(name, id)
                self._out.add_arguments(arguments)
                self._out.end_call()
                self._out.release(0)
        except Broken:
            self._give_back()
        self._raw.clear()

    def _give_back(self) -> None:
        """Text of a region that cannot be read is content, without its markers."""
        self._out.add_content("".join(self._raw))
        self._raw.clear()


def _call(value: Any) -> tuple[str, str, str | None]:
    """Name, arguments as JSON text, and id of a call. Raises Broken."""
    call = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(call, Mapping):
        raise Broken
    name, arguments = call.get("name"), call.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except _UNREADABLE:
            raise Broken from None
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise Broken
    id = value.get("id")
    return name, _arguments_json(arguments), id if isinstance(id, str) else None


def _arguments_json(arguments: Mapping[str, Any]) -> str:
    """Raises Broken for what JSON cannot express: Python reads NaN and numbers beyond a double, and writes what clients cannot read."""
    try:
        json.dumps(arguments, allow_nan=False)
        return to_json(arguments)
    except (*_UNREADABLE, TypeError):
        raise Broken from None


def _literals(given: str | Sequence[str] | None) -> Sequence[str]:
    return (given,) if isinstance(given, str) else given or ()


def _parser(template: Mapping[str, Any], prompt_text: str, tools: Iterable[dict[str, Any]]) -> Any:
    from transformers.utils.chat_parsing import ResponseParser  # needs seconds to import

    return ResponseParser(dict(template), prefix=prompt_text, tools=list(tools))

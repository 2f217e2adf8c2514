"""Splits a model's text into content, reasoning and tool calls while it arrives."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from server.dialects.deltas import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart
from server.dialects.dialect import ReasoningDialect, ToolDialect, is_encodable, random_letters
from server.dialects.json_calls import JSON_CALLS
from server.dialects.json_scanner import Broken
from server.dialects.markers import Remover, markers_of
from server.dialects.reader import MAX_NAME, SPACE, Ended, Reader, Reading
from server.dialects.tools import Tool

MAX_BROKEN_CALLS = 64
"""After this many openings that led to no call, the rest of an answer is content. So are calls after this many:"""
MAX_CALLS = 512


class StreamParser(Reader):
    """Parses one answer's text into deltas.

    `tools` are the request's; without a tool dialect no calls are found (tool_choice "none"). `forced`: `tool_constraint`
    forces calls. `special_tokens` are the model's; `drop_special_tokens` removes them from text that contains them.
    `hold_calls`: emit a call only when it is complete, so that a broken one becomes content as a whole; for answers that are
    not streamed. Without it, emitted fragments stay, and the rest becomes content.
    """

    def __init__(
        self,
        tool: ToolDialect | None = None,
        reasoning: ReasoningDialect | None = None,
        *,
        tools: Sequence[Tool] = (),
        forced: bool = False,
        parallel: bool = True,
        prompt_text: str = "",
        special_tokens: Iterable[str] = (),
        drop_special_tokens: bool = True,
        hold_calls: bool = False,
    ):
        super().__init__()
        if forced and (tool is None or tool.frame is None):
            tool = JSON_CALLS
        self.tools = {one.name: one for one in tools}
        self.num_calls = 0
        self.in_reasoning = False
        """Whether the text so far ends within reasoning."""
        self._tool, self._parallel, self._hold_calls, self._forced = tool, parallel, hold_calls, forced
        self._out: list[Delta] = []
        self._num_before_call: int | None = None  # deltas to emit, even if the current call fails
        self._num_given = 0  # emitted pieces of the current call
        self.is_bare = False
        """Whether the current call began without a marker, so it may be an answer that only looks like a call."""
        self._surplus = False  # the current call exceeds the limit
        self._num_broken = 0
        self._ids: set[str] = set()
        self._space: list[str] = []  # white space that is content only if content follows
        self._answer_ends: tuple[str, ...] = ()
        self._has_content = self._has_reasoning = self._after_reasoning = False
        special = frozenset(special_tokens)
        self._dropped = special if drop_special_tokens else frozenset()
        whole = tool.whole if tool is not None and tool.whole else reasoning.whole if reasoning is not None else None
        if whole is not None and not (forced and tool is JSON_CALLS):
            self._reading = whole(self, prompt_text, tool is not None, reasoning is not None)
        else:
            is_open = reasoning.state_after(prompt_text, special) if reasoning else None
            self._reading = self._read_answer(reasoning, is_open)
        next(self._reading, None)

    # For callers

    def feed(self, text: str) -> list[Delta]:
        """Parse the next piece of text. Returns the deltas that are certain by now."""
        self._add(text)
        self._resume()
        return self._ready()

    def finish(self) -> list[Delta]:
        """End of the text. Returns the remaining deltas."""
        self._over = True
        self._resume()
        return self._ready()

    def finish_reason(self, reason: str) -> str:
        """The finish reason to report: "tool_calls" in place of "stop" if there were calls."""
        return "tool_calls" if reason == "stop" and self.num_calls else reason

    def _resume(self) -> None:
        next(self._reading, None)

    def _ready(self) -> list[Delta]:
        end = len(self._out) if self._num_before_call is None else self._num_before_call
        ready, self._out = self._out[:end], self._out[end:]
        if self._num_before_call is not None:
            self._num_before_call = 0
        return ready

    # For dialects

    def check_name(self, name: str) -> None:
        """Raises Broken unless a call may have this name now. One without a marker must name a tool of the request."""
        is_name = 0 < len(name) <= MAX_NAME and is_encodable(name)
        if not is_name or self.num_calls == MAX_CALLS or (self.is_bare and self.tools and name not in self.tools):
            raise Broken

    def start_call(self, name: str, id: str | None = None) -> None:
        """Start a call of this name. Raises Broken if the name is not allowed."""
        self.check_name(name)
        self._surplus = self.num_calls > 0 and not self._parallel
        if not self._surplus:
            index = self.num_calls
            if not id or id in self._ids:
                id = self._tool.call_id(name, index)  # type: ignore[union-attr]
            if id in self._ids:
                id = f"call_{random_letters(24)}"
            self._ids.add(id)
            self._out.append(ToolCallStart(index, id, name))
            self.num_calls += 1
        self._num_given = self.num_read

    def add_arguments(self, text: str) -> None:
        """A fragment of the arguments' JSON text of the current call."""
        if text and not self._surplus:
            self._out.append(ToolCallArguments(self.num_calls - 1, text))
        self._num_given = self.num_read

    def end_call(self) -> None:
        """Complete the call: nothing that follows can change it."""
        self.mark()
        self._num_given = 0
        if self._num_before_call is not None:
            self._num_before_call = len(self._out)

    def add_content(self, text: str) -> None:
        """Emit content. White space next to calls and reasoning is left out.

        With forced calls there is no content: text that is not a call is the beginning of a truncated one.
        """
        if self._forced:
            return
        body = text.rstrip(SPACE)
        if not body:
            self._space.append(text)
            return
        before = "".join(self._space)
        if not self._has_content and (self.num_calls or self._after_reasoning):
            before, body = "", (before + body).lstrip(SPACE)
        self._out.append(Content(before + body))
        self._has_content = True
        self._space = [text[len(text.rstrip(SPACE)) :]]

    def begin_content(self) -> None:
        """Start another message of content, on a new line."""
        if self._has_content:
            self.add_content("\n")

    def hidden_tokens(self) -> Remover:
        """A remover of the special tokens that are left out of answers, for text that arrives in pieces."""
        return Remover(markers_of(*self._dropped))

    def begin_reasoning(self) -> None:
        """Start another message of reasoning, on a new line."""
        if self._has_reasoning:
            self.add_reasoning("\n")
        self._has_reasoning = True

    def end_reasoning(self) -> None:
        """The reasoning is over; content follows after white space."""
        self.in_reasoning, self._after_reasoning = False, True

    def add_reasoning(self, text: str) -> None:
        """Emit reasoning."""
        if text:
            self._out.append(Reasoning(text))

    def copy_visible_until(self, ends: Sequence[str], sink: Callable[[str], Any]) -> Reading[str | None]:
        """Pass text on up to the first of these markers, without special tokens. Returns the marker, or None at the end."""
        markers = markers_of(*ends, *self._answer_ends, *self._dropped)
        while True:
            marker = yield from self.copy_until(markers, sink)
            if marker is None or marker in ends:
                return marker
            if marker in self._answer_ends and marker not in self._dropped:
                self._space.append(marker)

    def read_calls(self, reading: Reading[None], *, already_read: str = "", bare: bool = False) -> Reading[None]:
        """Let a dialect read calls. Failed calls become content."""
        self.mark(already_read)
        self._num_given, self.is_bare, self._surplus = 0, bare, False
        num_calls = self.num_calls
        if self._hold_calls:
            self._num_before_call = len(self._out)
        try:
            yield from reading
        except (Broken, Ended) as fault:
            if self._num_before_call is not None and isinstance(fault, Broken):
                self.num_calls -= sum(isinstance(one, ToolCallStart) for one in self._out[self._num_before_call :])
                del self._out[self._num_before_call :]
                self._num_given = 0
            self._num_broken += self.num_calls == num_calls
        self._num_before_call = None
        self._give_back()

    def _give_back(self) -> None:
        rest = self.release(self._num_given)
        if rest:
            self.add_content(rest)

    # Whole answer

    def _read_answer(self, reasoning: ReasoningDialect | None, is_open: bool | None) -> Reading[None]:
        opening = None
        if reasoning is not None:
            if reasoning.in_content:
                yield from self._copy_reasoning(reasoning, is_open)
            else:
                opening = yield from self._read_reasoning(reasoning, is_open)
            if opening is None and reasoning.answer_start:
                yield from self._read_answer_start(reasoning)
        if self._tool is not None:
            yield from self._read_content(self._tool, opening)
        yield from self._copy_content()

    def _read_reasoning(self, dialect: ReasoningDialect, is_open: bool | None) -> Reading[str | None]:
        """Read the reasoning, if any. Returns the opening of a call that ended it."""
        self._after_reasoning = is_open is not None
        if is_open is False:
            return None
        self.in_reasoning = bool(is_open) or dialect.implied
        space = yield from self.space()
        marked = yield from self.first_of(dialect.start)
        self.in_reasoning = self._after_reasoning = self.in_reasoning or bool(marked)
        if not self.in_reasoning:
            self.add_content(space)
            return None
        calls = self._tool.openings if self._tool and self._tool.ends_reasoning else ()
        yield from self.space()
        held: list[str] = []

        def add(text: str) -> None:
            body = text.rstrip(SPACE)
            if body:
                self.add_reasoning("".join(held) + body)
                held.clear()
            held.append(text[len(body) :])

        marker = yield from self.copy_visible_until((*dialect.end, *calls), add)
        self.in_reasoning = False
        return marker if marker in calls else None

    def _copy_reasoning(self, dialect: ReasoningDialect, is_open: bool | None) -> Reading[None]:
        """Pass the reasoning on as content, with its start marker even if that is in the prompt."""
        if is_open is False:
            return
        yield from self.space()
        yield from self.first_of(dialect.start)
        self.add_content(dialect.start[0])
        self.add_content((yield from self.copy_visible_until(dialect.end, self.add_content)) or "")

    def _read_answer_start(self, dialect: ReasoningDialect) -> Reading[None]:
        """Skip the markers that open the answer."""
        space = yield from self.space()
        while (yield from self.first_of(dialect.answer_start)):
            self._answer_ends = dialect.answer_end
            space = yield from self.space()
        self.add_content(space)

    def _read_content(self, tool: ToolDialect, opening: str | None) -> Reading[None]:
        if tool.bare_openings and opening is None:
            self.add_content((yield from self.space()))
            letter = yield from self.peek()
            if letter and letter in tool.bare_openings:
                yield from self.read_calls(tool.read(self, letter), bare=True)
        while self._num_broken < MAX_BROKEN_CALLS:
            if opening is None:
                opening = yield from self.copy_visible_until(tool.openings, self.add_content)
            if opening is None:
                return
            yield from self.read_calls(tool.read(self, opening), already_read=opening)
            opening = None

    def _copy_content(self) -> Reading[None]:
        """Treat the rest as content."""
        yield from self.copy_visible_until((), self.add_content)
        self.end_content()

    def end_content(self) -> None:
        """No content follows: emit trailing white space if the answer has neither calls nor reasoning."""
        if self._has_content or not self._after_reasoning:
            space = "".join(self._space)
            if space and not self.num_calls and not any(end in space for end in self._answer_ends):
                self._out.append(Content(space))
        self._space.clear()

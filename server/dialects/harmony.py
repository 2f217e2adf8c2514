"""gpt-oss (harmony): a sequence of messages, each with a channel and sometimes a recipient in its header.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>

Reads text, like every dialect; the library openai-harmony reads token ids, and downloads its vocabulary when it starts.
"""

import re
from typing import TYPE_CHECKING

from server.dialects.dialect import Frame, ToolDialect
from server.dialects.json_calls import read_json_arguments
from server.dialects.json_scanner import Broken
from server.dialects.markers import Markers
from server.dialects.reader import MAX_NAME, Ended, Reading

if TYPE_CHECKING:
    from server.dialects.stream_parser import StreamParser

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_HEADER_ENDS = Markers((MESSAGE, END, CALL, RETURN))
_BODY_ENDS = (END, CALL, RETURN, START, CHANNEL)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")


class Harmony(ToolDialect):
    """Parses the whole output (`read_messages`), because calls are ordinary messages."""

    openings = (CHANNEL,)
    markers = (START, CONSTRAIN, MESSAGE, END, CALL, RETURN)
    frame = Frame(
        f"{CHANNEL}commentary to=functions.",
        f" {CONSTRAIN}json{MESSAGE}",
        "",
        several=False,
        reasoning=(f"{CHANNEL}analysis{MESSAGE}", f"{END}{START}assistant"),
    )


def read_messages(parser: "StreamParser", prompt_text: str, calls: bool, reasons: bool = True) -> Reading[None]:
    """Read an answer. Messages to functions are calls if `calls`; those in the channel analysis are reasoning anyhow."""
    header = _open_header(prompt_text)
    begun = ""
    while True:
        if header is None:
            header = yield from _read_header(parser, begun)
        if header is None:
            break
        begun = yield from _read_body(parser, header, calls)
        header = None
    parser.end_content()


def _open_header(prompt_text: str) -> str | None:
    """The header of the message in which a prompt ends, if any."""
    turn = prompt_text[prompt_text.rfind(START) :] if START in prompt_text else ""
    header, is_open, body = turn.partition(MESSAGE)
    return header if is_open and END not in body else None


def _read_header(parser: "StreamParser", begun: str) -> Reading[str | None]:
    """Read up to a message's body; `begun` is already read. Returns the header, empty for text without one, None at the end."""
    while True:
        if not begun:
            space = yield from parser.space()
            begun = yield from parser.first_of((START, CHANNEL, "to=", MESSAGE, END, CALL, RETURN))
            if not begun:
                if not (yield from parser.peek()):
                    return None
                parser.add_content(space)
                return ""
        if begun == MESSAGE:
            return ""
        if begun not in (END, CALL, RETURN):
            parser.mark(begun)
            try:
                header, end = yield from parser.text_until(_HEADER_ENDS, MAX_NAME)
            except Ended:
                return None  # cut off within markup
            except Broken:
                parser.add_content(parser.release(0))
                return ""
            if end == MESSAGE:
                return begun + header
        begun = ""


def _read_body(parser: "StreamParser", header: str, calls: bool) -> Reading[str]:
    """Read a message's body. Returns the marker that ends it, if that marker begins another header; else an empty text."""
    found, to = _CHANNEL.search(header), _RECIPIENT.search(header)
    channel, recipient = found[1] if found else "", to[1] if to else ""
    name = recipient.removeprefix("functions.")
    if calls and recipient and (recipient != name or name in parser.tools or channel == "commentary"):
        yield from parser.read_calls(_read_call(parser, name), already_read=header + MESSAGE)
        end = yield from parser.copy_visible_until(_BODY_ENDS, parser.add_content)
    elif channel == "analysis":
        parser.in_reasoning = True
        parser.begin_reasoning()
        end = yield from parser.copy_visible_until(_BODY_ENDS, parser.add_reasoning)
        parser.in_reasoning = False
    else:
        parser.begin_content()
        end = yield from parser.copy_visible_until(_BODY_ENDS, parser.add_content)
    return end if end in (START, CHANNEL) else ""


def _read_call(parser: "StreamParser", name: str) -> Reading[None]:
    yield from parser.space()
    if (yield from parser.first_of((CALL, END))):
        parser.start_call(name)
        parser.add_arguments("{}")
    else:
        yield from read_json_arguments(parser, name)
    parser.end_call()


HARMONY = Harmony()
HARMONY.whole = read_messages

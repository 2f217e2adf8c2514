"""What a parser makes of a model's text: pieces of the message that the client will see."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins. Its arguments follow as fragments with the same index."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A fragment of the JSON text of a call's arguments."""

    index: int
    text: str


Delta = Content | Reasoning | ToolCallStart | ToolCallArguments

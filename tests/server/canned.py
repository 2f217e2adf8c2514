"""Applications with canned answers."""

import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxllm.async_llm import AsyncLLM
from server.app import create_app
from server.chat_deltas import ChatDelta
from server.chat_service import PreparedChat
from tests.helpers.scripted_core import fake_core
from tests.helpers.tiny_tokenizers import CHAT_TEMPLATE, write_tokenizer
from tests.server.conftest import options

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}


def answer_with(monkeypatch: Any, app: Any, deltas: Sequence[ChatDelta | Exception]) -> list[PreparedChat]:
    """Let the application answer with these deltas, or fail where an error stands. Returns the conversations that come."""
    asked: list[PreparedChat] = []

    async def stream(chat: PreparedChat) -> AsyncGenerator[list[ChatDelta], None]:
        asked.append(chat)
        chat.usage.completion_tokens, chat.usage.cached_tokens, chat.usage.reasoning_tokens = 9, 2, 4
        for delta in deltas:
            if isinstance(delta, Exception):
                raise delta
            yield [delta]

    monkeypatch.setattr(app.state.context.chat, "stream", stream)
    return asked


SAID = (
    "<think>I must look it up.</think>Let me see."
    '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
    '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
)
"""Answers with reasoning, text and two calls."""


@contextlib.contextmanager
def caller_app(directory: Path) -> Iterator[Any]:
    """An application whose model outputs `SAID`, in a directory that is made for it."""
    template = "{{ tools }}{{ enable_thinking }}" + CHAT_TEMPLATE
    core = fake_core(write_tokenizer(directory, chat_template=template), SAID, max_model_len=1000)
    with AsyncLLM(core=core) as engine:
        yield create_app(engine, options(tool_call_parser="hermes", reasoning_parser="deepseek_r1"))

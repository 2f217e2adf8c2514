import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.text.tokenizer import Tokenizer
from server import chat_service
from server.app import create_app
from server.options import ChatOptions, ServerOptions
from server.template_process import TemplateProcesses
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.scripted_core import fake_core
from tests.helpers.tiny_tokenizers import write_tokenizer
from tests.server.client import Client


class SharedProcesses(TemplateProcesses):
    """Processes that outlive their application."""

    made: dict[bytes, "SharedProcesses"] = {}

    def close(self) -> None:
        """Applications with the same templates and limits go on with them."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, options: ChatOptions) -> "SharedProcesses":
        new = cls(tokenizer, options)
        return cls.made.setdefault(new._first, new)


@pytest.fixture(scope="session", autouse=True)
def _shared_template_processes() -> Iterator[None]:
    """To start a process that renders conversations takes longer than most tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_service, "TemplateProcesses", SharedProcesses.of)
        yield
    for processes in SharedProcesses.made.values():
        TemplateProcesses.close(processes)
    SharedProcesses.made.clear()


@pytest.fixture(scope="session")
def served_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of a model that text processing reads."""
    return write_tokenizer(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def core(served_directory: Path) -> FakeEngineCore:
    """Every request outputs "one two three", and then EOS."""
    return fake_core(served_directory, max_model_len=200)


@pytest.fixture(scope="module")
def engine(core: FakeEngineCore) -> Iterator[AsyncLLM]:
    with AsyncLLM(core=core) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: AsyncLLM) -> Iterator[Client]:
    """A client of an application with default options, without sockets."""
    with Client(create_app(engine, options())) as client:
        yield client


@pytest.fixture
def gate(core: FakeEngineCore, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Semaphore]:
    """Each step of the engine waits to be released; answers are longer than any test."""
    gate = threading.Semaphore(0)
    monkeypatch.setattr(core, "_script", lambda request: [70] * 1000)
    monkeypatch.setattr(core, "before_step", gate.acquire)
    yield gate
    monkeypatch.undo()
    gate.release(1000)


def options(**given: Any) -> ServerOptions:
    return ServerOptions.from_options(**{"served_model_name": ["m"], "tool_call_parser": "hermes", **given})

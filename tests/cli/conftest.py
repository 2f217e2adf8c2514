"""Commands with the real LLM over a fake engine core, and without the settings of the developer's own machine."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxllm.cli import running
from jaxllm.llm import LLM
from jaxllm.request import EngineCoreRequest
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.scripted_core import fake_core
from tests.helpers.stub_server import Stub, running_stub
from tests.helpers.tiny_tokenizers import write_tokenizer


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("JAXLLM_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("JAXLLM_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def words_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens are words."""
    template = "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"
    directory = tmp_path_factory.mktemp("words")
    return write_tokenizer(directory, "words", chat_template=template, generation_config={"temperature": 0.5})


@pytest.fixture(scope="module")
def shared_stub() -> Iterator[Stub]:
    """A server for the tests of a module, which each reset it."""
    with running_stub() as stub:
        yield stub


def backwards(request: EngineCoreRequest) -> Sequence[int]:
    """Answers with the prompt reversed, without the BOS token; one token per step."""
    return [*request.prompt_token_ids[:0:-1], request.eos_token_ids[0]]


class Opened:
    """The engine that a command opened, and the options it asked for."""

    def __init__(self, directory: Path) -> None:
        self.options: dict[str, Any] = {}
        self.core: FakeEngineCore | None = None
        self.before_step: Callable[[int], None] = lambda number: None
        self._directory = directory

    def open_llm(self, options: Any, progress: Any) -> LLM:
        self.options = dict(options)
        passed_on = {name: options[name] for name in ("seed", "enable_lora") if name in options}
        core = self.core = fake_core(self._directory, backwards, max_model_len=64, **passed_on)
        core.before_step = lambda: self.before_step(core.num_steps)
        return LLM.from_config(core.config, progress=progress, core=core)

    def press_ctrl_c(self, at_step: int) -> None:
        self.before_step = lambda number: signal.raise_signal(signal.SIGINT) if number == at_step else None

    def fail(self, at_step: int, error: Exception) -> None:
        def raise_error(number: int) -> None:
            if number == at_step:
                raise error

        self.before_step = raise_error

    def words_of(self, index: int) -> str:
        """The prompt of a request as text."""
        assert self.core is not None
        return (
            LLM.from_config(self.core.config, core=self.core)
            .get_tokenizer()
            .decode(self.core.requests[index].prompt_token_ids, skip_special_tokens=True)
        )


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, words_directory: Path) -> Opened:
    record = Opened(words_directory)
    monkeypatch.setattr(running, "open_llm", record.open_llm)
    return record

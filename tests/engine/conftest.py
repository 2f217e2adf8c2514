import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxllm.engine.core import EngineCore
from jaxllm.structured.token_table import Vocabulary
from jaxllm.text.tokenizer import load_tokenizer
from tests.helpers import engines
from tests.helpers.engine_processes import Served, served
from tests.helpers.tiny_tokenizers import write_tokenizer


@pytest.fixture(scope="package")
def tiny_core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCore]:
    """An engine of golden llama_gqa that four requests run in; a byte-level tokenizer gives its token ids a meaning for grammars."""
    core = engines.make_core("llama_gqa", max_num_seqs=4)
    tokenizer = load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    vocabulary = Vocabulary.of(tokenizer, core.model_config.padded_vocab_size, ())
    core._vocabulary = lambda eos_token_ids: vocabulary  # type: ignore[method-assign]
    yield core
    core.shutdown()


@pytest.fixture
def core(tiny_core: EngineCore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineCore]:
    """That engine, awake and as if nothing had ever failed in it; a slow machine does not lessen its steps in flight."""
    monkeypatch.setattr("jaxllm.engine.loop.LONG_STEP_SECONDS", float("inf"))
    engines.renew(tiny_core)
    with caplog.at_level(logging.CRITICAL, "jaxllm"):
        yield tiny_core
    tiny_core._dead = None
    tiny_core.wake_up()
    tiny_core.resume()


@pytest.fixture(scope="package")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which engine processes with a fake core need the tokenizer alone."""
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="package")
def shared(model_directory: Path) -> Iterator[Served]:
    """One engine process for all tests that leave it alive."""
    with served(model_directory) as engine:
        yield engine
        assert engine.end() == 0

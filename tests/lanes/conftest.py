from collections.abc import Callable, Iterator

import pytest

from jaxllm.engine.core import EngineCore
from jaxllm.structured.token_table import Vocabulary
from jaxllm.text.tokenizer import load_tokenizer
from tests.helpers import engines
from tests.helpers.tiny_tokenizers import write_tokenizer

NAME = "qwen3_moe"


@pytest.fixture(scope="package")
def new_core(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., EngineCore]:
    """Makes engines whose token ids have a meaning for grammars."""
    tokenizer = load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))

    def new(**options: object) -> EngineCore:
        core = engines.make_core(NAME, **options)
        vocabulary = Vocabulary.of(tokenizer, core.model_config.padded_vocab_size, ())
        core._vocabulary = lambda eos_token_ids: vocabulary  # type: ignore[method-assign]
        return core

    return new


@pytest.fixture(scope="package")
def one_device(new_core: Callable[..., EngineCore]) -> Iterator[EngineCore]:
    """The engine that the others are compared with."""
    core = new_core(expert_load=True)
    yield core
    core.shutdown()


@pytest.fixture(scope="package")
def two_lanes(new_core: Callable[..., EngineCore]) -> Iterator[EngineCore]:
    core = new_core(data_parallel_size=2, enable_expert_parallel=True)
    yield core
    core.shutdown()

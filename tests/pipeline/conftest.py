from collections.abc import Callable, Iterator

import pytest

from jaxllm.engine.core import EngineCore
from tests.helpers.cores_with_grammars import core_maker

NAME = "qwen3"
"""Its embedding is its head: both stages have it."""


@pytest.fixture(scope="package")
def new_core(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., EngineCore]:
    return core_maker(NAME, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="package")
def one_device(new_core: Callable[..., EngineCore]) -> Iterator[EngineCore]:
    """The engine that the others are compared with."""
    core = new_core()
    yield core
    core.shutdown()


@pytest.fixture(scope="package")
def two_stages(new_core: Callable[..., EngineCore]) -> Iterator[EngineCore]:
    core = new_core(pipeline_parallel_size=2)
    yield core
    core.shutdown()

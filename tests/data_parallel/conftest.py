from collections.abc import Callable, Iterator

import pytest

from jaxllm.engine.core import EngineCore
from tests.helpers.cores_with_grammars import core_maker

NAME = "qwen3_moe"


@pytest.fixture(scope="package")
def new_core(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., EngineCore]:
    return core_maker(NAME, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="package")
def one_device(new_core: Callable[..., EngineCore]) -> Iterator[EngineCore]:
    """The engine that the others are compared with."""
    core = new_core(expert_load=True)
    yield core
    core.shutdown()


@pytest.fixture(scope="package")
def two_ranks(new_core: Callable[..., EngineCore]) -> Iterator[EngineCore]:
    core = new_core(data_parallel_size=2, enable_expert_parallel=True)
    yield core
    core.shutdown()

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from jaxllm.engine.core import EngineCore
from tests.helpers import goldens
from tests.helpers.cores_with_grammars import core_maker

NAME = "qwen3_moe"


@pytest.fixture(scope="package")
def new_core(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., EngineCore]:
    """Makes engines of one layer, which compile half as much."""
    model = goldens.of_one_layer(NAME, tmp_path_factory.mktemp("model") / NAME)
    return partial(core_maker(NAME, tmp_path_factory.mktemp("tokenizer")), model=str(model))


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

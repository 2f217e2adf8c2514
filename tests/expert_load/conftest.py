"""Engines whose experts move all the time."""

from collections.abc import Iterator

import pytest

from jaxllm.engine.core import EngineCore
from tests.expert_load.engines_that_count import new_core


@pytest.fixture(scope="package")
def two_devices() -> Iterator[EngineCore]:
    core = new_core("deepseek_v3", 2, 2)
    yield core
    core.shutdown()


@pytest.fixture(scope="package")
def two_ranks() -> Iterator[EngineCore]:
    core = new_core("deepseek_v3", 1, 2, data_parallel_size=2)
    yield core
    core.shutdown()

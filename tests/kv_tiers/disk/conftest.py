"""Stores on one directory."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.disk_engine import MODEL, Engine


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def new(seed: int = 0, *, root: Path = tmp_path / "kv", max_bytes: int = 1 << 30, model: dict[str, Any] = MODEL) -> Engine:
        made.append(Engine(root, seed, max_bytes, model))
        return made[-1]

    yield new
    for engine in made:
        engine.store.close()

"""Stores on one directory."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kv_tiers.disk_engine import MODEL, Engine


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def new(seed: int = 0, *, max_bytes: int = 1 << 30, model: dict[str, Any] = MODEL, blocks_per_file: int = 1) -> Engine:
        made.append(Engine(tmp_path / "kv", seed, max_bytes, model, blocks_per_file))
        return made[-1]

    yield new
    for engine in made:
        engine.store.close()

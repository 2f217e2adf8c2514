"""A hub on disk in place of the one on the internet: what is asked of it, it copies, as `snapshot_download` would."""

import shutil
from pathlib import Path
from typing import Any

import pytest


class StandInHub:
    """A repository with the files of a directory. `fetched` has the names of all that was downloaded, in order."""

    def __init__(self, repository: Path, cache: Path):
        self.repository = repository
        self.cache = cache
        self.fetched: list[str] = []

    def snapshot_download(self, name: str, *, allow_patterns: list[str], ignore_patterns: list[str], **_: Any) -> str:
        from huggingface_hub.utils import filter_repo_objects

        names = sorted(str(path.relative_to(self.repository)) for path in self.repository.rglob("*") if path.is_file())
        for file in filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            if not (self.cache / file).exists():
                (self.cache / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.repository / file, self.cache / file)
                self.fetched.append(file)
        return str(self.cache)

    @property
    def fetched_weights(self) -> list[str]:
        return [name for name in self.fetched if name.endswith(".safetensors")]


def install(monkeypatch: pytest.MonkeyPatch, repository: Path, cache: Path) -> StandInHub:
    """Have every hub id stand for this repository."""
    import huggingface_hub

    hub = StandInHub(repository, cache)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub

"""Writes results as JSON."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError


def check_writable(path: Path) -> None:
    """Make the file's directory. Raises ConfigError if the file cannot be written: better before a measurement than after it."""
    _write(path, "", "a")


def write_json(path: Path, value: Mapping[str, Any], *, append: bool = False) -> None:
    """Write a JSON object as a line, in place of what the file has or after it. Raises ConfigError."""
    _write(path, json.dumps(value) + "\n", "a" if append else "w")


def _write(path: Path, text: str, mode: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None

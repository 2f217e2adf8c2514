"""Reads files that a user names."""

import json
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError


def read_text(path: str | Path) -> str:
    """The text of a file. Raises ConfigError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def read_json(path: str | Path) -> Any:
    """The value in a JSON file. Raises ConfigError."""
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None

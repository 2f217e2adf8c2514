"""The tokens that families put between and around embeddings, by the files of a model's tokenizer."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from jaxllm.errors import ConfigError
from jaxllm.files import read_bounded, read_json
from jaxllm.media.settings import Settings
from jaxllm.rust_failures import failures_as

MAX_BYTES = 128 << 20
"""Of a tokenizer.json."""


def token_ids(directory: Path, settings: Settings, *tokens: str) -> list[int]:
    """The ids of special tokens. Raises ConfigError."""
    known: dict[str, int] = {}
    if (path := directory / "tokenizer_config.json").is_file():
        added = read_json(path).get("added_tokens_decoder") or {}
        known = {entry["content"]: int(id) for id, entry in added.items() if _is_token(entry)}
    if not known.keys() >= set(tokens) and (path := directory / "tokenizer.json").is_file():
        added = read_json(path, MAX_BYTES).get("added_tokens") or []
        known = {entry["content"]: entry["id"] for entry in added if _is_token(entry)}
    if missing := [token for token in tokens if token not in known]:
        settings.fault(f"the tokenizer in {directory} has no token {' and no '.join(missing)}, which images are written with")
    return [known[token] for token in tokens]


def _is_token(entry: Any) -> bool:
    return isinstance(entry, Mapping) and isinstance(entry.get("content"), str)


def encoder(path: Path) -> Callable[[str], tuple[int, ...]]:
    """What makes tokens of short texts, by a tokenizer.json. Raises ConfigError."""

    def refused(reason: object) -> ConfigError:
        return ConfigError(f"{path} is not a tokenizer: {reason}; download it again")

    content = read_bounded(path, MAX_BYTES)
    try:
        with failures_as(refused):
            tokenizer = Tokenizer.from_buffer(content)
    except ValueError as error:
        raise refused(error) from None
    tokenizer.no_truncation()

    @functools.lru_cache(1024)
    def encode(text: str) -> tuple[int, ...]:
        with failures_as(refused):
            return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    return encode

"""Finds the small files of a model that text processing reads (tokenizer, chat template, generation config), without its weights."""

from pathlib import Path
from typing import Any

from jaxllm import files
from jaxllm.errors import ModelLoadError
from jaxllm.hub import resolve_model
from jaxllm.options.quantization import QUANTIZATION_FILES
from jaxllm.pooling_config import FILES

PATTERNS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *(
        "config.json",
        "params.json",
        "generation_config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
    ),
    *FILES,
    *QUANTIZATION_FILES,
    *(
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tokenizer.model",
        "spiece.model",
        "tiktoken.model",
        "tekken.json",
        "*.tiktoken",
    ),
)


def text_files(name: str, *, revision: str | None = None, download_dir: str | None = None) -> Path:
    """The local directory with these files, fetched from the hub if `name` is no directory. Raises ModelLoadError."""
    return resolve_model(name, revision, download_dir, files=PATTERNS)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one if there is no such file. Raises ModelLoadError."""
    if not file.is_file():
        return {}
    found = files.read_json(file, error=ModelLoadError)
    if not isinstance(found, dict):
        raise ModelLoadError(f"{file} holds a {type(found).__name__}, must hold an object")
    return found

"""Reads the files of a tokenizer that others may have written: within limits, and with every value of the type it must have."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from jaxllm.errors import ModelLoadError, shortened
from jaxllm.files import read_bounded
from jaxllm.rust_failures import failures_as
from jaxllm.text.model_files import read_json

NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_TOKENIZER_BYTES = 128 * 2**20
"""Most bytes of tokenizer.json; those of the largest vocabularies have 35 MB."""
MAX_TEMPLATE_BYTES = 2**20
"""Most bytes of a chat template; the longest known have 30 KB."""
MAX_TOKEN_LENGTH = 1024
"""Characters of an added or special token."""
MAX_GROWTH = 64
"""Most characters that the steps before or after the model may make of one."""
_MAX_PIECES = 64
"""Most steps before and after the model, and most tokens and texts in the template by which tokens are put around a text."""
_MAX_UNUSED_IDS = 2**20
_LARGE_ID = re.compile(rb'":\s*\d{8}')


class _Named(msgspec.Struct):
    """A special token, spelled as an object."""

    content: str | None = None


class _AddedToken(msgspec.Struct):
    content: str
    special: Any = False


class _Template(msgspec.Struct):
    name: str
    template: str


_Fields = msgspec.defstruct(
    "_Fields",
    [
        *((name, str | _Named | None, None) for name in NAMED_SPECIAL_TOKENS),
        ("added_tokens_decoder", dict[int, _AddedToken] | None, None),
        ("chat_template", str | dict[str, str] | list[_Template] | None, None),
    ],
)
"""Fields read from tokenizer_config.json."""


def read_backend(file: Path) -> tokenizers.Tokenizer:
    """The tokenizer in a tokenizer.json. Raises ModelLoadError."""

    def refused(reason: object) -> ModelLoadError:
        return ModelLoadError(f"{file} is not a tokenizer: {shortened(str(reason))}; download it again")

    content = read_bounded(file, MAX_TOKENIZER_BYTES, ModelLoadError)
    try:
        with failures_as(refused):
            backend = tokenizers.Tokenizer.from_buffer(content)
            backend.no_truncation()
            backend.no_padding()
            _check_growth(backend)
            if _LARGE_ID.search(content):  # making all ids takes as long as half of the rest
                _check_ids(backend)
    except ValueError as error:
        raise refused(error) from error
    return backend


def _check_growth(backend: tokenizers.Tokenizer) -> None:
    """Raise ValueError for steps that make texts many times as long."""
    splits = [*_steps(backend.normalizer, "normalizers"), *_steps(backend.pre_tokenizer, "pretokenizers")]
    for steps in (splits, _steps(backend.decoder, "decoders")):
        prepended = sum(len(step.get("prepend", "")) for step in steps)
        growth = math.prod(_growth(step) for step in steps[:_MAX_PIECES])
        if growth + prepended > MAX_GROWTH or len(steps) > _MAX_PIECES:
            raise ValueError(
                f"its {len(steps)} steps make up to {growth + prepended} characters of one, at most {MAX_GROWTH} are allowed"
            )
    for step in _steps(backend.post_processor, "processors"):
        most = max(len(step.get(name) or []) for name in ("single", "pair"))
        texts = sum("Sequence" in piece for piece in (step.get("single") or [])[:_MAX_PIECES])
        if most > _MAX_PIECES or texts > 1:
            raise ValueError(
                f"its template has {most} pieces and a text {texts} times, at most {_MAX_PIECES} and once are allowed"
            )


def _check_ids(backend: tokenizers.Tokenizer) -> None:
    """Raise ValueError for ids far above the number of tokens: each id up to the highest takes memory when tokenizers writes a file."""
    ids = backend.get_vocab(with_added_tokens=True).values()
    if ids and max(ids) >= len(ids) + _MAX_UNUSED_IDS:
        raise ValueError(f"its {len(ids)} tokens have ids up to {max(ids)}, at most {_MAX_UNUSED_IDS} more may be unused")


def _growth(step: Mapping[str, Any]) -> int:
    """Most characters that a step makes of one."""
    if step.get("type") == "ByteLevel":
        return 4
    return max(1, len(step.get("content", ""))) if step.get("type") == "Replace" else 1


def _steps(part: Any, name: str) -> list[Mapping[str, Any]]:
    """A part of a tokenizer and those inside it."""
    found, pending = [], [json.loads(part.__getstate__())] if part is not None else []
    while pending:
        step = pending.pop()
        found.append(step)
        pending += step.get(name) or []
    return found


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json, with the special tokens and chat templates of other files. Raises ModelLoadError."""
    config = {**_checked(directory / "special_tokens_map.json"), **_checked(directory / "tokenizer_config.json")}
    templates = {
        **chat_templates(_checked(directory / "chat_template.json").get("chat_template")),
        **chat_templates(config.get("chat_template")),
    }
    for file in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _template(file)
    if (file := directory / "chat_template.jinja").is_file():
        templates["default"] = _template(file)
    return {**config, "chat_template": templates}


def _checked(file: Path) -> dict[str, Any]:
    found = read_json(file)
    try:
        msgspec.json.encode(found)  # half a surrogate pair is no text
        fields: Any = msgspec.convert(found, _Fields, strict=False)
        texts = [getattr(fields, name) for name in NAMED_SPECIAL_TOKENS]
        contents = [text.content if isinstance(text, _Named) else text for text in texts]
        contents += [token.content for token in (fields.added_tokens_decoder or {}).values()]
        if (longest := max((len(text or "") for text in contents), default=0)) > MAX_TOKEN_LENGTH:
            raise ValueError(f"a token has {longest} characters, at most {MAX_TOKEN_LENGTH} are allowed")
        sizes = [len(template) for template in chat_templates(found.get("chat_template")).values()]
        if max(sizes, default=0) > MAX_TEMPLATE_BYTES:
            raise ValueError(f"a chat template has {max(sizes)} characters, at most {MAX_TEMPLATE_BYTES} are allowed")
    except (ValueError, OverflowError, RecursionError) as error:  # those of msgspec are ValueErrors
        raise ModelLoadError(f"{file} is broken: {shortened(str(error))}; correct it, or download it again") from error
    return found


def _template(file: Path) -> str:
    try:
        return read_bounded(file, MAX_TEMPLATE_BYTES, ModelLoadError).decode()
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{file} is no text in UTF-8: {error}; download it again") from error


def chat_templates(found: Any) -> dict[str, str]:
    """Templates by name, from any of the forms that tokenizer_config.json allows."""
    if not found:
        return {}
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, Mapping):
        return dict(found)
    return {entry["name"]: entry["template"] for entry in found}

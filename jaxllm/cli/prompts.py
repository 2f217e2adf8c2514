"""Reads prompts from the command line, a file or stdin, and checks all before any of them runs."""

import json
import os
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxllm.cli.flags import read_file_setting, request_flags
from jaxllm.config import Flag, unknown_name
from jaxllm.errors import ConfigError

DEMO_PROMPT = 'def read_lines(path):\n    """Return the lines of a file."""\n'
DEMO_MESSAGE = "What is 27 + 15?"
MAX_FAULTS_SHOWN = 10

_KINDS = {"prompt": "text", "prompt_token_ids": "a list of token ids", "messages": "a list of {role, content} objects"}


@dataclass(frozen=True)
class Prompt:
    """One prompt as given: exactly one of text, token ids and messages, with the sampling values of its line."""

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    media: Sequence[tuple[str, bytes]] = ()
    """Kinds ("image", "video", "audio") and contents of files that go before the text, or before that of the last message."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    origin: str = "prompt"
    """Name in messages: "prompt 0", "prompts.jsonl:7"."""
    is_line: bool = False
    """Whether it is a line of the file in `origin`."""

    def as_json(self) -> dict[str, Any]:
        """The prompt's key and value in its file."""
        return {kind: value for kind in _KINDS if (value := getattr(self, kind)) is not None}


def from_arguments(texts: Iterable[str]) -> list[Prompt]:
    """Each argument is a prompt; `-` is all of stdin as one prompt."""
    return [
        Prompt(_read("-"), origin="stdin") if text == "-" else Prompt(text, origin=f"prompt {number}")
        for number, text in enumerate(texts)
    ]


def from_nothing(*, chat: bool) -> Prompt:
    """The prompt if none is given: what a pipe or file on stdin holds, else the demo prompt."""
    if sys.stdin is not None and not sys.stdin.isatty():
        mode = os.fstat(sys.stdin.fileno()).st_mode
        if (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)) and (text := _read("-")).strip():
            return Prompt(text, origin="stdin")
    return Prompt(DEMO_MESSAGE if chat else DEMO_PROMPT, origin="demo")


def from_file(path: str) -> list[Prompt]:
    """Read one prompt per line: JSON objects in a .jsonl file, text in others; `-` is stdin, JSON if it begins with `{`.

    Skips blank lines. Raises ConfigError that names all bad lines.
    """
    if path.endswith(".json"):
        raise ConfigError(f"{path} is one JSON text; give a .jsonl file with an object per line")
    content = _read(path)
    name = "stdin" if path == "-" else path
    is_json = path.endswith(".jsonl") or (path == "-" and content.lstrip().startswith("{"))
    lines = [(number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"{name} holds no prompts")
    if not is_json:
        return [Prompt(line.rstrip("\r"), origin=f"{name}:{number}", is_line=True) for number, line in lines]
    known = request_flags()
    prompts: list[Prompt] = []
    faults: list[str] = []
    for number, line in lines:
        try:
            prompts.append(_from_json(line, known, f"{name}:{number}"))
        except ConfigError as error:
            faults.append(str(error))
    if len(faults) > MAX_FAULTS_SHOWN:
        faults[MAX_FAULTS_SHOWN:] = [f"and {len(faults) - MAX_FAULTS_SHOWN} more bad lines"]
    if faults:
        raise ConfigError("; ".join(faults))
    return prompts


def _read(path: str) -> str:
    """All of a file, or of stdin if the path is `-`."""
    try:
        if path == "-":
            return sys.stdin.read()
        with open(path, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{'stdin' if path == '-' else path}:{line}: not UTF-8 ({error.reason})") from None
    except OSError as error:
        name = "the prompts on stdin" if path == "-" else f"the prompt file {path}"
        raise ConfigError(f"cannot read {name}: {error.strerror or error}") from None


def _from_json(line: str, known: Mapping[str, Flag], where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:  # JSON's error counts lines within this line
        raise ConfigError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: must be a JSON object")
    kinds = [kind for kind in _KINDS if kind in entry]
    if len(kinds) != 1:
        raise ConfigError(f"{where}: must have exactly one of {', '.join(_KINDS)}; has {' and '.join(kinds) or 'none'}")
    (kind,) = kinds
    value = entry.pop(kind)
    for key in entry:
        if key.replace("-", "_") not in known:
            raise ConfigError(f"{where}: {unknown_name('key', key, [*_KINDS, *known])}")
    sampling = dict(read_file_setting(key, setting, known, where) for key, setting in entry.items())
    if not _is_kind(kind, value):
        raise ConfigError(f"{where}: {kind} must be {_KINDS[kind]}")
    return Prompt(**{kind: value}, sampling=sampling, origin=where, is_line=True)


def _is_kind(kind: str, value: Any) -> bool:
    if kind == "prompt":
        return isinstance(value, str)
    if not isinstance(value, list) or not value:
        return False
    if kind == "prompt_token_ids":
        return all(type(token) is int for token in value)
    return all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in value)

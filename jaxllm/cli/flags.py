"""The command line's options, and parsers for the text of their values. Imports only light modules."""

import dataclasses
import json
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from jaxllm import vllm_flags
from jaxllm.config import Flag, flags, type_matches, unknown_name
from jaxllm.errors import ConfigError
from jaxllm.sampling_params import MODEL_DEFAULTS, SamplingParams
from jaxllm.structured_outputs import StructuredOutputsParams

NO_FLAGS: Mapping[str, str] = {"seed": "the engine's --seed seeds every request that has none"}
"""Annotated fields of SamplingParams without a flag, with the reason."""
NOT_IN_FILES: Mapping[str, str] = {
    "output_kind": "follows from whether the command streams",
    "stream_interval": "a terminal is written to at every token",
    "flat_logprobs": "a choice of Python container",
    "guided_decoding": "the older name of structured_outputs",
    "bad_words_token_ids": "filled by the front from bad_words",
}
"""Fields of SamplingParams that a line of a prompt file cannot set, with the reason."""
MAX_TOKENS_HELP = "most tokens of each answer; default: the model's own, else 256, in chat as many as the context has room for"

SHORT_NAMES: Mapping[str, str] = {"model": "-m", **vllm_flags.SHORT_NAMES}
SEVERAL_WORDS = ("api_key", "served_model_name")
"""Options whose flag may be followed by several texts, as vLLM has it: `--api-key one two`."""

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def engine_flags() -> list[Flag]:
    """Every option of the engine."""
    return flags()


def sampling_flags() -> list[Flag]:
    """The annotated fields of SamplingParams, with the command line's defaults."""
    found = []
    for flag in flags(SamplingParams):
        if flag.name == "max_tokens":
            flag = dataclasses.replace(flag, help=MAX_TOKENS_HELP, default=None)
        elif flag.name in MODEL_DEFAULTS:
            flag = dataclasses.replace(flag, help=f"{flag.help}; default: the model's own, else {flag.default:g}", default=None)
        if flag.name not in NO_FLAGS:
            found.append(flag)
    return found


def shaping_flags() -> list[Flag]:
    """The sampling flags that shape the distribution of tokens, and so affect the work of a step."""
    return [flag for flag in sampling_flags() if flag.type is float or flag.name == "top_k"]


def request_flags() -> dict[str, Flag]:
    """The request settings allowed in a line of a prompt file: nearly every field of SamplingParams."""
    hints = typing.get_type_hints(SamplingParams)
    names = [f.name for f in dataclasses.fields(SamplingParams) if f.name not in NOT_IN_FILES]
    return {name: Flag(name, "Sampling", "", None, hints[name]) for name in names}


def server_flags() -> list[Flag]:
    """Every option of the server."""
    from server.options import server_flags

    return server_flags()


def all_flags() -> dict[str, Flag]:
    """Everything that the YAML file and the environment may set, by name."""
    return {flag.name: flag for flag in (*engine_flags(), *sampling_flags(), *server_flags())}


def spelling(name: str) -> str:
    """Turn `max_num_seqs` into `--max-num-seqs`."""
    return "--" + name.replace("_", "-")


def without_none(of_type: Any) -> tuple[Any, bool]:
    """The type behind `X | None`, and whether None is allowed. `str | list[str]` counts as `list[str]`."""
    if typing.get_origin(of_type) not in (typing.Union, types.UnionType):
        return of_type, False
    parts = typing.get_args(of_type)
    kinds = [part for part in parts if part is not type(None)]
    return kinds[-1], len(kinds) < len(parts)


def is_object(flag: Flag) -> bool:
    """Whether the value is a JSON object, so that `--flag.key value` sets one key of it."""
    kind = without_none(flag.type)[0]
    return kind is dict or typing.get_origin(kind) is dict


def is_repeated(flag: Flag) -> bool:
    """Whether the flag may be given again, each time adding a text."""
    return without_none(flag.type)[0] == list[str]


def read_text(flag: Flag, text: str) -> Any:
    """Parse the text of an option's value. Raises ValueError that names the expected form."""
    if text in vllm_flags.WORDS.get(flag.name, {}):
        return vllm_flags.WORDS[flag.name][text]
    kind, optional = without_none(flag.type)
    if optional and text.lower() in ("none", "null"):
        return None
    return _read(kind, text)


def read_value(flag: Flag, value: Any) -> Any:
    """The value of an option from a YAML or JSON file: already of the right type, or text as on the command line."""
    kind, _ = without_none(flag.type)
    if isinstance(value, str) and not type_matches(value, flag.type):
        return read_text(flag, value)
    if isinstance(value, list) and typing.get_origin(kind) in (tuple, list):
        item = typing.get_args(kind)[0]
        if wrong := [entry for entry in value if not type_matches(entry, item)]:
            raise ValueError(f"{wrong[0]!r} is not {_noun(item)}")
        return typing.get_origin(kind)(value)
    if kind is StructuredOutputsParams:
        return StructuredOutputsParams.of(value)
    if isinstance(value, dict) and is_object(flag):
        return _with_typed_keys(kind, value)
    if not type_matches(value, flag.type):
        raise ValueError(f"{value!r} is not {_noun(kind)}")
    return value


def read_file_setting(name: str, value: Any, known: Mapping[str, Flag], where: str) -> tuple[str, Any]:
    """One `name: value` of a file, in either spelling, as (field name, typed value). Raises ConfigError that names `where`."""
    field = str(name).replace("-", "_")
    if field not in known:
        raise ConfigError(f"{where}: {unknown_name('option', str(name), known)}")
    try:
        return field, read_value(known[field], value)
    except ValueError as error:
        raise ConfigError(f"{where}: {name}: {error}") from None


def whole_number(text: str) -> int:
    """`1k` is 1000, `1K` is 1024, and so on for m, g, t; a fraction is allowed where the result is whole: `1.5k`."""
    match = re.fullmatch(r"([+-]?\d+(?:_\d+)*)(\.\d+)?([kmgtKMGT])?", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a whole number (such as 4096, 4k = 4000, 4K = 4096, 2G = 2 GiB)")
    whole, fraction, suffix = match.groups()
    if fraction is None:
        return int(whole) * _SUFFIXES.get(suffix, 1)
    value = float(whole + fraction) * _SUFFIXES.get(suffix, 1)
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two JSON objects; where both have a value, `over` wins. Nested objects are merged recursively."""
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            value = merge(merged[key], value)
        merged[key] = value
    return merged


def join_sub_keys(arguments: list[str], known: Mapping[str, Flag]) -> list[str]:
    """The arguments with names in kebab spelling and `--object.a.b value` turned into `--object={"a": {"b": value}}`."""
    objects = {spelling(name) for name, flag in known.items() if is_object(flag)}
    objects |= {spelling(flag.name) for flag in vllm_flags.TABLE.values() if flag.kind == "object"}
    joined: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            return [*joined, argument, *rest]
        if not argument.startswith("--"):
            joined.append(argument)
            continue
        name, equals, value = argument.partition("=")
        base, dot, path = name.partition(".")
        base = base.replace("_", "-")
        if dot and base in objects:
            text = value if equals else next(rest, None)
            if text is None or not all(path.split(".")):
                raise ValueError(f"{name} needs a key and a value: {base}.key value")
            joined.append(f"{base}={json.dumps(_nested(path.split('.'), _json_or_text(text)))}")
        else:
            joined.append(base + dot + path + equals + value)
    return joined


def _read(kind: Any, text: str) -> Any:
    origin = typing.get_origin(kind)
    if kind is bool:
        if text.lower() not in _BOOLEANS:
            raise ValueError(f"{text!r} is neither true nor false")
        return _BOOLEANS[text.lower()]
    if kind is int:
        return whole_number(text)
    if kind is float:
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a number") from None
    if origin is Literal:
        choices = typing.get_args(kind)
        if text not in choices:
            raise ValueError(unknown_name("value", text, choices) + f" (one of {', '.join(choices)})")
        return text
    if kind == list[str]:
        return [text]
    if origin in (tuple, list):
        item = typing.get_args(kind)[0]
        return origin(_read(item, part.strip()) for part in text.strip("[]").split(",") if part.strip())
    if kind is dict or origin is dict:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
        return _with_typed_keys(kind, value)
    return text


def _with_typed_keys(kind: Any, value: dict[Any, Any]) -> dict[Any, Any]:
    """Convert keys of `dict[int, …]` to numbers: JSON has text keys only."""
    arguments = typing.get_args(kind)
    if not arguments or arguments[0] is not int:
        return value
    try:
        return {int(key): entry for key, entry in value.items()}
    except ValueError:
        raise ValueError(f"the keys must be token ids, got {', '.join(map(repr, value))}") from None


def _noun(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text (put it in quotes)", dict: "an object"}
    origin = typing.get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    return names.get(kind) or names.get(origin) or "a list"


def _nested(path: list[str], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    return value


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text

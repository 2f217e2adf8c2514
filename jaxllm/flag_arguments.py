"""Arguments of argparse for options that a `Flag` describes, and the values that their texts stand for."""

import argparse
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from jaxllm.config import Flag, type_matches, unknown_name
from jaxllm.structured_outputs import StructuredOutputsParams
from jaxllm.vllm_compat.flags import TABLE, TAKEN, TAKEN_BY_SERVER
from jaxllm.vllm_compat.values import VALUES, as_here, tell
from jaxllm.whole_numbers import whole_number

SEVERAL_WORDS = ("api_key", "served_model_name", "lora_target_modules", "lora_modules", "allowed_media_domains")
"""Options whose flag may be followed by several texts, as vLLM has it: `--api-key one two`."""

_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def add_flag(
    group: argparse._ArgumentGroup, flag: Flag, short_names: Mapping[str, str], default: Any = argparse.SUPPRESS
) -> None:
    """Add the argument of an option. `default`: the value if it is not given; without it, the namespace lacks the option."""
    names = [name for name in (short_names.get(flag.name),) if name] + [spelling(flag.name)]
    kind, _ = without_none(flag.type)
    text = flag.help.replace("%", "%%")
    if "default:" not in flag.help and flag.default is not None:
        text += f" (default: {_as_text(flag.default)})"
    common: dict[str, Any] = {"dest": flag.name, "help": text, "default": default}
    if kind is bool:
        group.add_argument(*names, action=_Switch, **common)
        return
    if typing.get_origin(kind) is Literal:
        common["choices"] = _Choices(typing.get_args(kind))
    action = _Merge if is_object(flag) else _Extend if is_repeated(flag) else None
    if action is not None:
        common["action"] = action
    if flag.name in SEVERAL_WORDS:
        common["nargs"] = "+"
    group.add_argument(*names, type=_reader(flag, tells=default is not argparse.SUPPRESS), metavar=_metavar(kind), **common)


class _Choices(tuple[Any, ...]):
    """The values of an option; None, which some texts stand for, is one that help does not list."""

    def __contains__(self, value: object) -> bool:
        return value is None or super().__contains__(value)


def _reader(flag: Flag, *, tells: bool) -> typing.Callable[[str], Any]:
    """The type of an argument. `tells`: whether it logs what becomes of vLLM's values; commands do so once their log is set up."""

    def read(text: str) -> Any:
        try:
            value = read_text(flag, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if tells:
            tell(flag.name, text, f"{spelling(flag.name)} {text}")
        return value

    return read


def _metavar(kind: Any) -> str | None:
    if typing.get_origin(kind) is Literal:
        return None
    if typing.get_origin(kind) in (tuple, list) and kind != list[str]:
        return "N,N"
    return {int: "N", float: "X"}.get(kind) or ("JSON" if kind is dict or typing.get_origin(kind) is dict else "TEXT")


def _as_text(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def spelling(name: str) -> str:
    """Turn `max_num_seqs` into `--max-num-seqs`."""
    return "--" + name.replace("_", "-")


def opposites(name: str) -> list[str]:
    """How the command line turns a switch off: --no-X, and --disable-x of enable_x or the reverse, unless that is an own flag."""
    found = ["--no-" + spelling(name)[2:]]
    for prefix, other in (("enable_", "disable_"), ("disable_", "enable_")):
        inverse = other + name.removeprefix(prefix)
        if name.startswith(prefix) and not any(inverse in names for names in (TABLE, TAKEN, TAKEN_BY_SERVER)):
            found.append(spelling(inverse))
    return found


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
    if text in VALUES.get(flag.name, {}):
        return as_here(flag.name, text)
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
            raise ValueError(f"{wrong[0]!r} is not {noun(item)}")
        return typing.get_origin(kind)(value)
    if kind is StructuredOutputsParams:
        return StructuredOutputsParams.of(value)
    if isinstance(value, dict) and is_object(flag):
        return with_typed_keys(kind, value)
    if not type_matches(value, flag.type):
        raise ValueError(f"{value!r} is not {noun(kind)}")
    return value


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two JSON objects; where both have a value, `over` wins. Nested objects are merged recursively."""
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            value = merge(merged[key], value)
        merged[key] = value
    return merged


class _Switch(argparse.BooleanOptionalAction):
    """On by its name, off by its opposites."""

    def __init__(self, option_strings: list[str], dest: str, **more: Any):
        super().__init__(option_strings, dest, **more)
        self._off = opposites(dest)
        self.option_strings = [*option_strings, *self._off]

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, option_string not in self._off)


class _Merge(argparse.Action):
    """Merges JSON objects that are given one after another."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, merge(getattr(namespace, self.dest, None) or {}, values or {}))


class _Extend(argparse.Action):
    """Collects texts that are given one after another in a list."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if self.nargs == "+":
            values = [text for texts in values for text in texts]
        setattr(namespace, self.dest, None if values is None else [*(getattr(namespace, self.dest, None) or []), *values])


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
        return with_typed_keys(kind, read_object(text))
    return text


def read_object(text: str) -> dict[Any, Any]:
    """A JSON object. Raises ValueError."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def with_typed_keys(kind: Any, value: dict[Any, Any]) -> dict[Any, Any]:
    """Convert keys of `dict[int, …]` to numbers: JSON has text keys only."""
    arguments = typing.get_args(kind)
    if not arguments or arguments[0] is not int:
        return value
    try:
        return {int(key): entry for key, entry in value.items()}
    except ValueError:
        raise ValueError(f"the keys must be token ids, got {', '.join(map(repr, value))}") from None


def noun(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text (put it in quotes)", dict: "an object"}
    origin = typing.get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    return names.get(kind) or names.get(origin) or "a list"

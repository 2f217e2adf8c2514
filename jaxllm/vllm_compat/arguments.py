"""vLLM's flags as arguments of argparse: accepted or refused with a reason, as `jaxllm.vllm_compat.flags` defines."""

import argparse
import json
from collections.abc import Iterable, Sequence
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.flag_arguments import merge, opposites, spelling
from jaxllm.vllm_compat.flags import BENCH_TABLE, SECRETS, SHORT_NAMES, TABLE, VllmFlag, add_translated, translated
from jaxllm.vllm_compat.values import QUANTIZATIONS, VALUES, told_about

DEST = "vllm_flags"
_ALL = {**TABLE, **BENCH_TABLE}


def rewritten(arguments: Iterable[str]) -> list[str]:
    """The arguments with `-q fp8` as --quantization fp8; `-q` alone is --quiet."""
    found: list[str] = []
    for argument in arguments:
        if argument in QUANTIZATIONS and found and found[-1] == "-q":
            found[-1] = "--quantization"
        found.append(argument)
    return found


def notes_on_values(arguments: Sequence[str]) -> list[str]:
    """Log messages about values of vLLM's that options of ours take as another."""
    names = {spelling(name): name for name in VALUES}
    notes = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        flag, equals, value = argument.partition("=")
        if flag in names:
            value = value if equals else following
            notes.append(told_about(names[flag], value, f"{flag} {value}"))
    return [note for note in notes if note is not None]


def add_vllm_arguments(parser: argparse.ArgumentParser, *, names: Iterable[str] = TABLE, at_once: bool = False) -> None:
    """An argument for each of vLLM's flags, or of those named, that the parser does not have; help does not list them.

    `at_once`: parsing sets the options and fails for what is refused, and each flag is in the namespace, None if not given. If
    not, `take_vllm_arguments` does all this later.
    """
    action, default = (_TakeAtOnce, None) if at_once else (_Keep, argparse.SUPPRESS)
    for flag in map(_ALL.__getitem__, names):
        if spelling(flag.name) in parser._option_string_actions:
            continue
        options = [name for name in (SHORT_NAMES.get(flag.name),) if name] + [spelling(flag.name)]
        if flag.kind == "switch":
            options += opposites(flag.name)
        nargs: int | str | None = {"switch": 0, "list": "+", "optional": "?"}.get(flag.kind)  # type: ignore[assignment]
        const = "true" if flag.kind == "optional" else None
        more: dict[str, Any] = {"dest": flag.name, "default": default, "help": argparse.SUPPRESS}
        parser.add_argument(*options, action=action, nargs=nargs, const=const, **more)


def take_vllm_arguments(found: argparse.Namespace) -> None:
    """Set the options of vLLM's flags; own flags win. Logs flags without effect; raises ConfigError for refused ones."""
    for name, (value, how) in vars(found).pop(DEST, {}).items():
        add_translated(vars(found), translated(name, value, how, _ALL))


def help_lines(word: str) -> list[str]:
    """A line for each of vLLM's flags whose name contains the word, with its effect."""
    wanted = word.lower().lstrip("-").replace("_", "-")
    return [_about(flag) for flag in TABLE.values() if wanted in spelling(flag.name)]


def _about(flag: VllmFlag) -> str:
    if flag.option is not None:
        return f"  {spelling(flag.name)}: as {spelling(flag.option)}{f'.{flag.key}' if flag.key else ''} ({flag.text})"
    only = f", but for {' or '.join(map(str, flag.harmless))}" if flag.harmless else ""
    return f"  {spelling(flag.name)}: {f'refused{only}' if flag.refused else 'no effect'}: {flag.text}"


class _Keep(argparse.Action):
    """Stores the given flags for `take_vllm_arguments`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        kept = getattr(namespace, DEST, None) or {}
        value = _read(self.dest, values, str(option_string))
        how = parser.typed.get(f"{option_string}={values}") or _written(self.dest, values, str(option_string))
        if isinstance(value, dict) and self.dest in kept:
            value, how = merge(kept[self.dest][0], value), f"{kept[self.dest][1]} {how}"
        setattr(namespace, DEST, {**kept, self.dest: (value, how)})


class _TakeAtOnce(argparse.Action):
    """Sets the option of a flag and keeps its value. Parsing fails for what is refused."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        value = _merged(getattr(namespace, self.dest, None), _read(self.dest, values, str(option_string)))
        try:
            options = translated(self.dest, value, _written(self.dest, values, str(option_string)))
        except ConfigError as error:
            parser.error(str(error))
        for option, translation in {**options, self.dest: value}.items():
            setattr(namespace, option, _merged(getattr(namespace, option, None), translation))


def _read(name: str, values: Any, option_string: str) -> Any:
    kind = _ALL[name].kind
    if kind == "switch":
        return option_string not in opposites(name)
    return [_value(entry) for entry in values] if kind == "list" else _value(values)


def _written(name: str, values: Any, option_string: str) -> str:
    """The flag as it was given, for messages."""
    if name in SECRETS or _ALL[name].kind == "optional" and values == "true":
        return option_string
    return " ".join([option_string, *([values] if isinstance(values, str) else values)])


def _merged(before: Any, value: Any) -> Any:
    return merge(before, value) if isinstance(before, dict) and isinstance(value, dict) else value


def _value(text: str) -> Any:
    if text.lower() == "none":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text

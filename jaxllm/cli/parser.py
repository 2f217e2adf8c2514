"""The argument parser of every command: flags from config fields, help by group or word, suggestions for typos."""

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from jaxllm.cli.flags import SHORT_NAMES, object_flags
from jaxllm.config import Flag, unknown_name
from jaxllm.errors import ConfigError
from jaxllm.flag_arguments import SEVERAL_WORDS, add_flag, spelling
from jaxllm.log import info_once
from jaxllm.vllm_compat import environment as vllm_environment
from jaxllm.vllm_compat.arguments import add_vllm_arguments, help_lines, notes_on_values, rewritten, take_vllm_arguments
from jaxllm.vllm_compat.flags import OLDER

MAX_CANDIDATES = 12
"""Most flags that the error of an ambiguous prefix lists."""
_LONG_NAMES = {short: spelling(name) for name, short in SHORT_NAMES.items()} | {"-O": "--compilation-config"}
"""Flags whose keys may follow their short names; `-O.mode=3` is vLLM's older way to write `-cc.mode=3`."""
_METAVARS: Mapping[Any, str] = {int: "N", float: "X"}


class UsageError(Exception):
    """Raised for arguments that exclude each other. The command ends with exit code 2."""


class Parser(argparse.ArgumentParser):
    """A command's parser. Omits generated flags that were not given from the result, to keep the origin of each value."""

    def __init__(self, command: str, about: str, examples: str = ""):
        about = _wrapped(about, 0)
        super().__init__(command, None, about, examples, allow_abbrev=False, add_help=False, formatter_class=Formatter)
        self.brief_groups: dict[str, argparse._ArgumentGroup] = {}
        """Groups that plain `--help` lists by name only."""
        self.takes_vllm_flags = False
        """Whether vLLM's flags for an engine are accepted or refused with the reason, instead of being unknown."""
        self.takes_model = False
        """Whether the model may be given without a flag."""
        self._short_usage = ""
        self.typed: dict[str, str] = {}
        """How keys of objects were typed, by the arguments that they have become."""
        self.notes: list[str] = []
        """Messages of parsing, for the log once it is set up."""
        text = "this text; --help=GROUP, --help=all or --help=WORD for more"
        self.add_argument("-h", "--help", action=_Help, nargs="?", metavar="WORD", default=argparse.SUPPRESS, help=text)

    def add_flags(self, flags: Iterable[Flag]) -> None:
        """Add an argument for each flag, in the flag's argument group."""
        for flag in flags:
            if flag.group not in self.brief_groups:
                self.brief_groups[flag.group] = self.add_argument_group(flag.group)
            add_flag(self.brief_groups[flag.group], flag, SHORT_NAMES)

    def add_model(self) -> None:
        """Add MODEL, which is another way to give --model."""
        self.takes_model = True
        self.add_argument("positional_model", nargs="?", metavar="MODEL", action=_Model, help="as --model")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The arguments as a namespace; exits with code 2 and one clear line if they are wrong."""
        if self.takes_vllm_flags:
            add_vllm_arguments(self)
            arguments = rewritten(arguments)
        joined = list(self._written_out(arguments))
        try:
            self.notes += notes_on_values(joined)
        except ValueError as error:
            self.error(str(error))
        self._short_usage = f"{self.prog} {_usage_of_positionals(self)}[options]"  # argparse hides positionals while it parses
        found, unknown = self.parse_known_intermixed_args(joined)
        if unknown:
            self._refuse(unknown[0])
        self._refuse_doubtful(found, joined)
        return found

    def take_vllm_flags(self, found: argparse.Namespace) -> None:
        """Apply vLLM's flags; exits with code 2 if one is refused. Called after the log is set up, because it may log, as it does
        about vLLM's variables in the environment."""
        for note in self.notes:
            info_once(note)
        if self.takes_vllm_flags:
            vllm_environment.report(os.environ)
        try:
            take_vllm_arguments(found)
        except ConfigError as error:
            self.error(str(error))

    def help_for(self, word: str) -> str:
        """Help for everything ("all"), for a group by its name, or for the flags whose name or text has the word."""
        wanted = word.lower().lstrip("-").replace("_", "-")
        groups = {_words(group.title or ""): group for group in self._action_groups}
        if wanted == "all":
            return self.format_help()
        if wanted in groups:
            return self._help_of([groups[wanted]], lambda action: True)
        found = self._help_of(
            groups.values(),
            lambda action: wanted in " ".join(action.option_strings).lower() or word.lower() in (action.help or "").lower(),
        )
        of_vllm = help_lines(word) if self.takes_vllm_flags else []
        if not found and not of_vllm:
            self.error(f"nothing about {word!r}; groups: {', '.join(groups)}")
        return found + ("\n".join(["\nFlags of vLLM:", *of_vllm, ""]) if of_vllm else "")

    def brief_help(self) -> str:
        """The command's own arguments in full, and the names of the flags of generated groups."""
        formatter = self._get_formatter()
        formatter.add_usage(self._short_usage, [], [])
        formatter.add_text(self.description)
        for group in self._action_groups:
            is_brief = (title := group.title) in self.brief_groups
            formatter.start_section(f"{title} (--help={_words(title or '')})" if is_brief else title)
            if is_brief:
                names = (
                    next(name for name in action.option_strings if name.startswith("--")) for action in group._group_actions
                )
                formatter.add_text(_wrapped(" ".join(names)))
            else:
                formatter.add_arguments(group._group_actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2, without a long usage message."""
        self.exit(2, f"{self.prog}: error: {message}\nrun `{self.prog} --help` for the options\n")

    def _help_of(self, groups: Iterable[argparse._ArgumentGroup], wants: Callable[[argparse.Action], bool]) -> str:
        """The help of some actions of these groups."""
        formatter = self._get_formatter()
        for group in groups:
            title = group.title or ""
            formatter.start_section(title[:1].upper() + title[1:])
            formatter.add_arguments(filter(wants, group._group_actions))
            formatter.end_section()
        return formatter.format_help()

    def _written_out(self, arguments: Sequence[str]) -> Iterator[str]:
        """The arguments as argparse takes them: names of flags whole and with dashes, and `--object.a.b value` as
        `--object={"a": {"b": value}}`. Exits with code 2 for an ambiguous name, and for a key without a value."""
        objects = object_flags()
        rest = iter(arguments)
        for argument in rest:
            if argument == "--":
                yield from (argument, *rest)
                return
            name, equals, value = argument.partition("=")
            flag, dot, path = name.partition(".")
            flag = _LONG_NAMES.get(flag, flag) if dot else flag
            if not flag.startswith("--") or flag == "--":
                yield argument
                continue
            flag = self._whole_name(flag, objects if dot else self._option_string_actions)
            if not dot or flag not in objects:
                yield flag + dot + path + equals + value
                continue
            text, keys = value if equals else next(rest, None), path.split(".")
            if text is None or not all(keys):
                self.error(f"{name} needs a key and a value: {flag}.key value")
            try:
                nested = json.loads(text)
            except ValueError:
                nested = text
            for key in reversed(keys):
                nested = {key: nested}
            joined = f"{flag}={json.dumps(nested)}"
            self.typed[joined] = argument if equals else f"{argument} {text}"
            yield joined

    def _whole_name(self, typed: str, known: Iterable[str]) -> str:
        """The one of the known flags that begins as typed, else what was typed. Exits with code 2 if there are several.

        Older names of vLLM's flags, which vLLM no longer has, make no prefix ambiguous.
        """
        actions, name = self._option_string_actions, typed.replace("_", "-")
        if name in actions:
            return name
        near = [option for option in known if option.startswith(name) and option in actions]
        options = [option for option in near if option[2:].replace("-", "_") not in OLDER] or near
        if len({id(actions[option]) for option in options}) > 1:
            others = f" and {len(options) - MAX_CANDIDATES} more" if len(options) > MAX_CANDIDATES else ""
            self.error(f"ambiguous option {typed!r}: it may be {', '.join(options[:MAX_CANDIDATES])}{others}")
        if not options:
            return name
        self.notes.append(f"{typed} is taken as {options[0]}")
        return options[0]

    def _refuse_doubtful(self, found: argparse.Namespace, arguments: Sequence[str]) -> None:
        """Detect `--api-key KEY MODEL`, which gives two keys and no model and is probably a mistake."""
        if not self.takes_model or "model" in found:
            return
        for flag in map(spelling, SEVERAL_WORDS):
            words = [*arguments, ""][arguments.index(flag) + 1 :] if flag in arguments else []
            if len(words) > 2 and not words[1].startswith("-"):
                self.error(f"{flag} takes every word after it, {words[1]!r} too; write the model before it or with --model")

    def _refuse(self, argument: str) -> NoReturn:
        if not argument.startswith("-"):
            self.error(f"unexpected argument {argument!r}" + ("; join numbers by commas: 8,64" if argument.isdigit() else ""))
        known = [option for action in self._actions for option in action.option_strings]
        self.error(unknown_name("option", argument.partition("=")[0], known))


class _Help(argparse.Action):
    """`--help` alone prints the brief help, `--help=WORD` the part that is asked for."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        sys.stdout.write(parser.help_for(values) if values else parser.brief_help())
        parser.exit(0)


class _Model(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if values is None:
            return
        if "model" in namespace:
            parser.error("give the model once: as MODEL or with --model")
        namespace.model = values


class Formatter(argparse.HelpFormatter):
    """argparse's layout, with a fixed width for pipes, examples as they are written, values named by their type, and defaults."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=34, width=min(_width(), 120))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in text.splitlines())

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return getattr(action.type, "metavar", None) or _METAVARS.get(action.type, "TEXT")

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        is_told = not isinstance(default, str | int | float) or default is False or default == argparse.SUPPRESS
        if is_told or action.help is None or "default:" in action.help:
            return action.help
        return f"{action.help} (default: {f'{default:g}' if isinstance(default, float) else default})"


def _words(title: str) -> str:
    """A group's title as it is typed after --help=."""
    return title.lower().replace(" ", "-")


def _usage_of_positionals(parser: argparse.ArgumentParser) -> str:
    names = [(str(action.metavar or action.dest), action.nargs) for action in parser._actions if not action.option_strings]
    return "".join({"*": f"[{name} …] ", "?": f"[{name}] "}.get(str(nargs), f"{name} ") for name, nargs in names)


def _width() -> int:
    return shutil.get_terminal_size((100, 24)).columns - 2 if sys.stdout.isatty() or "COLUMNS" in os.environ else 100


def _wrapped(text: str, margin: int = 4) -> str:
    return "\n".join(textwrap.wrap(text, max(min(_width(), 120) - margin, 20), break_on_hyphens=False))

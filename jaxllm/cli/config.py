"""`jaxllm config show`: every option, its value, and the origin of the value."""

import argparse
import json
import sys
from typing import Any

from jaxllm.cli import options, terminal
from jaxllm.cli.flags import all_flags, engine_flags, sampling_flags, server_flags
from jaxllm.cli.parser import Parser
from jaxllm.cli.settings import DEFAULT, Setting, resolve
from jaxllm.config import EngineConfig
from server.options import ServerOptions

SECRETS = frozenset({"api_key", "admin_api_key"})
HIDDEN = "(hidden)"
ABOUT = "Every option with its value and its origin: command line, environment, config file or default."
EXAMPLES = """examples:
  jaxllm config show --config my.yaml
  JAXLLM_OPT_MAX_NUM_SEQS=64 jaxllm config show --json
  jaxllm config show --max-model-len 8k"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("action", metavar="show", choices=["show"], help="print the options")
    options.add_config_argument(parser)
    parser.add_argument("--json", action="store_true", help="as a JSON object")
    parser.add_flags(sampling_flags())
    parser.add_flags(engine_flags())
    parser.add_flags(server_flags())


def run(arguments: argparse.Namespace) -> int:
    """Print the options. Returns the exit code."""
    settings = resolve(all_flags().values(), vars(arguments), arguments.config)
    EngineConfig.from_options(**{flag.name: settings[flag.name].value for flag in engine_flags()})
    ServerOptions.from_options(**{flag.name: settings[flag.name].value for flag in server_flags()})
    if arguments.json:
        print(json.dumps({name: {"value": _shown(setting), "origin": setting.origin} for name, setting in settings.items()}))
        return 0
    group = ""
    for name, setting in settings.items():
        if setting.flag.group != group:
            group = setting.flag.group
            print(f"# {group}")
        print(_line(name, setting))
    return 0


def _shown(setting: Setting) -> Any:
    """The value, with keys hidden: this output goes into bug reports."""
    return HIDDEN if setting.value is not None and setting.flag.name in SECRETS else setting.value


def _line(name: str, setting: Setting) -> str:
    """A line for a config file; commented out for keys, and for options that are neither set nor have a value."""
    value = _shown(setting)
    line = f"{'# ' if value == HIDDEN else ''}{name.replace('_', '-')}: {json.dumps(value)}"
    if setting.origin != DEFAULT:
        return terminal.styled(f"{line:<50} # {setting.origin}", "bold", sys.stdout)
    return f"# {line}" if setting.value is None else line

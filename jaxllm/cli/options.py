"""Arguments shared by commands that use a model, and the options resolved from them."""

import argparse
import os
from collections.abc import Iterable, Mapping
from typing import Any

from jaxllm import log
from jaxllm.cli import terminal
from jaxllm.cli.flags import engine_flags
from jaxllm.cli.parser import Parser, UsageError
from jaxllm.cli.progress_bars import make_progress
from jaxllm.cli.settings import chosen, resolve
from jaxllm.config import EngineConfig, Flag
from jaxllm.progress import Progress
from jaxllm.sampling_params import SamplingParams


def add_model_argument(parser: Parser) -> None:
    """Add the model as a positional argument."""
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="as --model")


def use_model_argument(arguments: argparse.Namespace) -> None:
    """Use MODEL as --model."""
    if arguments.positional_model is None:
        return
    if "model" in arguments:
        raise UsageError("give the model once: as MODEL or with --model")
    arguments.model = arguments.positional_model


def add_common_arguments(parser: Parser) -> None:
    """Add the arguments of every command that runs or plans a model."""
    parser.takes_vllm_flags = True
    add_log_arguments(parser)
    parser.add_argument("--config", metavar="FILE", help="YAML file with options; default: $JAXLLM_CONFIG")
    parser.add_argument("--dry-run", action="store_true", help="resolve everything, print the memory plan, load nothing")


def add_log_arguments(parser: Parser) -> None:
    """Add --quiet and -v."""
    level = parser.add_mutually_exclusive_group()
    level.add_argument("-q", "--quiet", action="store_true", help="no progress, no statistics, only errors on stderr")
    level.add_argument("-v", "--verbose", action="store_true", help="more log lines; tracebacks for errors")


def set_up_log(arguments: argparse.Namespace) -> None:
    """Set the log levels of the project and its libraries according to --quiet and -v."""
    form = getattr(arguments, "log_format", None)
    if arguments.verbose:
        log.set_up("debug", format=form)
    else:
        log.set_up("error" if arguments.quiet else None, terminal.LogLines(), form)
    if arguments.quiet:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine options set by command line, environment and file, validated."""
    options = chosen(resolve(engine_flags(), vars(arguments), arguments.config))
    EngineConfig.from_options(**options)
    return options


def sampling_options(arguments: argparse.Namespace, flags: Iterable[Flag]) -> dict[str, Any]:
    """The sampling values set by command line, environment and file, validated."""
    options = chosen(resolve(flags, vars(arguments), arguments.config))
    SamplingParams(**options)
    return options


def progress_for(arguments: argparse.Namespace, options: Mapping[str, Any]) -> Progress:
    """Choose bars, lines or no progress from --quiet, --no-use-progress-bar and whether the log is JSON lines."""
    return make_progress(quiet=arguments.quiet or log.writes_json() or not options.get("use_progress_bar", True))

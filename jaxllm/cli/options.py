"""Arguments shared by commands that use a model, the options resolved from them, and the adapters of --lora."""

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxllm import log
from jaxllm.cli import terminal
from jaxllm.cli.flags import engine_flags
from jaxllm.cli.numbers import name_value
from jaxllm.cli.parser import Parser, UsageError
from jaxllm.cli.progress_bars import make_progress
from jaxllm.cli.settings import chosen, resolve
from jaxllm.config import EngineConfig, Flag
from jaxllm.options.lora import LoRAOptions
from jaxllm.progress import Progress
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxllm.lora_request import LoRARequest
    from server.options import ServerOptions


def add_common_arguments(parser: Parser) -> None:
    """Add the arguments of every command that runs or plans a model."""
    parser.takes_vllm_flags = True
    add_log_arguments(parser)
    add_config_argument(parser)
    parser.add_argument("--dry-run", action="store_true", help="resolve everything, print the memory plan, load nothing")


def add_config_argument(parser: Parser) -> None:
    """Add --config."""
    parser.add_argument("--config", metavar="FILE", help="YAML file with options; default: $JAXLLM_CONFIG")


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


def engine_options(arguments: argparse.Namespace, complete: Callable[..., dict[str, Any]] = dict) -> dict[str, Any]:
    """The engine options set by command line, environment and file, completed and validated."""
    options = complete(chosen(resolve(engine_flags(), vars(arguments), arguments.config)))
    EngineConfig.from_options(**options)
    return options


def server_options(arguments: argparse.Namespace, flags: Iterable[Flag], **fixed: Any) -> "ServerOptions":
    """The server's options: these flags, set by command line, environment and file, and `fixed` ones. Validated by themselves."""
    from server.options import ServerOptions

    return ServerOptions.from_options(**chosen(resolve(flags, vars(arguments), arguments.config)), **fixed)


def sampling_options(arguments: argparse.Namespace, flags: Iterable[Flag]) -> dict[str, Any]:
    """The sampling values set by command line, environment and file, validated."""
    options = chosen(resolve(flags, vars(arguments), arguments.config))
    SamplingParams(**options)
    return options


def progress_for(arguments: argparse.Namespace, options: Mapping[str, Any]) -> Progress:
    """Choose bars, lines or no progress from --quiet, --no-use-progress-bar and whether the log is JSON lines."""
    return make_progress(quiet=arguments.quiet or log.writes_json() or not options.get("use_progress_bar", True))


def add_lora_argument(parser: Parser, help: str, *, several: bool = False) -> None:
    """Add --lora; with `several` it may be repeated."""
    text = f"{help}: a directory in PEFT's format or a hub id; sets --enable-lora"
    parser.add_argument("--lora", action="append" if several else "store", type=name_value, metavar="NAME=PATH", help=text)


def lora_requests(arguments: argparse.Namespace, engine_options: dict[str, Any]) -> "list[LoRARequest]":
    """The adapters of --lora; sets the engine's options that they need and that are not given. Raises UsageError or AdapterError."""
    if not arguments.lora:
        return []
    from jaxllm.lora_calls import adapter_directory, largest_rank  # both import msgspec
    from jaxllm.lora_request import LoRARequest

    if engine_options.get("enable_lora") is False:
        raise UsageError("--lora needs --enable-lora, which is switched off")
    named = arguments.lora if isinstance(arguments.lora, list) else [arguments.lora]
    names = [name for name, _ in named]
    if len(set(names)) < len(names):
        raise UsageError(f"--lora: two adapters have the name {max(names, key=names.count)!r}")
    directories = [adapter_directory(path, engine_options.get("download_dir")) for _, path in named]
    engine_options["enable_lora"] = True
    engine_options.setdefault("max_loras", len(named))
    if "max_lora_rank" not in engine_options:
        engine_options["max_lora_rank"] = max(LoRAOptions.max_lora_rank, *map(largest_rank, directories))
    return [LoRARequest(name, place, path) for place, (name, path) in enumerate(zip(names, directories, strict=True), 1)]


def the_lora_request(arguments: argparse.Namespace, engine_options: dict[str, Any]) -> "LoRARequest | None":
    """The adapter of --lora, of commands that take at most one."""
    return next(iter(lora_requests(arguments, engine_options)), None)

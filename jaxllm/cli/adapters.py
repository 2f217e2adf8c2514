"""--lora NAME=PATH of the commands that run a model in this process."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxllm.cli.numbers import name_value
from jaxllm.cli.parser import Parser, UsageError
from jaxllm.errors import ConfigError
from jaxllm.files import read_json
from jaxllm.lora_calls import adapter_directory
from jaxllm.lora_options import RANKS, LoRAOptions
from jaxllm.lora_request import LoRARequest


def add_lora_argument(parser: Parser, help: str, *, several: bool = False) -> None:
    """Add --lora; with `several` it may be repeated."""
    text = f"{help}: a directory in PEFT's format or a hub id; sets --enable-lora"
    parser.add_argument("--lora", action="append" if several else "store", type=name_value, metavar="NAME=PATH", help=text)


def lora_requests(arguments: argparse.Namespace, engine_options: dict[str, Any]) -> list[LoRARequest]:
    """The adapters of --lora; sets the engine's options that they need and that are not given. Raises UsageError or AdapterError."""
    if not arguments.lora:
        return []
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
        engine_options["max_lora_rank"] = max(LoRAOptions.max_lora_rank, *map(_rank, directories))
    return [LoRARequest(name, place, path) for place, (name, path) in enumerate(zip(names, directories, strict=True), 1)]


def the_lora_request(arguments: argparse.Namespace, engine_options: dict[str, Any]) -> LoRARequest | None:
    """The adapter of --lora, of commands that take at most one."""
    return next(iter(lora_requests(arguments, engine_options)), None)


def _rank(directory: str) -> int:
    """The largest rank in an adapter's config; 1 if it is not to be had, of which the engine tells more."""
    try:
        config: Any = read_json(str(Path(directory) / "adapter_config.json"))
    except ConfigError:
        return 1
    config = config if isinstance(config, dict) else {}
    of_modules: Any = config.get("rank_pattern")
    ranks: Iterable[Any] = [config.get("r"), *(of_modules.values() if isinstance(of_modules, dict) else ())]
    return max((rank for rank in ranks if type(rank) is int and 1 <= rank <= RANKS[-1]), default=1)

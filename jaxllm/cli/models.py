"""`jaxllm models`: the supported architectures, and the models on this machine."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxllm.cli import terminal
from jaxllm.cli.parser import Parser
from jaxllm.errors import ModelLoadError, shortened

ABOUT = "The supported architectures, and the models in the hub's cache on this machine."


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--download-dir", metavar="DIR", help="look here instead of the hub's own cache")
    parser.add_argument("--json", action="store_true", help="as a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print both lists. Returns the exit code."""
    from jaxllm.hub import DEMO, PACKAGED, cached_models, resolve_model
    from jaxllm.models.registry import architectures, is_known

    known, models = architectures(), []
    for name in (DEMO, *PACKAGED):
        with contextlib.suppress(ModelLoadError):  # its package is not installed
            directory = resolve_model(name)
            models.append(_describe(name, directory, sum(path.stat().st_size for path in directory.rglob("*")), is_known))
    for repo in cached_models(arguments.download_dir):
        newest = max(repo.revisions, key=lambda revision: revision.last_modified, default=None)
        if newest is not None:
            models.append(_describe(repo.repo_id, newest.snapshot_path, repo.size_on_disk, is_known))
    if arguments.json:
        print(json.dumps({"architectures": known, "models": models}))
        return 0
    print("architectures:", *known, sep="\n  ")
    print("and the text model of any other architecture whose text_config is of one of these\nmodels on this machine:")
    width = max(len(model["model"]) for model in models)
    for model in models:
        architecture = model["architecture"] or "no config.json"
        told = architecture if model["supported"] else terminal.styled(f"{architecture}: not supported", "red", sys.stdout)
        print(f"  {model['model']:<{width}}  {terminal.size(model['size_bytes']):>10}  {told}")
    return 0


def _describe(name: str, directory: Path, size_bytes: int, is_known: Callable[[Any], bool]) -> dict[str, Any]:
    from jaxllm.models.load_config import read_config_json

    architecture, is_supported = None, False
    with contextlib.suppress(AttributeError, LookupError, ModelLoadError, TypeError):
        config = read_config_json(directory)
        if (named := (config.get("architectures") or [None])[0]) is not None:
            architecture, is_supported = shortened(str(named)), is_known(config)
    return {"model": name, "size_bytes": size_bytes, "architecture": architecture, "supported": is_supported}

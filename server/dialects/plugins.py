"""Dialects of the operator's own, in a Python file or module that --tool-parser-plugin or --reasoning-parser-plugin names."""

import importlib
import importlib.util
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from jaxllm.errors import ConfigError
from server.dialects.dialect import Frame, ReasoningDialect, ToolDialect

T = TypeVar("T", bound=ToolDialect | ReasoningDialect)
_HELP = "docs/HOW_TO_ADD.md has an example"


def tool_dialects_of(plugin: str | None) -> Mapping[str, ToolDialect]:
    """The dialects in a plugin's TOOL_DIALECTS; none without a plugin. Raises ConfigError that names the option and the plugin."""
    return _dialects_of(plugin, "--tool-parser-plugin", "TOOL_DIALECTS", ToolDialect)


def reasoning_dialects_of(plugin: str | None) -> Mapping[str, ReasoningDialect]:
    """The dialects in a plugin's REASONING_DIALECTS; none without a plugin. Raises ConfigError that names the option and the plugin."""
    return _dialects_of(plugin, "--reasoning-parser-plugin", "REASONING_DIALECTS", ReasoningDialect)


def _dialects_of(plugin: str | None, option: str, attribute: str, kind: type[T]) -> Mapping[str, T]:
    if plugin is None:
        return {}
    try:
        found = getattr(_module(plugin), attribute, None)
    except (Exception, SystemExit) as error:  # whatever the operator's code raises
        told = f"{type(error).__name__}: {error}"
        hint = f"; plugins for vLLM do not run here: {_HELP}" if "vllm" in str(getattr(error, "name", "")) else ""
        raise ConfigError(f"{option} {plugin} cannot be imported: {told}{hint}") from error
    if not isinstance(found, Mapping) or not found:
        raise ConfigError(f"{option} {plugin} has no {attribute}, a dict of names and {kind.__name__}s; {_HELP}")
    for name, dialect in found.items():
        if not isinstance(name, str) or name == "none" or not isinstance(dialect, kind):
            raise ConfigError(
                f"{option} {plugin} has the entry {name!r} of type {type(dialect).__name__} in {attribute}; entries must have a name, "
                f"other than none, and be of type {kind.__name__}"
            )
        if fault := _fault(dialect):
            raise ConfigError(f"{option} {plugin} cannot be used: {name!r} in {attribute} {fault}; {_HELP}")
    return found


def _fault(dialect: ToolDialect | ReasoningDialect) -> str | None:
    """The first fault in the attributes of a dialect, as far as it can be seen before the first answer; None: nothing."""
    is_tool = isinstance(dialect, ToolDialect)
    for name in ("openings", "markers") if is_tool else ("start", "end", "answer_start", "answer_end", "markers"):
        texts = getattr(dialect, name)
        if not isinstance(texts, (tuple, list)) or not all(isinstance(text, str) and text for text in texts):
            return f"has {name} = {texts!r}, which must be a tuple of texts, none of them empty"
    if dialect.whole is not None:
        return None if callable(dialect.whole) else f"has whole = {dialect.whole!r}, which must be a function"
    if isinstance(dialect, ToolDialect):
        if not isinstance(dialect.bare_openings, str) or not isinstance(dialect.frame, Frame | None):
            return "has bare_openings that are no text, or a frame that is no Frame"
        return "has no method read" if type(dialect).read is ToolDialect.read else None
    if len(dialect.start) != len(dialect.end):
        return f"has {len(dialect.start)} markers in start and {len(dialect.end)} in end; the n-th closes what the n-th opens"
    return None


@lru_cache
def _module(plugin: str) -> ModuleType:
    """The module at a path of a file, if it ends with .py, else by its name."""
    if not plugin.endswith(".py"):
        return importlib.import_module(plugin)
    path = Path(plugin).expanduser()
    spec = importlib.util.spec_from_file_location(f"jaxllm_plugin_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # as its name ends with .py
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

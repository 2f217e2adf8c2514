"""Resolves the origin of an option's value: command line, environment, YAML file, vLLM's variables, default, in this order."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm import env
from jaxllm.cli.flags import all_flags, read_file_setting
from jaxllm.config import Flag, unknown_name
from jaxllm.errors import ConfigError
from jaxllm.files import read_text
from jaxllm.flag_arguments import read_text as read_option
from jaxllm.flag_arguments import spelling
from jaxllm.vllm_compat import environment as vllm_environment
from jaxllm.vllm_compat import flags as vllm_flags
from jaxllm.vllm_compat import values as vllm_values

COMMAND_LINE = "command line"
DEFAULT = "default"


@dataclass(frozen=True)
class Setting:
    """An option with its value and origin: "command line", "$VARIABLE", "file:line" or "default"."""

    flag: Flag
    value: Any
    origin: str


def resolve(flags: Iterable[Flag], given: Mapping[str, Any], config_file: str | None = None) -> dict[str, Setting]:
    """A setting for each flag. `given`: set on the command line. The file is `config_file`, else $JAXLLM_CONFIG, else none.

    Unknown names in file or environment are errors, even if this command does not use them. Logs what becomes of vLLM's variables.
    """
    in_file = read_config_file(config_file or os.environ.get(env.CONFIG_FILE) or None)
    in_environment = read_environment(os.environ)

    def own(flag: Flag) -> Setting:
        """Without vLLM's variables."""
        if flag.name in given:
            return Setting(flag, given[flag.name], COMMAND_LINE)
        if flag.name in in_environment:
            return Setting(flag, in_environment[flag.name], "$" + env.OPTION_PREFIX + flag.name.upper())
        value, origin = in_file.get(flag.name, (flag.default, DEFAULT))
        return Setting(flag, value, origin)

    settings = {flag.name: own(flag) for flag in flags}
    for name, setting in settings.items():
        if (found := vllm_environment.found_for(name, os.environ)) is None:
            continue
        variable, value = found
        if setting.origin != DEFAULT:
            vllm_environment.tell_unused(variable, f"{spelling(name)} is set ({setting.origin})")
        elif variable.needs and not own(all_flags()[variable.needs]).value:
            vllm_environment.tell_unused(variable, f"it needs {spelling(variable.needs)}")
        else:
            vllm_environment.tell_taken(variable)
            settings[name] = Setting(setting.flag, value, f"${variable.name}")
    return settings


def chosen(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """The explicitly set values, without the defaults."""
    return {name: setting.value for name, setting in settings.items() if setting.origin != DEFAULT}


def read_environment(variables: Mapping[str, str]) -> dict[str, Any]:
    """The options set by JAXLLM_OPT_…; an empty variable counts as unset. Raises ConfigError for unknown names, bad values."""
    known = all_flags()
    found = {}
    for variable, text in variables.items():
        if not variable.startswith(env.OPTION_PREFIX) or not text:
            continue
        name = variable.removeprefix(env.OPTION_PREFIX).lower()
        if name not in known:
            upper = [env.OPTION_PREFIX + option.upper() for option in known]
            raise ConfigError(unknown_name("environment variable", variable, upper))
        try:
            found[name] = read_option(known[name], text)
        except ValueError as error:
            raise ConfigError(f"environment variable {variable}: {error}") from None
        vllm_values.tell(name, text, f"{variable}={text}")
    return found


def read_config_file(path: str | None) -> dict[str, tuple[Any, str]]:
    """The options in a YAML file, each with "file:line". Raises ConfigError that names the line of the error."""
    if path is None:
        return {}
    known = all_flags()
    found: dict[str, tuple[Any, str]] = {}
    for key, value, line in _yaml_pairs(read_text(path, "the config file"), path):
        where = f"{path}:{line}"
        name = key.replace("-", "_")
        if name in vllm_flags.TABLE and name not in known:
            settings = vllm_flags.translated(name, value, f"{where}: {key}")
        else:
            settings = dict([read_file_setting(key, value, known, where)])
            vllm_values.tell(name, value, f"{where}: {key} {value}")
        for name, typed in settings.items():
            before, origin = found.get(name, (None, where))
            if isinstance(before, Mapping) and isinstance(typed, Mapping) and not before.keys() & typed.keys():
                typed = {**before, **typed}  # vLLM has names for single keys
            elif name in found:
                raise ConfigError(f"{where}: {key} is set already at {origin}")
            found[name] = (typed, origin)
    return found


def _yaml_pairs(text: str, path: str) -> list[tuple[str, Any, int]]:
    """Key, value and line of each pair at the top of a YAML document."""
    import yaml  # here, so that commands without a file start faster

    construct: Any = yaml.constructor.SafeConstructor().construct_object
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path}:{node.start_mark.line + 1}: must hold `option: value` lines")
        return [(str(key.value), construct(value, deep=True), key.start_mark.line + 1) for key, value in node.value]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        raise ConfigError(f"{where}: not YAML: {getattr(error, 'problem', error)}") from None

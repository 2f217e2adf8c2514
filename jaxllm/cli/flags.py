"""The command line's options, and the values that files have for them. Imports only light modules."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from jaxllm.config import Flag, flags, unknown_name
from jaxllm.errors import ConfigError
from jaxllm.flag_arguments import is_object, read_value, spelling
from jaxllm.sampling_params import MODEL_DEFAULTS, SamplingParams
from jaxllm.vllm_compat import flags as vllm_flags

NO_FLAGS: Mapping[str, str] = {"seed": "the engine's --seed seeds every request that has none"}
"""Annotated fields of SamplingParams without a flag, with the reason."""
NOT_IN_FILES: Mapping[str, str] = {
    "output_kind": "follows from whether the command streams",
    "stream_interval": "a terminal is written to at every token",
    "flat_logprobs": "a choice of Python container",
    "guided_decoding": "the older name of structured_outputs",
    "bad_words_token_ids": "filled by the input processor from bad_words",
}
"""Fields of SamplingParams that a line of a prompt file cannot set, with the reason."""
MAX_TOKENS_HELP = "most tokens of each answer; default: the model's own, else 256, in chat as many as the context has room for"

SHORT_NAMES: Mapping[str, str] = {"model": "-m", **vllm_flags.SHORT_NAMES}


def engine_flags() -> list[Flag]:
    """Every option of the engine."""
    return flags()


def sampling_flags() -> list[Flag]:
    """The annotated fields of SamplingParams, with the command line's defaults."""
    found = []
    for flag in flags(SamplingParams):
        if flag.name == "max_tokens":
            flag = dataclasses.replace(flag, help=MAX_TOKENS_HELP, default=None)
        elif flag.name in MODEL_DEFAULTS:
            flag = dataclasses.replace(flag, help=f"{flag.help}; default: the model's own, else {flag.default:g}", default=None)
        if flag.name not in NO_FLAGS:
            found.append(flag)
    return found


def shaping_flags() -> list[Flag]:
    """The sampling flags that shape the distribution of tokens, and so affect the work of a step."""
    return [flag for flag in sampling_flags() if flag.type is float or flag.name == "top_k"]


def request_flags() -> dict[str, Flag]:
    """The request settings allowed in a line of a prompt file: nearly every field of SamplingParams."""
    hints = typing.get_type_hints(SamplingParams)
    names = [f.name for f in dataclasses.fields(SamplingParams) if f.name not in NOT_IN_FILES]
    return {name: Flag(name, "Sampling", "", None, hints[name]) for name in names}


def server_flags() -> list[Flag]:
    """Every option of the server."""
    from server.options import server_flags

    return server_flags()


def all_flags() -> dict[str, Flag]:
    """Everything that the YAML file and the environment may set, by name."""
    return {flag.name: flag for flag in (*engine_flags(), *sampling_flags(), *server_flags())}


def read_file_setting(name: str, value: Any, known: Mapping[str, Flag], where: str) -> tuple[str, Any]:
    """One `name: value` of a file, in either spelling, as (field name, typed value). Raises ConfigError that names `where`."""
    field = str(name).replace("-", "_")
    if field not in known:
        raise ConfigError(f"{where}: {unknown_name('option', str(name), known)}")
    try:
        return field, read_value(known[field], value)
    except ValueError as error:
        raise ConfigError(f"{where}: {name}: {error}") from None


def object_flags() -> set[str]:
    """The flags that take JSON objects, ours and vLLM's."""
    of_vllm = {flag.name for flag in vllm_flags.TABLE.values() if flag.kind == "object"}
    return {spelling(name) for name in of_vllm | {name for name, flag in all_flags().items() if is_object(flag)}}

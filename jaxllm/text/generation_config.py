"""Reads a model's generation_config.json: default sampling values, and token ids that end the output."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.sampling_params import MODEL_DEFAULTS, SamplingParams
from jaxllm.text.model_files import read_json

FILE_NAME = "generation_config.json"
_SAMPLING_FIELDS = {**{name: name for name in MODEL_DEFAULTS}, "max_new_tokens": "max_tokens"}
"""Names in the file to those of SamplingParams."""


@dataclass(frozen=True)
class GenerationConfig:
    """The part of generation_config.json that the engine uses."""

    sampling_values: Mapping[str, Any] = field(default_factory=dict)
    """By the names of SamplingParams."""
    eos_token_ids: tuple[int, ...] = ()


def load_generation_config(
    option: str, model_directory: Path | None, override: Mapping[str, Any] | None = None
) -> GenerationConfig:
    """`option` is "auto", "none" (no sampling values; the model's EOS ids still count) or a directory.

    `override` has sampling values, under the file's names or those of SamplingParams, that win. Raises ConfigError.
    """
    directory = model_directory
    if option not in ("auto", "none"):
        directory = Path(option).expanduser()
        if not (directory / FILE_NAME).is_file():
            raise ConfigError(f"generation_config is {option!r}, must be auto, none or a directory with {FILE_NAME}")
    found = read_json(directory / FILE_NAME) if directory is not None else {}
    values = {ours: found[theirs] for theirs, ours in _SAMPLING_FIELDS.items() if found.get(theirs) is not None}
    eos = found.get("eos_token_id")
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    return GenerationConfig(({} if option == "none" else values) | _checked(override or {}), eos_ids)


def _checked(override: Mapping[str, Any]) -> dict[str, Any]:
    values = {_SAMPLING_FIELDS.get(name, name): value for name, value in override.items()}
    if unknown := values.keys() - set(_SAMPLING_FIELDS.values()):
        raise ConfigError(f"override_generation_config has {min(unknown)!r}, can have {', '.join(_SAMPLING_FIELDS)}")
    try:
        SamplingParams(**values)
    except InvalidRequestError as error:
        raise ConfigError(f"override_generation_config: {error}") from error
    return values

"""Reads a model's generation_config.json: default sampling values, and token ids that end the output.

Where it sets no sampling value, conversations have those of llama.cpp, because small models write nonsense at temperature 1; APIs whose
own defaults clients know keep them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError, InvalidRequestError, ModelLoadError, shortened
from jaxllm.sampling_params import MODEL_DEFAULTS, SamplingParams
from jaxllm.served_model import read_token_ids
from jaxllm.text.model_files import read_json

FILE_NAME = "generation_config.json"
_SAMPLING_FIELDS = {**{name: name for name in MODEL_DEFAULTS}, "max_new_tokens": "max_tokens"}
"""Names in the file to those of SamplingParams."""
LLAMA_CPP: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""llama.cpp's own defaults (common_params_sampling in common/common.h)."""


@dataclass(frozen=True)
class GenerationConfig:
    """The part of generation_config.json that the engine uses."""

    sampling_values: Mapping[str, Any] = field(default_factory=dict)
    """By the names of SamplingParams."""
    eos_token_ids: tuple[int, ...] = ()
    completes_chats: bool = False
    """Whether conversations have LLAMA_CPP's values where `sampling_values` has none."""
    origin: str = field(default="", compare=False)
    """Where the values of conversations come from, for the log."""

    @property
    def chat_values(self) -> Mapping[str, Any]:
        """The sampling values of conversations."""
        return {**LLAMA_CPP, **self.sampling_values} if self.completes_chats else self.sampling_values

    def describe_chats(self) -> str:
        """`temperature 0.8, top_k 40 (where from)`"""
        told = ", ".join(f"{name} {value}" for name, value in self.chat_values.items()) or "no values"
        return f"{told} ({self.origin})"


def load_generation_config(
    option: str, model_directory: Path | None, override: Mapping[str, Any] | None = None
) -> GenerationConfig:
    """`option` is "auto", "none" (no sampling values; the model's EOS ids still count) or a directory.

    `override` has sampling values, under the file's names or those of SamplingParams, that win. Raises ConfigError, or ModelLoadError
    for a file with values that cannot be sampled with.
    """
    directory = model_directory
    if option not in ("auto", "none"):
        directory = Path(option).expanduser()
        if not (directory / FILE_NAME).is_file():
            raise ConfigError(f"generation_config is {option!r}, must be auto, none or a directory with {FILE_NAME}")
    found = read_json(directory / FILE_NAME) if directory is not None else {}
    values = {ours: found[theirs] for theirs, ours in _SAMPLING_FIELDS.items() if found.get(theirs) is not None}
    try:
        SamplingParams(**values)
        eos_ids = read_token_ids(found.get("eos_token_id"))
    except (TypeError, ValueError, OverflowError) as error:
        told = error if isinstance(error, InvalidRequestError) else f"eos_token_id {error}"
        raise ModelLoadError(f"{directory and directory / FILE_NAME}: {shortened(str(told))}; correct it") from error
    overridden = _checked(override or {})
    is_silent = option != "none" and not values.keys() & set(MODEL_DEFAULTS)
    if option == "none":
        values, origin = {}, "generation_config is none"
    elif is_silent:
        origin = f"llama.cpp's defaults, as the model's {FILE_NAME} {'sets none' if found else 'is missing'}"
    else:
        origin = f"the model's {FILE_NAME}"
    origin += ", override_generation_config" if overridden else ""
    return GenerationConfig(values | overridden, eos_ids, is_silent, origin)


def _checked(override: Mapping[str, Any]) -> dict[str, Any]:
    values = {_SAMPLING_FIELDS.get(name, name): value for name, value in override.items()}
    if unknown := values.keys() - set(_SAMPLING_FIELDS.values()):
        raise ConfigError(f"override_generation_config has {min(unknown)!r}, can have {', '.join(_SAMPLING_FIELDS)}")
    try:
        SamplingParams(**values)
    except InvalidRequestError as error:
        raise ConfigError(f"override_generation_config: {error}") from error
    return values

"""adapter_config.json of PEFT: which LoRA it describes, and whether that can be served. Needs no JAX."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import regex

from jaxllm.errors import AdapterError

Number = TypeVar("Number", int, float)

CONFIG = "adapter_config.json"
MERGE = "merge it into its base with PEFT's merge_and_unload() and serve the result as a model"
_CONVERT = "save it again as a plain LoRA (PEFT's save_pretrained with path_initial_model_for_weight_conversion)"
_UNSUPPORTED = {
    "use_dora": f"DoRA also scales the base's weights; {MERGE}",
    "lora_bias": f"biases of LoRA layers are not supported; {MERGE}",
    "modules_to_save": f"whole modules that were trained beside the LoRA are not supported; {MERGE}",
    "trainable_token_indices": f"trained embeddings of single tokens are not supported; {MERGE}",
    "layer_replication": f"the base's layers cannot be repeated for an adapter; {MERGE}",
    "alora_invocation_tokens": "an activated LoRA (aLoRA), which begins in the middle of a prompt, is not supported; train a LoRA",
    "use_qalora": "QALoRA pools its inputs, which is not supported; train a LoRA",
    "use_bdlora": "block-diagonal LoRA is not supported; train a LoRA",
    "arrow_config": "Arrow's routing between adapters is not supported; serve the single adapters",
    "kasa_config": f"KaSA changes the base's weights; {MERGE}",
    "monteclora_config": "MonteCLoRA is not supported; train a LoRA",
    "megatron_config": "LoRA layers of Megatron are not supported; convert the adapter to layers of transformers",
}
"""Fields that must be unset, and why."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""How values of `init_lora_weights` begin with which training starts from a changed base."""
_MATCH_SECONDS = 0.1
"""Longest time for a pattern and a name."""


_Rank = Annotated[int, msgspec.Meta(ge=1, le=2**31)]


class _Fields(msgspec.Struct):
    """What is read of the file, with PEFT's defaults where it always had one."""

    r: _Rank
    lora_alpha: float
    peft_type: str | None = None
    task_type: str | None = None
    base_model_name_or_path: str | None = None
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    rank_pattern: dict[str, _Rank] | None = None
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool | None = None
    bias: str | None = None
    init_lora_weights: bool | str | None = None


@dataclass(frozen=True)
class PeftConfig:
    """The LoRA that an adapter_config.json describes."""

    directory: Path
    rank: int
    alpha: float
    rank_pattern: Mapping["regex.Pattern[str]", int]
    alpha_pattern: Mapping["regex.Pattern[str]", float]
    """By what the names of modules end in; the first that fits counts."""
    root_of_rank: bool
    """Whether the scale is alpha / sqrt(rank) instead of alpha / rank: rsLoRA."""
    target_modules: tuple[str, ...] | str | None
    """Ends of names, or a regular expression."""
    target_parameters: tuple[str, ...]
    """Ends of names."""
    base_model: str | None
    task_type: str | None

    def rank_of(self, module: str) -> int:
        """The rank of a module, or of a parameter that was adapted by itself."""
        return self._of(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What B @ A is multiplied by."""
        rank = self.rank_of(module)
        return self._of(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.root_of_rank else rank)

    def _of(self, patterns: Mapping["regex.Pattern[str]", Number], module: str, default: Number) -> Number:
        try:
            # Other threads go on meanwhile.
            matches = (
                value for pattern, value in patterns.items() if pattern.match(module, timeout=_MATCH_SECONDS, concurrent=True)
            )
            return next(matches, default)
        except (TimeoutError, RecursionError) as error:
            raise AdapterError(
                f"adapter {self.directory}: a pattern in rank_pattern or alpha_pattern of {CONFIG} takes too long for {module}; "
                "give the names of modules there"
            ) from error


def read_config(directory: Path) -> PeftConfig:
    """Raises AdapterError if the file is missing or broken, or describes what is not supported."""
    file = directory / CONFIG
    try:
        text = file.read_bytes()
    except OSError as error:
        raise AdapterError(
            f"adapter {directory}: cannot read {CONFIG} ({error.strerror}); give the directory that PEFT's save_pretrained wrote"
        ) from error
    try:
        values = msgspec.json.decode(text)
        if isinstance(values, dict):
            _check_supported(directory, values)
        fields = msgspec.convert(values, _Fields)
        return _config(directory, fields)
    except (ValueError, OverflowError, RecursionError, regex.error) as error:  # those of msgspec are ValueErrors
        raise AdapterError(
            f"adapter {directory}: {CONFIG} is broken: {error}; correct it, or save the adapter again"
        ) from error


def _check_supported(directory: Path, values: Mapping[str, Any]) -> None:
    def refuse(field: str, why: str) -> None:
        raise AdapterError(f"adapter {directory}: {CONFIG} has {field}={values[field]!r:.200}: {why}")

    if values.get("peft_type") not in (None, "LORA"):
        refuse("peft_type", 'only "LORA" is supported; train a LoRA, or merge the adapter into its base and serve the result')
    for field, why in _UNSUPPORTED.items():
        if values.get(field):
            refuse(field, why)
    if values.get("bias") not in (None, "none"):
        refuse("bias", f"adapters with trained biases are not supported; {MERGE}")
    if str(values.get("init_lora_weights")).lower().startswith(_CHANGES_BASE):
        refuse("init_lora_weights", f"it was trained on a base whose weights were changed first; {_CONVERT}, or {MERGE}")


def _config(directory: Path, fields: _Fields) -> PeftConfig:
    for alpha in (fields.lora_alpha, *(fields.alpha_pattern or {}).values()):
        if not math.isfinite(alpha):
            raise ValueError(f"an alpha is {alpha}, must be a finite number")
    return PeftConfig(
        directory=directory,
        rank=fields.r,
        alpha=fields.lora_alpha,
        rank_pattern=_compiled(fields.rank_pattern),
        alpha_pattern=_compiled(fields.alpha_pattern),
        root_of_rank=bool(fields.use_rslora),
        target_modules=tuple(fields.target_modules) if isinstance(fields.target_modules, list) else fields.target_modules,
        target_parameters=tuple(fields.target_parameters or ()),
        base_model=fields.base_model_name_or_path,
        task_type=fields.task_type,
    )


def _compiled(patterns: Mapping[str, Number] | None) -> dict["regex.Pattern[str]", Number]:
    return {regex.compile(rf"(.*\.)?({pattern})$"): value for pattern, value in (patterns or {}).items()}

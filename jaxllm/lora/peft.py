"""adapter_config.json of PEFT: which LoRA it describes, and whether that can be served. Needs no JAX."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import regex

from jaxllm.errors import AdapterError
from jaxllm.files import read_bounded
from jaxllm.lora.patterns import Number, Patterns

CONFIG = "adapter_config.json"
MAX_CONFIG_BYTES = 2**19
"""Size of an adapter_config.json: some 30 000 for a separate rank in each of 500 modules."""
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
_SHOWN = 200
"""Characters of a text that messages have."""
_SMALL_BYTES = 4096
"""Size of the value of a field that must be unset; longer ones are not looked at."""

_Rank = Annotated[int, msgspec.Meta(ge=1, le=2**31)]


class _Fields(msgspec.Struct):
    """The fields that are read from the file, with PEFT's defaults where it always had one."""

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
    ensure_weight_tying: bool | None = None


@dataclass(frozen=True)
class PeftConfig:
    """The LoRA that an adapter_config.json describes."""

    directory: Path
    rank: int
    alpha: float
    rank_pattern: Patterns[int]
    alpha_pattern: Patterns[float]
    root_of_rank: bool
    """Whether the scale is alpha / sqrt(rank) instead of alpha / rank: rsLoRA."""
    target_modules: frozenset[str] | str | None
    """Ends of names, or a regular expression."""
    target_parameters: frozenset[str]
    """Ends of names."""
    base_model: str
    task_type: str
    """Both are empty if the file has none."""
    ties_weights: bool = False
    """Whether the LoRA of the embedding is the head's too; the file has both, and target_modules only one."""

    def rank_of(self, module: str) -> int:
        """The rank of a module, or of a parameter that was adapted by itself."""
        return self._of(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Factor of B @ A."""
        rank = self.rank_of(module)
        return self._of(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.root_of_rank else rank)

    def _of(self, patterns: Patterns[Number], module: str, default: Number) -> Number:
        try:
            found = patterns.find(module)
        except (TimeoutError, RecursionError) as error:
            raise AdapterError(
                f"adapter {self.directory}: a pattern in rank_pattern or alpha_pattern of {CONFIG} takes too long for {module}; "
                "give the names of modules there"
            ) from error
        return default if found is None else found


def read_config(directory: Path) -> PeftConfig:
    """Raises AdapterError if the file is missing or broken, or describes what is not supported."""
    try:
        text = read_bounded(directory / CONFIG, MAX_CONFIG_BYTES, AdapterError)
    except AdapterError as error:
        raise AdapterError(f"adapter {directory}: {error}; give the directory that PEFT's save_pretrained wrote") from error
    try:
        _check_supported(directory, msgspec.json.decode(text, type=dict[str, msgspec.Raw]))
        return _config(directory, msgspec.json.decode(text, type=_Fields))
    except (ValueError, OverflowError, RecursionError, regex.error) as error:  # those of msgspec are ValueErrors
        raise AdapterError(
            f"adapter {directory}: {CONFIG} is broken: {error}; correct it, or save the adapter again"
        ) from error


def _check_supported(directory: Path, fields: Mapping[str, msgspec.Raw]) -> None:
    names = (*_UNSUPPORTED, "peft_type", "bias", "init_lora_weights")
    values = {name: _small(fields[name]) for name in names if name in fields}

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
        rank_pattern=Patterns(fields.rank_pattern),
        alpha_pattern=Patterns(fields.alpha_pattern),
        root_of_rank=bool(fields.use_rslora),
        target_modules=frozenset(fields.target_modules) if isinstance(fields.target_modules, list) else fields.target_modules,
        target_parameters=frozenset(fields.target_parameters or ()),
        base_model=(fields.base_model_name_or_path or "")[:_SHOWN],
        task_type=(fields.task_type or "")[:_SHOWN],
        ties_weights=bool(fields.ensure_weight_tying),
    )


def _small(value: msgspec.Raw) -> Any:
    text = bytes(value)
    return msgspec.json.decode(text) if len(text) <= _SMALL_BYTES else text

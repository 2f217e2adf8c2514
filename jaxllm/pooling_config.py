"""The pooling method of a checkpoint: read from sentence-transformers' files, or the default of its family."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from jaxllm.errors import ConfigError, ModelLoadError, shortened
from jaxllm.files import read_json

PoolingType = Literal["last", "mean", "cls"]
FILES = ("modules.json", "*/config.json", "config_sentence_transformers.json", "sentence_bert_config.json")
"""Where sentence-transformers says how to pool, as patterns of what to download."""

_MODES = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean", "last": "last", "cls_token": "cls", "cls": "cls"}
_TYPE_KEYS = ("pooling_type", "seq_pooling_type")
_OVERRIDES = (*_TYPE_KEYS, "use_activation", "normalize")
_NO_HEAD = "scores are those of the checkpoint's head, or cosines of embeddings (docs/EMBEDDINGS.md)"
_ELSEWHERE: Mapping[str, tuple[Any, ...]] = {
    "task": ("requests say what they want, vectors of prompts or of tokens", "embed", "token_embed", "embed&token_embed"),
    "tok_pooling_type": ("vectors of tokens are those of all tokens", "ALL", "all"),
    "logit_mean": (_NO_HEAD,),
    "logit_sigma": (_NO_HEAD,),
    "step_tag_id": (_NO_HEAD,),
    "returned_token_ids": (_NO_HEAD,),
    "dimensions": ("a request asks for fewer dimensions",),
    "enable_chunked_processing": ("a prompt is pooled as a whole, up to --max-model-len tokens", False),
    "max_embed_len": ("a prompt is pooled as a whole, up to --max-model-len tokens",),
    "enable_flash_late_interaction": ("scores of many vectors are not offered", True, False),
}
"""Other keys of vLLM's object: why they are not supported, and values that ask for nothing."""
_TYPES_ELSEWHERE = {
    "cls": "a first token that sees all others needs an encoder",
    "all": "requests ask for the vectors of all tokens with the task token_embed",
    "step": _NO_HEAD,
}
"""Other values of vLLM's pooling_type, with the reason."""
_BIDIRECTIONAL = {"is_causal": False, "use_bidirectional_attention": True, "bidirectional": True}
"""Values of config.json, by key, for models in which tokens see those after them."""


@dataclass(frozen=True)
class PoolingConfig:
    """How a model makes one vector of a prompt's hidden states."""

    pooling_type: PoolingType = "last"
    """The hidden state of the last token, the mean over all tokens, or the hidden state of the first token."""
    normalize: bool = True
    """Whether vectors are divided by their length unless a request says otherwise."""
    matryoshka_dimensions: tuple[int, ...] | None = None
    """Lengths to which vectors may be cut; empty: any; None: the model was not trained for it."""
    prompt_names: tuple[str, ...] = ()
    """Prompts that sentence-transformers would put before a text if asked by name. Callers write them themselves."""
    max_length: int | None = None
    """Most tokens that sentence-transformers would give the model."""


def is_embedding_checkpoint(directory: Path) -> bool:
    """Whether sentence-transformers' files are next to the weights."""
    return (directory / "modules.json").is_file()


def load_pooling_config(
    directory: Path,
    raw: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    default: PoolingConfig | None = None,
    is_encoder: bool = False,
    is_classifier: bool = False,
) -> PoolingConfig:
    """The pooling of a model directory with this config.json.

    `overrides`: the engine's option pooler_config. default: of its family. A classifier pools as its family does, whatever
    sentence-transformers' files say. Raises ModelLoadError for a checkpoint that pools in another way, ConfigError for overrides that
    make no sense.
    """
    config, types = default or PoolingConfig(), get_args(PoolingType) if is_encoder else ("last", "mean")
    if is_embedding_checkpoint(directory) and not is_classifier:
        config = _read_modules(directory, types, has_type=any(name in (overrides or {}) for name in _TYPE_KEYS))
    return _overridden(replace(config, matryoshka_dimensions=_matryoshka(directory, raw)), overrides or {}, types)


def bidirectional_faults(raw: Mapping[str, Any]) -> list[str]:
    """The key of config.json that asks for attention to later tokens, which is not supported."""
    return [
        f"{name} is {raw[name]!r}, supported: causal attention only"
        for name, value in _BIDIRECTIONAL.items()
        if name in raw and raw[name] is value
    ]


def _read_modules(directory: Path, types: Sequence[str], *, has_type: bool) -> PoolingConfig:
    """sentence-transformers' chain of modules: Transformer, Pooling, perhaps Normalize."""
    file = directory / "modules.json"
    modules = read_json(file, error=ModelLoadError)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelLoadError(f"{file} is not a list of modules")
    pooling, normalize = PoolingConfig().pooling_type, False
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            if not has_type:
                pooling = _pooling_type(directory / _folder(file, module) / "config.json", types)
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ModelLoadError(
                f"{file} has the module {shortened(repr(kind or module))}, supported: Transformer, Pooling and Normalize"
            )
    transformer = _object(directory / "sentence_bert_config.json")
    if transformer.get("do_lower_case") is True:
        raise ModelLoadError(f"{directory / 'sentence_bert_config.json'}: do_lower_case is true, which is not supported")
    length = transformer.get("max_seq_length")
    prompts = _object(directory / "config_sentence_transformers.json").get("prompts")
    return PoolingConfig(
        pooling_type=pooling,
        normalize=normalize,
        prompt_names=tuple(map(str, prompts)) if isinstance(prompts, dict) else (),
        max_length=length if isinstance(length, int) and not isinstance(length, bool) and length > 0 else None,
    )


def _folder(file: Path, module: Mapping[str, Any]) -> str:
    name = module.get("path", "")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{0,100}", name) or name == "..":
        raise ModelLoadError(f"{file} has a module with the path {shortened(repr(name))}, must be a folder beside the file")
    return name


def _pooling_type(file: Path, types: Sequence[str]) -> PoolingType:
    """From the flags pooling_mode_*, or in newer files from the text pooling_mode."""
    raw = _object(file)
    chosen = raw.get("pooling_mode")
    if chosen is None:
        names = [name for name, on in raw.items() if name.startswith("pooling_mode_") and on is True]
        chosen = [name.removeprefix("pooling_mode_") for name in names]
    modes = [chosen] if isinstance(chosen, str) else chosen
    if (
        not isinstance(modes, list)
        or not all(isinstance(mode, str) for mode in modes)
        or len(modes) != 1
        or _MODES.get(modes[0]) not in types
    ):
        found = shortened(" and ".join(map(str, modes))) if isinstance(modes, list) and modes else "nothing"
        raise ModelLoadError(
            f"{file} pools by {found}, supported: {' or '.join(types)}; choose one with --pooler-config "
            '\'{"pooling_type": "last"}\''
        )
    pooling: PoolingType = _MODES[modes[0]]  # type: ignore[assignment]
    if pooling == "mean" and raw.get("include_prompt") is False:
        raise ModelLoadError(f"{file}: include_prompt is false, supported: the mean over all tokens")
    return pooling


def _matryoshka(directory: Path, raw: Mapping[str, Any]) -> tuple[int, ...] | None:
    lengths = raw.get("matryoshka_dimensions")
    if isinstance(lengths, list) and lengths:
        if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in lengths):
            raise ModelLoadError(
                f"{directory / 'config.json'}: matryoshka_dimensions is {shortened(repr(lengths))}, must be positive integers"
            )
        return tuple(sorted(lengths))
    return () if raw.get("is_matryoshka") is True else None


def _overridden(config: PoolingConfig, overrides: Mapping[str, Any], types: Sequence[str]) -> PoolingConfig:
    for name, value in overrides.items():
        if name in _ELSEWHERE:
            reason, *harmless = _ELSEWHERE[name]
            if value is not None and value not in harmless:
                raise ConfigError(f"pooler_config.{name} is {value!r}, which is not supported: {reason}")
        elif name not in _OVERRIDES:
            raise ConfigError(f"pooler_config has the unknown key {name!r}; known: {', '.join(_OVERRIDES)}")
    wanted = overrides.get("pooling_type", overrides.get("seq_pooling_type"))
    if wanted is not None:
        if not isinstance(wanted, str) or wanted.lower() not in types:
            reason = _TYPES_ELSEWHERE.get(str(wanted).lower())
            raise ConfigError(
                f"pooler_config: pooling_type is {wanted!r}, must be {' or '.join(types)}" + (f": {reason}" if reason else "")
            )
        config = replace(config, pooling_type=wanted.lower())  # type: ignore[arg-type]
    normalize = overrides.get("use_activation", overrides.get("normalize"))
    if normalize is not None:
        if not isinstance(normalize, bool):
            raise ConfigError(f"pooler_config: normalize is {normalize!r}, must be true or false")
        config = replace(config, normalize=normalize)
    return config


def _object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one if there is no such file."""
    found = read_json(file, error=ModelLoadError) if file.is_file() else {}
    if not isinstance(found, dict):
        raise ModelLoadError(f"{file} holds a JSON {type(found).__name__}, must hold an object")
    return found

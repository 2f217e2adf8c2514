"""Reads the files of a model directory that describe the model, as a `ModelConfig`."""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError, JaxLLMError, ModelLoadError, joined
from jaxllm.files import read_json
from jaxllm.hub import CONFIG_FILES
from jaxllm.model_config import DTYPES, FP8, ModelConfig
from jaxllm.model_parts import Names
from jaxllm.models import mistral_params
from jaxllm.models.classifier import with_classifier
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.registry import Read, find
from jaxllm.models.text_part import without_rope_sections
from jaxllm.options.quantization import QUANTIZATION_FILES, WIDENED
from jaxllm.pooling_config import bidirectional_faults, is_embedding_checkpoint, load_pooling_config
from jaxllm.quantization.formats import read_formats
from jaxllm.served_model import GGUF_TYPE, read_token_ids
from jaxllm.weight_format import Options


def load_model_config(
    directory: Path | str,
    *,
    overrides: Mapping[str, Any] | None = None,
    dtype: str = "auto",
    on_gpu: bool = False,
    quantization: str | None = None,
    quantize_lm_head: str | None = None,
    dequantize: bool | None = None,
    kv_cache_dtype: str = "auto",
    runner: str = "auto",
    pooler_config: Mapping[str, Any] | None = None,
    max_model_len: int | None = None,
    expert_parallel: bool = False,
    model_class: str | None = None,
    language_model_only: bool = False,
) -> ModelConfig:
    """Read config.json (and the EOS ids of generation_config.json) of a model directory.

    `overrides` is laid over the top level of config.json. dtype "auto" is the checkpoint's on a GPU and float32 on a CPU, where
    narrower types are emulated. quantization: the format that linear layers get while they are loaded; None: as the checkpoint says.
    quantize_lm_head: the numbers that the head gets while it is loaded; None: as the checkpoint says.
    dequantize: widen the weights of formats that may be; None: where there is no kernel that computes from them.
    kv_cache_dtype "auto" is fp8 if the checkpoint says so, else dtype.
    runner: what the model is for; "auto" is pooling for a checkpoint without a head or with sentence-transformers' files, else
    generate. pooler_config is laid over how the checkpoint wants to be pooled.
    max_model_len: the longest sequence that will be served, if it is known; longrope depends on it.
    expert_parallel: with several devices, each has whole experts.
    model_class: module:name of the function that reads the family's config, instead of the one that is known by its architecture.
    language_model_only: leave out the encoder of images or audio, if it can do without.
    Raises ModelLoadError naming the file and everything in it that cannot be served.
    """
    directory = Path(directory)
    raw = {**read_config_json(directory), **(overrides or {})}
    architecture, read, has_head = find(raw, directory, model_class)
    options = {"max_model_len": max_model_len, "expert_parallel": expert_parallel}
    reader = ConfigReader(architecture, raw, bidirectional_faults(raw), **options)  # type: ignore[arg-type]
    config = _read(read, reader, directory)
    has_head = has_head and config.encoder is None
    generates = runner == "generate" or (runner == "auto" and has_head and not is_embedding_checkpoint(directory))
    if generates and not has_head:
        made = "embeddings" if config.classifier is None else "scores"
        raise ConfigError(f"runner is generate, but {directory} is a model without a head for text, which makes {made} only")
    dtype = _dtype(reader, dtype, on_gpu)
    stored_dtype = _stored_dtype(raw) if _stored_dtype(raw) in DTYPES else dtype
    plain, mixtures = config.names.unquantized, config.mixtures
    asked = Options(quantization, dequantize, on_gpu, dtype, plain, stored_dtype=stored_dtype, mixtures=mixtures)
    asked = asked._replace(quantize_lm_head=quantize_lm_head, lm_head=config.names.head)
    formats = read_formats(_named(raw.get("quantization_config"), config.names), asked, reader.faults)
    for format in formats:
        reader.faults.extend(format.faults(dataclasses.replace(config, generates=generates)))
    eos_token_ids = _eos_token_ids(raw, directory, reader.faults)
    if reader.faults:
        raise _refused(directory, reader)
    if dequantize is False and not any(format.may_widen for format in formats):
        raise ConfigError(f"dequantize is False, but {directory} has no {WIDENED}; leave --no-dequantize out")
    if expert_parallel and not config.mixtures:
        raise ConfigError(f"enable_expert_parallel is set, but {architecture} has no experts; leave it out")
    if kv_cache_dtype == "auto":
        kv_cache_dtype = FP8 if any(format.kv_scales is not None for format in formats) else dtype
    elif kv_cache_dtype in ("fp8", "fp8_e4m3"):
        kv_cache_dtype = FP8
    of_family = {"is_encoder": config.encoder is not None, "is_classifier": config.classifier is not None}
    pooling = load_pooling_config(directory, raw, pooler_config, default=config.pooling, **of_family)
    longest = config.max_position
    config = dataclasses.replace(
        config,
        dtype=dtype,
        eos_token_ids=eos_token_ids,
        gguf_type=raw.get(GGUF_TYPE),
        formats=formats,
        kv_cache_dtype=kv_cache_dtype,
        generates=generates,
        pooling=pooling,
        vision=None if language_model_only else config.vision,
        audio=None if language_model_only and not config.attends_to_audio else config.audio,
        max_position=longest if generates else min(longest, pooling.max_length or longest),
    )
    if config.vision is None and config.has_rope_sections:
        config = without_rope_sections(config)
    return dataclasses.replace(config, digest=hashlib.sha256(repr(config).encode()).hexdigest()[:12])


def _read(read: Read, reader: ConfigReader, directory: Path) -> ModelConfig:
    """The config that a family makes of these values."""
    try:
        config = with_classifier(read(reader), reader, directory)
        reader.faults.extend(config.size_faults())
    except JaxLLMError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reader.faults.append(f"no {reader.architecture} has these values ({type(error).__name__}: {error})")
        raise _refused(directory, reader) from error
    return config


def _refused(directory: Path, reader: ConfigReader) -> ModelLoadError:
    file = next((directory / name for name in CONFIG_FILES if (directory / name).is_file()), directory)
    return ModelLoadError(f"{file}: {joined(reader.faults)}")


def read_config_json(directory: Path) -> dict[str, Any]:
    """The JSON object in config.json, its quantization_config taken from where programs that quantise have written it (`_quantization`);
    where there is none, what params.json says.
    Raises ModelLoadError if the directory or both files are missing, or one of the files is not JSON."""
    if not directory.is_dir():
        raise ModelLoadError(f"{directory} is not a directory; give a model directory, a hub id, or 'demo'")
    path = directory / "config.json"
    if not path.is_file():
        if files := sorted(directory.glob("*.gguf")):
            raise ModelLoadError(f"{directory} has no config.json but GGUF files; give the path of one: {files[0]}")
        if (params := directory / CONFIG_FILES[1]).is_file():
            return mistral_params.as_config(_json_object(params), params)
        raise ModelLoadError(
            f"{directory} is not a model directory: it has no config.json; give the directory that holds config.json and the weights"
        )
    raw = _json_object(path)
    if (quantization := _quantization(raw, directory)) is not None:
        raw["quantization_config"] = quantization
    return raw


def _quantization(raw: dict[str, Any], directory: Path) -> Any:
    """The description of quantised weights; None: there is none. Takes it out of `raw` where another key holds it."""
    text = raw.get("text_config")
    found = [raw.get("quantization_config"), raw.pop("compression_config", None)]
    if isinstance(text, dict) and "quantization_config" in text:
        raw["text_config"] = {name: value for name, value in text.items() if name != "quantization_config"}
        found.append(text["quantization_config"])
    for given, method in zip(found, (None, "compressed-tensors", None), strict=False):
        if given:
            return {"quant_method": method, **given} if method and isinstance(given, Mapping) else given
    files = ((directory / name, method) for name, method in QUANTIZATION_FILES.items())
    return next(({"quant_method": method, **_json_object(path)} for path, method in files if path.is_file()), None)


def _named(value: Any, names: Names) -> Any:
    """A value of config.json with the names of modules in it, which may be those of another class of the model, as `names` has them."""
    if isinstance(value, str):
        return names.named(value)
    if isinstance(value, list):
        return [_named(each, names) for each in value]
    return {names.named(key): _named(each, names) for key, each in value.items()} if isinstance(value, dict) else value


def _json_object(path: Path) -> dict[str, Any]:
    value = read_json(path, error=ModelLoadError)
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a JSON {type(value).__name__}, must hold an object")
    return value


def _dtype(reader: ConfigReader, asked: str, on_gpu: bool) -> str:
    if asked != "auto":
        if asked not in DTYPES:
            raise ConfigError(f"dtype is {asked!r}, must be one of auto, {', '.join(DTYPES)}")
        return asked
    if not on_gpu:
        return "float32"
    stored = _stored_dtype(reader.raw)
    if stored not in DTYPES:
        reader.faults.append(f"dtype is {stored!r}, supported: {', '.join(DTYPES)} (choose one with --dtype)")
    return stored


def _stored_dtype(raw: Mapping[str, Any]) -> str:
    return str(_first(raw, "dtype", "torch_dtype") or "bfloat16").removeprefix("torch.")


def _first(raw: Mapping[str, Any], *names: str) -> Any:
    """The first of these values that a config.json has, else its part for the text model; None: none of them."""
    text = raw.get("text_config")
    parts = (raw, text) if isinstance(text, dict) else (raw,)
    return next((part[name] for part in parts for name in names if part.get(name) is not None), None)


def _eos_token_ids(raw: Mapping[str, Any], directory: Path, faults: list[str]) -> tuple[int, ...]:
    """EOS ids of config.json and generation_config.json together, each an integer, a list or absent."""
    path = directory / "generation_config.json"
    generation = _json_object(path) if path.is_file() else {}
    found: list[int] = []
    for ids in (_first(raw, "eos_token_id"), generation.get("eos_token_id")):
        try:
            found += read_token_ids(ids)
        except ValueError as error:
            faults.append(f"eos_token_id {error}")
    return tuple(dict.fromkeys(found))

"""Describes the served model for ollama's API, from its small files, the headers of its weights, and the options of the server."""

import datetime
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.async_llm import AsyncLLM
from jaxllm.errors import ModelLoadError
from jaxllm.gguf_files.families import CONFIG, NUM_PARAMETERS
from jaxllm.hub import CONFIG_FILES, WEIGHTS
from jaxllm.loaders.safetensors import read_header
from jaxllm.models.load_config import read_config_json
from jaxllm.quantization.formats import read_formats
from jaxllm.quantization.formats.packed import PackedFormat
from jaxllm.quantization.numbers import NUMBERS
from jaxllm.text.model_files import text_files
from jaxllm.weight_format import Options, WeightFormat

TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_BESIDE = re.compile(
    r"(_scale(_inv|_2)?|[._]scales|_zero_point|\.qzeros|\.g_idx|\.weight_shape|\.SCB|\.weight_format|absmax|quant_map|"
    r"\.quant_state\.\S+)$"
)
"""Ends of names of tensors that are no parameters: what says how others are quantised."""
_BITS = {"U8": 8, "I32": 32}
"""Bits of values that hold several codes."""


@dataclass(frozen=True)
class Checkpoint:
    """A model's files. The digest is one of names, sizes and times of change: reading gigabytes would take too long."""

    config: Mapping[str, Any]
    """Contents of config.json."""
    num_bytes: int
    digest: str
    changed_seconds: float
    num_parameters: int | None
    """None: not known without loading them."""

    @classmethod
    def of(cls, engine: AsyncLLM) -> "Checkpoint":
        """Read what is needed of an engine's model. Raises ModelLoadError."""
        options = engine.config.model
        return cls.read(text_files(options.model, revision=options.revision, download_dir=options.download_dir))

    @classmethod
    def read(cls, directory: Path) -> "Checkpoint":
        """Read what is needed of a model's directory. Raises ModelLoadError."""
        config = read_config_json(directory) if any((directory / name).is_file() for name in CONFIG_FILES) else {}
        as_stored = Options(None, None, on_gpu=False, dtype="float32", unquantized=())
        formats = read_formats(config.get("quantization_config"), as_stored, faults=[])
        weights = sorted(path for path in directory.rglob("*") if path.suffix in WEIGHTS)
        known = {path: path.stat() for path in [*weights, *directory.glob("*.json")]}
        parts = [(path.relative_to(directory).as_posix(), found.st_size, found.st_mtime_ns) for path, found in known.items()]
        return cls(
            config=config.get("text_config", config),
            num_bytes=sum(known[path].st_size for path in weights),
            digest=hashlib.sha256(json.dumps(sorted(parts)).encode()).hexdigest(),
            changed_seconds=max((found.st_mtime for found in known.values()), default=0.0),
            num_parameters=config.get(NUM_PARAMETERS)
            or _count([path for path in weights if path.suffix == ".safetensors"], formats),
        )


def family_of(architecture: str) -> str:
    """Name of a family for ollama and llama.cpp: `qwen2` for Qwen2ForCausalLM."""
    return re.sub(r"(LMHead|For\w+)?(Model)?$", "", architecture).lower()


def details(engine: AsyncLLM, checkpoint: Checkpoint) -> dict[str, Any]:
    """`details` of a model. A field that is not known is empty, as ollama has it."""
    model, config = engine.model_config, checkpoint.config
    family, count = family_of(model.architecture), checkpoint.num_parameters
    method = (config.get("quantization_config") or {}).get("quant_method", "")
    stored = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return {
        "parent_model": "",
        "format": "safetensors" if model.gguf_type is None else "gguf",
        "family": family,
        "families": [family],
        "parameter_size": "" if count is None else rounded(count),
        "quantization_level": model.gguf_type or method.upper() or TYPES.get(stored, ""),
    }


def model_info(engine: AsyncLLM, checkpoint: Checkpoint) -> dict[str, Any]:
    """`model_info` of a model: the values of its config by llama.cpp's names. The context length is that of this server."""
    family, config = family_of(engine.model_config.architecture), checkpoint.config
    found = {f"{family}.{ours}": config[theirs] for ours, theirs in CONFIG.items() if config.get(theirs) is not None}
    return {
        "general.architecture": family,
        **({} if checkpoint.num_parameters is None else {"general.parameter_count": checkpoint.num_parameters}),
        **found,
        f"{family}.context_length": engine.max_model_len,
        f"{family}.embedding_length": engine.model_config.hidden_size,
        f"{family}.vocab_size": engine.model_config.vocab_size,
    }


def rounded(count: int) -> str:
    """`8B`, `8.0B`, `134.52M`: a number of parameters as ollama writes it."""
    for size, letter, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 2)):
        if count >= size:
            return f"{count // size}{letter}" if count % size == 0 else f"{count / size:.{digits}f}{letter}"
    return str(count)


def time_text(seconds: float) -> str:
    """A time in RFC 3339's format."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")


def _count(files: list[Path], formats: Sequence[WeightFormat]) -> int | None:
    """Values in safetensors files, of packed weights too."""
    try:
        entries = {name: entry for file in files for name, entry in read_header(file).items()}
    except (ModelLoadError, OSError):
        return None
    counted = [
        math.prod(entry.shape) * _num_codes(name, entry.dtype, formats)
        for name, entry in entries.items()
        if not _BESIDE.search(name)
    ]
    return sum(counted) or None


def _num_codes(name: str, dtype: str, formats: Sequence[WeightFormat]) -> int:
    """Parameters in a value of a tensor."""
    if dtype not in _BITS:
        return 1
    module = name.rpartition(".")[0]
    schemes = (format.scheme(module) for format in formats if isinstance(format, PackedFormat))
    scheme = next((found for found in schemes if found is not None), None)
    return _BITS[dtype] // (4 if scheme is None else NUMBERS[scheme.number].bits)

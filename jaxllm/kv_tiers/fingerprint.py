"""Names the computation that contents of blocks come from. Engines with equal fingerprints may use each other's contents.

The name of a block says which tokens it is of, but not which model computed it, nor how its bytes are arranged. Does not import JAX.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jaxllm
from jaxllm.cache_spec import WORD_BYTES, CacheLayout
from jaxllm.config import EngineConfig
from jaxllm.files import open_regular
from jaxllm.hub import WEIGHTS, resolve_model
from jaxllm.model_config import ModelConfig

FORMAT_VERSION = 1
"""Version of the format of contents and their checksums."""
_NUM_PIECES, _PIECE_BYTES = 64, 4096
"""Pieces that are read of a file of weights: other weights of the same shapes differ nearly everywhere."""
_SMALL_BYTES, _MAX_SMALL = 1 << 16, 512
"""Size and number of small tensors, such as biases, that are read of a file: pieces miss them, and they may be all that was trained."""
_MAX_HEADER_BYTES = 100_000_000
"""Largest header of a safetensors file."""


def describe(
    config: EngineConfig, model_config: ModelConfig, layout: CacheLayout, arrangement: Any, model_dir: Path
) -> dict[str, Any]:
    """All that contents depend on, by name, as JSON values. arrangement: where each byte of a content is (`BlockFormat.arrangement`).

    The number of devices is not part of it. Reads pieces of the weights: raises OSError, ConfigError or ModelLoadError.
    """
    options = config.flat()
    draft = options["speculative_config"] or {}
    draft_dir = draft.get("model") and resolve_model(draft["model"], draft.get("revision"), options["download_dir"])
    dummy = f"dummy, seed {options['seed'] or 0}" if options["load_format"] == "dummy" else None
    return {
        "format version": FORMAT_VERSION,
        "jaxllm version": jaxllm.__version__,
        "model": model_config.digest,
        "model class": options["model_class"],
        "weights": dummy or weights_digest(model_dir),
        "drafter": [draft.get("method"), draft_dir and (dummy or weights_digest(draft_dir))],
        "dtype": model_config.dtype,
        "kv cache dtype": model_config.kv_cache_dtype,
        "kv cache scales": type(model_config.kv_format).__name__,
        "block size": layout.block_size,
        "groups": [[repr(group.policy), list(group.layers)] for group in layout.groups],
        "arrays": [[array.width, array.dtype] for array in layout.arrays],
        "arrangement": arrangement,
        "hash algorithm": options["prefix_caching_hash_algo"],
        **_states(layout, options["tensor_parallel_size"]),
    }


def _states(layout: CacheLayout, num_devices: int) -> dict[str, Any]:
    """Properties that blocks with states by row depend on; none without states. In a block all their parts have equal ones, which follow
    each other: where its words cannot be divided so, the number of devices counts."""
    if not layout.states:
        return {}
    arrays = [[array.num_heads, list(array.shape), array.dtype] for array in layout.states]
    is_even = layout.block_bytes // WORD_BYTES % layout.state_parts == 0
    return {"states": [arrays, layout.state_blocks, 1 if is_even else num_devices]}


def digest(described: dict[str, Any]) -> bytes:
    """The fingerprint: 32 bytes."""
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).digest()


def weights_digest(model_dir: Path) -> str:
    """Hash the names, the sizes and some pieces of a checkpoint's files, whatever their directory."""
    found = hashlib.sha256()
    for file in _weight_files(model_dir):
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            name = file.name if model_dir.is_file() else file.relative_to(model_dir)
            found.update(f"{name} {size}\n".encode())
            for start in _starts(size):
                found.update(os.pread(stream.fileno(), _PIECE_BYTES, start))
            for start, length in _small_tensors(stream.fileno(), size):
                found.update(os.pread(stream.fileno(), length, start))
    return found.hexdigest()


def _weight_files(model_dir: Path) -> list[Path]:
    if model_dir.is_file():
        first = re.fullmatch(r"(.+)-\d{5}-of-(\d{5})", model_dir.stem)
        parts = model_dir.parent.glob(f"*-of-{first[2]}{model_dir.suffix}") if first else ()
        return sorted(part for part in parts if first and part.name.startswith(f"{first[1]}-")) or [model_dir]
    files = [file for file in sorted(model_dir.rglob("*")) if file.is_file()]
    return [file for file in files if file.suffix in WEIGHTS] or files


def _small_tensors(descriptor: int, size: int) -> list[tuple[int, int]]:
    """Where small tensors of a safetensors file are, with their lengths; none in other files."""
    num_bytes = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if num_bytes > min(size - 8, _MAX_HEADER_BYTES):
        return []
    try:
        header = json.loads(os.pread(descriptor, num_bytes, 8))
        ranges = sorted(each["data_offsets"] for name, each in header.items() if name != "__metadata__")
        small = [(8 + num_bytes + start, end - start) for start, end in ranges if 0 <= end - start <= _SMALL_BYTES]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # no such file; whoever loads it tells
        return []
    return small[:: -(-len(small) // _MAX_SMALL) or 1]


def _starts(size: int) -> Iterator[int]:
    if size <= _NUM_PIECES * _PIECE_BYTES:
        return iter(range(0, size, _PIECE_BYTES))
    return (number * (size - _PIECE_BYTES) // (_NUM_PIECES - 1) for number in range(_NUM_PIECES))

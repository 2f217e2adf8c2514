"""The formats of Hugging Face checkpoints. To add one: a subclass of `Checkpoint` and an entry below."""

from pathlib import Path

from jaxllm.errors import ModelLoadError
from jaxllm.loaders import gguf, pytorch, safetensors
from jaxllm.loaders.checkpoint import Checkpoint

FORMATS: dict[str, type[Checkpoint]] = {
    "safetensors": safetensors.Checkpoint,
    "pytorch": pytorch.Checkpoint,
    "gguf": gguf.Checkpoint,
}
"""By name; the first that a directory has files of is read."""


def has_checkpoint(directory: Path) -> bool:
    """Whether a directory has weights in any of these formats."""
    return any(kind.files(directory) for kind in FORMATS.values())


def open_checkpoint(directory: Path, load_format: str = "auto", dtype: str = "float32") -> Checkpoint:
    """The checkpoint in a directory. load_format: a key of FORMATS, or auto; dtype: of weights that are widened while they are read.

    Raises ModelLoadError.
    """
    kinds = FORMATS if load_format == "auto" else {load_format: FORMATS[load_format]}
    for kind in kinds.values():
        if kind.files(directory):
            return kind(directory, dtype)
    patterns = ", ".join(pattern for kind in kinds.values() for pattern in kind.PATTERNS)
    others = [file.name for pattern in ("*.safetensors", "*.bin", "*.pt", "*.pth") for file in sorted(directory.glob(pattern))]
    found = f"; it has {', '.join(others)}, which is none of these" if others else ""
    raise ModelLoadError(f"{directory} has no weights: no file of it is named {patterns}{found}")

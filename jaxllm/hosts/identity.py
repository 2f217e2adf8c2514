"""Facts that must be equal on all hosts of an engine, and the description of a difference."""

import hashlib
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.engine.versions import versions
from jaxllm.hub import CONFIG_FILES
from jaxllm.options.hosts import OF_ONE_HOST
from jaxllm.options.quantization import QUANTIZATION_FILES


def identity(config: EngineConfig, model_dir: Path) -> dict[str, str]:
    """The identity of this host, by names for error messages."""
    options = {name: repr(value) for name, value in config.flat().items() if name not in OF_ONE_HOST}
    found = {"Python version": ".".join(platform.python_version_tuple()[:2]), **versions()}
    for name in (*CONFIG_FILES, *QUANTIZATION_FILES):
        if (model_dir / name).is_file():
            found[f"the model's {name}"] = _digest((model_dir / name).read_bytes())
    return {**found, **options}


def difference(names: Sequence[str], found: Sequence[Mapping[str, Any]]) -> str | None:
    """A description of how the hosts of these names differ from the first; None if they do not."""
    first = found[0]
    for name, other in zip(names[1:], found[1:], strict=True):
        faults = [
            f"{what} is {first.get(what, 'missing')} on {names[0]} and {other.get(what, 'missing')} on {name}"
            for what in dict.fromkeys([*first, *other])
            if first.get(what) != other.get(what)
        ]
        if faults:
            return "; ".join(faults[:4]) + (f"; and {len(faults) - 4} more" if len(faults) > 4 else "")
    return None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]

"""The versions of the project and of the packages that programs depend on. Does not import JAX."""

import functools
import hashlib
import importlib.metadata
import importlib.util
from pathlib import Path

import jaxllm

PACKAGES = ("jax", "jaxlib", "flax")
_PLUGIN = "jax-cuda"
_WITHOUT_PROGRAMS = ("cli", "expert_load", "metrics", "scheduler", "text")


def versions() -> dict[str, str]:
    """All of them, by name."""
    packages = {f"{name} version": importlib.metadata.version(name) for name in PACKAGES}
    of_plugins = {f"{name} version": version for name, version in plugins()}
    return {"jaxllm version": f"{jaxllm.__version__} ({source_digest()})", **packages, **of_plugins}


@functools.cache
def source_digest() -> str:
    """A digest of the project's Python files, except folders that no program depends on: any change may change a program."""
    digest = hashlib.sha256()
    for package in ("jaxllm", "pallas_kernels"):
        root = _root(package)
        for path in sorted(root.rglob("*.py")):
            if path.relative_to(root).parts[0] in _WITHOUT_PROGRAMS:
                continue
            digest.update(f"{root.name}/{path.relative_to(root)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def plugins() -> list[tuple[str, str]]:
    """Name and version of JAX's CUDA packages, as far as installed."""
    found = {(d.metadata["Name"] or "").lower(): d.version for d in importlib.metadata.distributions()}
    return sorted((name, version) for name, version in found.items() if name.startswith(_PLUGIN))


def _root(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is not installed"
    return Path(spec.origin).parent

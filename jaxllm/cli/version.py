"""Finds the version of jaxllm without heavy imports."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path

from jaxllm import __version__

ROOT = Path(__file__).resolve().parents[2]


def git_sha() -> str | None:
    """The commit of a source checkout, with + if files differ from it; None for an installed package or without git."""
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def package_version(name: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_line() -> str:
    """`jaxllm 0.1.0 (git 1a2b3c4), jax 0.10.2, flax 0.12.8, Python 3.11.7`"""
    sha = git_sha()
    packages = [f"{name} {package_version(name)}" for name in ("jax", "flax")]
    return ", ".join(
        [f"jaxllm {__version__}{f' (git {sha})' if sha else ''}", *packages, f"Python {platform.python_version()}"]
    )

"""`jaxllm env`: information about the machine for bug reports, and the versions of `jaxllm --version`."""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm import __version__, env
from jaxllm.cli.parser import Parser
from jaxllm.cli.terminal import size
from jaxllm.kernel_verdicts import VerdictStore
from pallas_kernels import verified

ROOT = Path(__file__).resolve().parents[2]
ABOUT = "Versions, devices, variables and caches of this machine, for a bug report."
PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "numpy", "ml_dtypes", "orbax-checkpoint"),
    *("transformers", "tokenizers", "huggingface_hub", "safetensors", "torch"),
)
VARIABLES = re.compile(
    r"(JAX|JAXLLM|VLLM|XLA|CUDA|NVIDIA|NCCL|HF|TRANSFORMERS|TF_CPP|OMP)_\w+|LD_LIBRARY_PATH|TMPDIR|XDG_CACHE_HOME|NO_COLOR"
)
MAX_KERNEL_CHECKS = 24
SECRET = re.compile(r"TOKEN(?!IZER)|KEY|SECRET|PASSWORD")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="as a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the report. Returns the exit code."""
    report = gather()
    if arguments.json:
        print(json.dumps(report, indent=1))
        return 0
    for title, content in report.items():
        is_mapping = isinstance(content, Mapping)
        print(f"{title}:" if is_mapping else f"{title}: {content}")
        for name, value in content.items() if is_mapping else ():
            print(f"  {name}: {value}")
    return 0


def gather(*, devices: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The whole report as plain values. `devices`: found by another process; default: start JAX and query it."""
    verdicts = VerdictStore(env.cache_dir() / env.KERNEL_VERDICTS).all()
    return {
        "jaxllm": own_version(),
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "processor": {"cores": os.cpu_count(), "memory": size(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))},
        "packages": {name: found for name in PACKAGES if (found := package_version(name))},
        "devices": _devices() if devices is None else dict(devices),
        "driver": _driver(),
        "variables": {
            name: "(hidden)" if SECRET.search(name) else value
            for name, value in sorted(os.environ.items())
            if VARIABLES.fullmatch(name)
        },
        "compilation cache": _cache(env.cache_dir()),
        "verified devices": verified_devices() or "none",
        "kernel checks": {verdict.subject.name: str(verdict) for verdict in verdicts[:MAX_KERNEL_CHECKS]} or "none",
    }


def _devices() -> dict[str, Any] | str:
    try:
        import jax

        return {f"{device.platform}:{device.id}": device.device_kind for device in jax.devices()}
    except Exception as error:  # the report must also work on a broken installation
        return f"JAX finds none: {type(error).__name__}: {error}"


def _driver() -> str:
    try:
        found = _output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    except FileNotFoundError:
        return "no nvidia-smi"
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi failed: {error}"
    return "; ".join(found.splitlines())


def _output(*command: str) -> str:
    """Output of a program. Raises OSError or subprocess.SubprocessError."""
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()


def _cache(folder: Path) -> dict[str, Any]:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()] if folder.is_dir() else []
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return {
        "folder": str(folder),
        "size": f"{size(sum(path.stat().st_size for path in files))} in {len(files)} files",
        "free": size(shutil.disk_usage(existing).free),
    }


def verified_devices() -> dict[str, str]:
    """Kinds of devices with a record of `scripts/check_gpu.py`, and which of their kernels are not those of this installation."""
    found = {}
    for kind, record in sorted(verified.records().items()):
        others = [op for op in verified.OPS if not verified.is_verified(kind, op)]
        which = f"other kernels than these of {', '.join(others)}" if others else "these kernels"
        found[kind] = f"{which}, {record['date']}, commit {record['commit']}, jax {record['versions'].get('jax', 'unknown')}"
    return found


def git_sha() -> str | None:
    """The commit of a source checkout, with + if files differ from it; None for an installed package or without git."""
    if not (ROOT / ".git").exists():
        return None
    try:
        return _output("git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def own_version() -> str:
    """`0.1.0 (git 1a2b3c4)`"""
    return __version__ + (f" (git {sha})" if (sha := git_sha()) else "")


def package_version(name: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_line() -> str:
    """`jaxllm 0.1.0 (git 1a2b3c4), jax 0.10.2, flax 0.12.8, Python 3.11.7`"""
    packages = [f"{name} {package_version(name)}" for name in ("jax", "flax")]
    return ", ".join([f"jaxllm {own_version()}", *packages, f"Python {platform.python_version()}"])

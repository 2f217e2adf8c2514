"""Results of kernel checks on this machine: verdicts kept on disk for later starts, and an engine's report on its kernels."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from jaxllm.cache_folders import make_folder
from jaxllm.log import logger

MAX_VERDICTS = 256
"""Kept in the directory; the oldest go first."""


@dataclass(frozen=True)
class Subject:
    """The subject of a verdict. Values of the mappings are JSON."""

    op: str
    implementation: str
    source: str
    """Digest of the sources of kernels and checks."""
    surroundings: Mapping[str, Any]
    """Device, versions and settings."""
    shapes: Sequence[Mapping[str, Any]]

    @property
    def device(self) -> str:
        return str(self.surroundings.get("device"))

    @property
    def name(self) -> str:
        """`paged_attention mosaic (1a2b3c)`"""
        return f"{self.op} {self.implementation} ({self.digest[:6]})"

    @cached_property
    def text(self) -> str:
        """JSON text, equal for equal subjects."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Verdict:
    """The result of a check."""

    subject: Subject
    fault: str | None
    """The case and its error; None: everything was right."""
    checked_at: str
    """UTC."""
    format: Literal[2] = 2
    """Format of the file; others are not read."""

    def __str__(self) -> str:
        """The result, and what it is about: `passed (2026-11-26 06:30 UTC; NVIDIA H200, jax 0.11.2; head_dim 128)`"""
        subject = self.subject
        shapes = "; ".join(
            ", ".join(f"{name} {value}" for name, value in shape.items() if not isinstance(value, (list, bool)))
            for shape in subject.shapes
        )
        result = "passed" if self.fault is None else f"FAILED in {self.fault}"
        return f"{result} ({self.checked_at} UTC; {subject.device}, jax {subject.surroundings.get('jax version')}; {shapes})"


@dataclass(frozen=True)
class OpReport:
    """The implementation that an engine uses for an op, and the reason."""

    implementation: str
    check: Literal["passed", "passed before", "verified", "not run"] = "not run"
    """passed before: by a verdict on disk; verified: by a record of scripts/check_gpu.py."""
    failed: dict[str, str] = field(default_factory=dict)
    """Implementations that would have been preferred, with what was wrong."""


class VerdictStore:
    """Verdicts in a directory, a file each, so that engines that start at the same time do not meet."""

    def __init__(self, directory: Path):
        self.directory = directory

    def load(self, subject: Subject) -> Verdict | None:
        """The verdict on exactly this; None if there is none that can be read."""
        path = self._path(subject)
        try:
            verdict = _read(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.info("%s is ignored (%s: %s): the kernels are checked again", path, type(error).__name__, error)
            return None
        return verdict if verdict.subject.text == subject.text else None

    def save(self, verdict: Verdict) -> None:
        """Keep a verdict, whole or not at all. That it cannot be written stops nothing: the next start checks again."""
        try:
            make_folder(self.directory)
            descriptor, name = tempfile.mkstemp(dir=self.directory, prefix=".new-")
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    json.dump(asdict(verdict), file, indent=1)
                os.replace(name, self._path(verdict.subject))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
            self._remove_oldest()
        except OSError as error:
            logger.info("the verdict of the kernel check is not kept: %s", error)

    def all(self) -> list[Verdict]:
        """Every verdict that can be read, the newest first."""
        found = []
        for path in self._paths():
            with contextlib.suppress(OSError, ValueError):
                found.append(_read(path))
        return sorted(found, key=lambda verdict: verdict.checked_at, reverse=True)

    def _path(self, subject: Subject) -> Path:
        return self.directory / f"{subject.op}-{subject.implementation}-{subject.digest}.json"

    def _paths(self) -> list[Path]:
        with contextlib.suppress(OSError):
            return sorted(self.directory.glob("*.json"))
        return []

    def _remove_oldest(self) -> None:
        paths = self._paths()
        if len(paths) > MAX_VERDICTS:
            with contextlib.suppress(OSError):  # another engine may remove the same
                for path in sorted(paths, key=lambda path: path.stat().st_mtime)[:-MAX_VERDICTS]:
                    path.unlink()


def _read(path: Path) -> Verdict:
    return msgspec.json.decode(path.read_bytes(), type=Verdict)

"""Stores compiled programs in a directory, so that the next process or another machine of the same kind need not compile them.

Each program has its own file next to `manifest.json`, which records what they were compiled for. The files contain pickles and
machine code: a user with write access can run code here, so `trusted_files` reads them.
"""

import contextlib
import hashlib
import json
import os
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jaxlib import lapack

from jaxllm import trusted_files
from jaxllm.cache_folders import keep_recent, tell_not_kept
from jaxllm.env import cache_bytes
from jaxllm.errors import ConfigError
from jaxllm.log import logger
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.split_program import CompiledProgram, Pieces, SplitProgram, Wiring

MANIFEST = "manifest.json"
FORMAT = 1
MAX_MANIFEST_BYTES = 1 << 20

Fingerprint = Mapping[str, Any]
"""All that programs depend on, by a name that an error message can use; JSON values."""


class StoredPieces(NamedTuple):
    """A program that runs in pieces."""

    wiring: Wiring
    pieces: dict[str, Any]
    """Serialized, by digest."""


class ProgramStore:
    """Programs for arrays on `devices`, in a directory.

    A `strict` store raises ConfigError for a program that cannot be read, another one has it compiled anew. Nothing is saved in a
    store that is not `writable`.
    """

    def __init__(self, directory: Path, devices: Sequence[jax.Device], *, writable: bool, strict: bool):
        self.directory = directory
        self._devices = devices
        self._writable = writable
        self._strict = strict
        self._pieces = Pieces()
        if writable and devices[0].platform == "cpu":
            _leave_persistent_cache()

    def load(self, key: ProgramKey) -> CompiledProgram | None:
        """The program, or None if it is not stored."""
        path = self._path(key)
        try:
            data = trusted_files.read(path)
        except FileNotFoundError:
            return None
        except (OSError, ConfigError) as error:
            if self._strict:
                raise ConfigError(str(error)) from error
            logger.warning("%s; the program is compiled anew", error)
            return None
        try:
            stored = pickle.loads(data)
            if not isinstance(stored, StoredPieces):
                return self._read(stored)
            pieces = {digest: self._pieces.get(digest, partial(self._read, piece)) for digest, piece in stored.pieces.items()}
            return SplitProgram(stored.wiring, pieces)
        except Exception as error:  # what a damaged file brings up has many types
            reason = f"{path} cannot be loaded ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
            if self._strict:
                raise ConfigError(f"{reason}; write it again with `jaxllm compile`") from error
            logger.warning("%s: it is compiled anew", reason)
            return None

    def save(self, key: ProgramKey, program: CompiledProgram) -> None:
        """Store a program. That a disk is full does not stop an engine, unless the store is strict."""
        if not self._writable:
            return
        try:
            _write(self._path(key), pickle.dumps(_serialized(program)))
        except Exception as error:  # backends differ in what they cannot serialize, and how they say so
            if self._strict:
                raise ConfigError(f"{key} cannot be written to {self.directory}: {error}") from error
            logger.warning("%s is not kept for the next start: %s", key, error)

    def copy(self, other: "ProgramStore", key: ProgramKey) -> bool:
        """Take a program over from another store. Whether it has it."""
        try:
            data = trusted_files.read(other._path(key))
        except (OSError, ConfigError):
            return False
        _write(self._path(key), data)
        return True

    def _read(self, stored: Any) -> jax.stages.Compiled:
        payload, in_tree, out_tree = stored
        if b"lapack_" in payload:
            # Of a CPU. JAX finds LAPACK's functions when it lowers a call of one; without them the program ends the process.
            lapack.prepare_lapack_call("trsm", np.dtype(np.float32))
        return serialize_executable.deserialize_and_load(
            payload, in_tree, out_tree, backend=self._devices[0].client, execution_devices=self._devices
        )

    def _path(self, key: ProgramKey) -> Path:
        *parts, features, number = key  # all, so that no two programs share a file
        named = (getattr(part, "name", str(part)).lower() for part in parts)
        numbered = (f"part{number}",) if number else ()
        return self.directory / f"{'-'.join((*named, *features, *numbered))}.program"


def _leave_persistent_cache() -> None:
    """Turn off JAX's compilation cache (JAX_COMPILATION_CACHE_DIR), so that XLA compiles anew: on a CPU, a program that was read from there
    cannot be serialized again, which shows when it runs."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # which remembers the option


def _serialized(program: CompiledProgram) -> Any:
    if isinstance(program, SplitProgram):
        return StoredPieces(program.wiring, {digest: _serialized(piece) for digest, piece in program.pieces.items()})
    return serialize_executable.serialize(program)


def local_store(parent: Path, fingerprint: Fingerprint, devices: Sequence[jax.Device]) -> ProgramStore | None:
    """The store of such an engine in this machine's cache; None if the cache cannot be used."""
    digest = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:24]
    directory = parent / digest
    try:
        with trusted_files.open_directory(directory, make=True):
            pass
        write_manifest(directory, fingerprint)  # which also says that it is used
        keep_recent(parent, cache_bytes(), in_use=directory)
    except (OSError, ConfigError) as error:
        tell_not_kept(str(error))
        return None
    return ProgramStore(directory, devices, writable=True, strict=False)


def new_artifact(directory: Path, devices: Sequence[jax.Device]) -> ProgramStore:
    """An empty store to ship. Its manifest comes last, by `write_manifest`: without one it is no artifact."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} is not empty; give a new directory, or remove it first")
    try:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        with trusted_files.open_directory(directory):
            pass
    except OSError as error:
        raise ConfigError(f"{directory} cannot be made: {error}") from error
    return ProgramStore(directory, devices, writable=True, strict=True)


def open_artifact(directory: Path, fingerprint: Fingerprint, devices: Sequence[jax.Device]) -> ProgramStore:
    """The store that `jaxllm compile` wrote. Raises ConfigError with everything in which it differs from this engine."""
    compiled_for = read_manifest(directory)
    here = json.loads(json.dumps(fingerprint))
    names = dict.fromkeys([*compiled_for, *here])
    faults = [
        f"{name} is {_short(here.get(name))}, the artifact has {_short(compiled_for.get(name))}"
        for name in names
        if here.get(name) != compiled_for.get(name)
    ]
    blocks, wanted_blocks = here.get("num_gpu_blocks"), compiled_for.get("num_gpu_blocks")
    if isinstance(blocks, int) and isinstance(wanted_blocks, int) and blocks < wanted_blocks:
        faults.append(
            "no more blocks fit here (raise --gpu-memory-utilization, or compile with a smaller --kv-cache-memory-bytes)"
        )
    if faults:
        raise ConfigError(
            f"the compiled artifact {directory} is for another engine: {'; '.join(faults)}; start with the same options on the same "
            "kind of machine and the same versions, or compile it again with `jaxllm compile`"
        )
    return ProgramStore(directory, devices, writable=False, strict=True)


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read what an artifact was compiled for. Raises ConfigError if it is none, or not to be trusted."""
    path = directory / MANIFEST
    try:
        data = trusted_files.read(path, max_bytes=MAX_MANIFEST_BYTES)
    except OSError as error:
        raise ConfigError(
            f"{directory} is no compiled artifact: its {MANIFEST} cannot be read ({error.strerror}); write one with `jaxllm compile`"
        ) from error
    try:
        manifest = json.loads(data)
        found, fingerprint = manifest["format"], manifest["compiled_for"]
        assert isinstance(fingerprint, dict)
    except (ValueError, KeyError, TypeError, RecursionError, AssertionError) as error:
        raise ConfigError(f"{path} is corrupt ({error!r}); write it again with `jaxllm compile`") from error
    if found != FORMAT:
        raise ConfigError(f"{path} has format {found}, this version reads {FORMAT}; write it again with `jaxllm compile`")
    return fingerprint


def write_manifest(directory: Path, fingerprint: Fingerprint) -> None:
    """Say what the programs are for."""
    text = json.dumps({"format": FORMAT, "compiled_for": fingerprint}, indent=1)
    _write(directory / MANIFEST, text.encode() + b"\n")


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically, even if other processes write the same file."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _short(value: Any, limit: int = 60) -> str:
    text = json.dumps(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"

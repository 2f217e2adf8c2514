"""Makes a model directory of a GGUF file: config.json and the tokenizer's files next to a link to it, in the cache."""

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxllm import served_model
from jaxllm.cache_folders import make_folder
from jaxllm.env import cache_dir
from jaxllm.errors import ModelLoadError, shortened
from jaxllm.gguf_files.families import config_json, generation_json
from jaxllm.gguf_files.reading import GgufFile
from jaxllm.gguf_files.tokenizer import tokenizer_files

NO_TOKENIZER = "no_tokenizer.txt"
"""A file of such a directory without a tokenizer, that says why it has none."""


def unpack(file: Path) -> Path:
    """The directory of a GGUF file's model, or of the first part of several. Made once for each state of the file.

    A tokenizer that cannot be made is left out, because another may be given. Raises ModelLoadError.
    """
    parts = _parts(file.resolve())
    state = "\0".join([_rules(), *(f"{part} {part.stat().st_size} {part.stat().st_mtime_ns}" for part in parts)])
    directory = cache_dir() / "gguf" / hashlib.sha256(state.encode()).hexdigest()[:16]
    if _is_whole(directory):
        return directory
    opened = GgufFile(parts)
    texts = {"config.json": json.dumps(config_json(opened), indent=2)}
    if sampling := generation_json(opened):
        texts["generation_config.json"] = json.dumps(sampling, indent=2)
    try:
        texts["tokenizer.json"], config = tokenizer_files(opened)
        texts["tokenizer_config.json"] = json.dumps(config, indent=2)
    except ModelLoadError as error:
        texts[NO_TOKENIZER] = str(error)
    try:
        _write(directory, texts, parts)
    except OSError as error:
        if not _is_whole(directory):  # which another process may have made meanwhile
            remedy = f"remove {directory}" if directory.exists() else "set $JAXLLM_CACHE_DIR to where you may write"
            raise ModelLoadError(f"{file} cannot be unpacked: {error}; {remedy}") from error
    return directory


@functools.cache
def _rules() -> str:
    """A digest of the code that a directory's files depend on, with the versions of the packages it calls."""
    digest = hashlib.sha256()
    for module in (*sorted(Path(__file__).parent.glob("*.py")), Path(served_model.__file__)):
        digest.update(module.read_bytes())
    installed = [name for name in ("gguf", "tokenizers") if importlib.util.find_spec(name) is not None]
    return " ".join([digest.hexdigest(), *map(importlib.metadata.version, installed)])


def _is_whole(directory: Path) -> bool:
    has_tokenizer = any((directory / name).is_file() for name in ("tokenizer.json", NO_TOKENIZER))
    return has_tokenizer and (directory / "config.json").is_file()


def _write(directory: Path, texts: Mapping[str, str], parts: Sequence[Path]) -> None:
    make_folder(directory.parent)
    made = Path(tempfile.mkdtemp(dir=directory.parent))
    try:
        for name, text in texts.items():
            (made / name).write_text(text, encoding="utf-8")
        for part in parts:
            (made / part.name).symlink_to(part)
        made.rename(directory)
    finally:
        shutil.rmtree(made, ignore_errors=True)  # which is not there any more unless it failed


def _parts(file: Path) -> list[Path]:
    found = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", file.name)
    if found is None:
        return [file]
    stem, _, count = found.groups()
    parts = [file.with_name(f"{stem}-{i:05}-of-{count}.gguf") for i in range(1, int(count) + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ModelLoadError(
            f"{file} is one of {int(count)} parts, of which {shortened(', '.join(missing))} is missing beside it"
        )
    return parts

"""Makes a model directory of a GGUF file: config.json and the tokenizer's files beside a link to it, in the cache."""

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxllm import __version__
from jaxllm.env import cache_dir
from jaxllm.errors import ModelLoadError
from jaxllm.gguf_files.families import config_json
from jaxllm.gguf_files.reading import GgufFile
from jaxllm.gguf_files.tokenizer import tokenizer_files
from jaxllm.log import logger


def unpack(file: Path) -> Path:
    """The directory of a GGUF file's model, or of the first part of several. Made once for each state of the file.

    A tokenizer that cannot be made is left out, with a warning, because another may be given. Raises ModelLoadError.
    """
    parts = _parts(file.resolve())
    state = "\0".join([__version__, *(f"{part} {part.stat().st_size} {part.stat().st_mtime_ns}" for part in parts)])
    directory = cache_dir() / "gguf" / hashlib.sha256(state.encode()).hexdigest()[:16]
    if (directory / "tokenizer.json").is_file():
        return directory
    opened = GgufFile(parts)
    texts = {"config.json": json.dumps(config_json(opened), indent=2)}
    try:
        texts["tokenizer.json"], config = tokenizer_files(opened)
        texts["tokenizer_config.json"] = json.dumps(config, indent=2)
    except ModelLoadError as error:
        logger.warning("%s", error)
    try:
        _write(directory, texts, parts)
    except OSError as error:
        if not directory.is_dir():  # nor did another process make it meanwhile
            raise ModelLoadError(f"{file} cannot be unpacked: {error}; set $JAXLLM_CACHE_DIR to where you may write") from error
    return directory


def _write(directory: Path, texts: Mapping[str, str], parts: Sequence[Path]) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
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
        raise ModelLoadError(f"{file} is one of {int(count)} parts, of which {', '.join(missing)} is missing beside it")
    return parts

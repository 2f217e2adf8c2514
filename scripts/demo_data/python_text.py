"""Python text to learn from: the sources of the standard library of the running interpreter."""

import hashlib
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from . import functions

HELD_OUT_PERCENT = 3
_SKIPPED_FOLDERS = frozenset(
    {
        "test",
        "tests",
        "idlelib",
        "idle_test",
        "lib2to3",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "turtledemo",
        "pydoc_data",
        "__phello__",
        "_bundled",
    }
)
_SKIPPED_FOLDER_STARTS = ("config-",)
_MAX_FILE_BYTES = 300_000


def _looks_generated(name: str, text: str) -> bool:
    """Tables of characters and constants teach nothing and would take a tenth of the text."""
    lines = text.split("\n")
    table_lines = sum(1 for line in lines if line.lstrip()[:1] in "'\"0123456789(" and line.rstrip().endswith(","))
    return name.startswith("_sysconfigdata") or table_lines > 0.4 * len(lines)


def _files(directory: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(directory.rglob("*.py")):
        name = path.relative_to(directory)
        folders = name.parts[:-1]
        if any(folder in _SKIPPED_FOLDERS or folder.startswith(_SKIPPED_FOLDER_STARTS) for folder in folders):
            continue
        if (folders and folders[0] == "encodings") or not 200 < path.stat().st_size < _MAX_FILE_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8").replace("\r\n", "\n").expandtabs(8)
        except UnicodeDecodeError:
            continue
        if not _looks_generated(path.name, text):
            yield name.as_posix(), text


def file_is_held_out(name: str) -> bool:
    """Whether a file, by its path below the library's folder, belongs to the test text."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100 < HELD_OUT_PERCENT


def library_texts(directory: Path | None = None) -> tuple[list[str], list[str]]:
    """The files for training and the held-out files of the standard library (or of `directory`)."""
    train, held_out = [], []
    for name, text in _files(directory or Path(sysconfig.get_paths()["stdlib"])):
        (held_out if file_is_held_out(name) else train).append(text)
    return train, held_out


def training_documents(library: list[str], seed: int = 0) -> list[str]:
    """The library's files with textbook functions strewn in, in random order."""
    rng = random.Random(seed)
    documents = [*library, *(functions.document(rng) for _ in range(len(library)))]
    rng.shuffle(documents)
    return documents

"""Finds the first of several markers in text that arrives in pieces."""

import re
from collections.abc import Iterable
from functools import lru_cache


class Markers:
    """A set of literal strings to search for. Of two with the same start it finds the shorter, wherever the text is split."""

    def __init__(self, markers: Iterable[str]):
        tree: dict[str, dict] = {}
        self._beginnings: set[str] = set()
        for marker in set(markers) - {""}:
            node = tree
            for letter in marker:
                node = node.setdefault(letter, {})
            node[""] = {}
            self._beginnings.update(marker[:length] for length in range(1, len(marker)))
        self._pattern = re.compile(_pattern(tree)) if tree else None
        self._reach = max(map(len, self._beginnings), default=0)
        first_letters = "".join(re.escape(letter) for letter in tree)
        self._first = re.compile(f"[{first_letters}]") if tree else None

    def search(self, text: str, start: int) -> tuple[int, int] | None:
        """The span of the first marker at or after `start`."""
        found = self._pattern.search(text, start) if self._pattern else None
        return found.span() if found else None

    def without(self, text: str) -> str:
        """A text without these markers."""
        return self._pattern.sub("", text) if self._pattern else text

    def held_from(self, text: str, start: int) -> int:
        """The first index where an incomplete marker may begin, in text without a marker; the text's length if none."""
        if self._first is None:
            return len(text)
        for found in self._first.finditer(text, max(start, len(text) - self._reach)):
            if text[found.start() :] in self._beginnings:
                return found.start()
        return len(text)


class Remover:
    """Takes markers out of text that arrives in pieces."""

    def __init__(self, markers: Markers):
        self._markers = markers
        self._held = ""

    def add(self, text: str) -> str:
        """Text that is certain by now to be no part of a marker."""
        text = self._markers.without(self._held + text)
        end = self._markers.held_from(text, 0)
        self._held = text[end:]
        return text[:end]

    def end(self) -> str:
        """The rest: the text ends, maybe within a marker."""
        text, self._held = self._held, ""
        return text


def markers_of(*texts: str) -> Markers:
    """Cached markers: all answers of a model search for the same ones."""
    return _markers(frozenset(texts))


@lru_cache(maxsize=256)
def _markers(texts: frozenset[str]) -> Markers:
    return Markers(texts)


def _pattern(tree: dict[str, dict]) -> str:
    """A pattern that decides on each letter once, so that hundreds of markers cost no more than one."""
    if "" in tree:
        return ""
    branches = [re.escape(letter) + _pattern(below) for letter, below in sorted(tree.items())]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"

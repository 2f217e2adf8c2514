"""The contents of files, as far as a store knows, and changes that its listener has not been notified of."""

import itertools
from collections.abc import Iterable

from jaxllm.kv_tiers.disk.folder import Names


class KnownFiles:
    """Files are written, lost, and found by reading the directory, also while it is read. Called by one thread at a time."""

    def __init__(self) -> None:
        self.files: dict[bytes, Names] = {}
        """The contents that files have, with all contents of a file in which each is."""
        self._others: dict[bytes, set[Names]] = {}
        """Further files of contents: engines that share a directory write the same ones next to different others."""
        self.is_listened_to = False
        """Whether changes are kept for `take_untold`."""
        self._changed: dict[bytes, Names | None] = {}
        """Contents that were written or lost while the directory is read, and their file if they are there."""
        self._given_up: dict[bytes, Names] = {}
        """Contents of files that took too long to write, and may be there by now."""
        self._untold: dict[bytes, bool] = {}
        """Contents added or removed since `take_untold`: no more than are in files, however rarely it is called."""

    def file_of(self, name: bytes) -> Names:
        """All contents of the file in which a content should be."""
        return self.files.get(name) or (name,)

    def possible_files(self, name: bytes) -> set[Names]:
        """The files in which a content may be, known or not: a write that was given up may have ended."""
        return {self.file_of(name), *self._others.get(name, ()), self._given_up.get(name, (name,)), (name,)}

    def add(self, file: Names) -> None:
        """A file was written."""
        self.note(set(file) - self.files.keys(), True)
        for name in file:
            if (other := self.files.get(name, file)) != file:
                self._others.setdefault(name, set()).add(other)
            self.files[name] = self._changed[name] = file

    def give_up(self, file: Names) -> None:
        """A file took too long to write."""
        self._given_up.update(dict.fromkeys(file, file))

    def lose(self, file: Names) -> None:
        """The contents of a file are lost, unless another one has them too."""
        for name in file:
            others = self._others.pop(name, set()) - {file}
            if self.files.get(name, file) == file:
                if others:
                    self.files[name] = self._changed[name] = others.pop()
                else:
                    if self.files.pop(name, None) is not None:
                        self.note([name], False)
                    self._changed[name] = None
            if others:
                self._others[name] = others

    def clear(self) -> None:
        """Nothing is known any more."""
        self.note(self.files, False)
        self.files, self._others = {}, {}
        self._given_up.clear()

    def begin_scan(self) -> None:
        """The directory is going to be read."""
        self._changed.clear()

    def end_scan(self, files: dict[bytes, Names], others: dict[bytes, set[Names]]) -> None:
        """This was found in the directory: see `by_content`."""
        for name, file in self._changed.items():
            others.pop(name, None)
            if file is None:
                files.pop(name, None)
            else:
                files[name] = file
        if self.is_listened_to:
            self.note(self.files.keys() - files.keys(), False)
            self.note(files.keys() - self.files.keys(), True)
        self.files, self._others = files, others

    # For the listener

    def tell_all(self) -> None:
        """There is a new listener: all contents count as added."""
        self.is_listened_to = True
        self._untold.clear()
        self.note(self.files, True)

    def note(self, names: Iterable[bytes], is_there: bool) -> None:
        """These names have come or gone, and had not before."""
        if self.is_listened_to:
            for name in names:
                if self._untold.pop(name, is_there) is is_there:
                    self._untold[name] = is_there

    def take_untold(self, most: int) -> list[tuple[bytes, bool]]:
        """Returns at most so many contents that were added or removed since the last call, and whether they are there."""
        told = list(itertools.islice(self._untold.items(), most))
        for name, _ in told:
            del self._untold[name]
        return told


def by_content(found: Iterable[Names]) -> tuple[dict[bytes, Names], dict[bytes, set[Names]]]:
    """A file of each content, and the others of those that are in several."""
    files: dict[bytes, Names] = {}
    others: dict[bytes, set[Names]] = {}
    for file in found:
        for name in file:
            if files.setdefault(name, file) is not file:
                others.setdefault(name, set()).add(file)
    return files, others

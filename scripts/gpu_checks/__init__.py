"""The checks of `check_gpu.py`: each part is a function that yields its `Outcome`s one by one."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """One check."""

    name: str
    passed: bool
    detail: str
    skipped: bool = False
    """The machine cannot run it: neither passed nor failed, and the record says so."""

    @property
    def failed(self) -> bool:
        return not (self.passed or self.skipped)

    def line(self) -> str:
        """As it is printed."""
        word = "skip" if self.skipped else "ok  " if self.passed else "FAIL"
        return f"{word} {self.name}: {self.detail}"


def skip(name: str, why: str) -> Outcome:
    """A check that this machine cannot run."""
    return Outcome(name, passed=False, detail=why, skipped=True)

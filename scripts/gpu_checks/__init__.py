"""The checks of `check_gpu.py`: each part is a function that gives its `Outcome`s one by one."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """One check."""

    name: str
    passed: bool
    detail: str

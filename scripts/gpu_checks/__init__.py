"""The checks of `check_gpu.py`: each part is a function that yields its `Outcome`s one by one."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxllm.kernel_verdicts import OpReport


@dataclass(frozen=True)
class Outcome:
    """One check."""

    name: str
    passed: bool
    detail: str
    skipped: bool = False
    """The machine cannot run it: neither passed nor failed; recorded as skipped."""
    num_left: int = 0
    """Number of cases that were not run, if it stands for such."""

    @property
    def failed(self) -> bool:
        return not (self.passed or self.skipped)

    def line(self) -> str:
        """As it is printed."""
        word = "skip" if self.skipped else "ok  " if self.passed else "FAIL"
        return f"{word} {self.name}: {self.detail}"


def kernels_in_use(name: str, reports: Mapping[str, OpReport]) -> Outcome:
    """The implementation that an engine chose for each op. If it replaced a kernel that failed, what follows checks less than it should."""
    failed = [f"{op} by {by} failed: {why}" for op, report in reports.items() for by, why in report.failed.items()]
    used = ", ".join(f"{op} {report.implementation} ({report.check})" for op, report in reports.items())
    return Outcome(f"{name}: kernels", not failed, "; ".join([used, *failed]))


def left_out(name: str, *cases: str) -> Outcome:
    """A check, or several cases, that there was no time for."""
    told = "not run for lack of time (--seconds)" + ": " * bool(cases) + ", ".join(cases)
    return Outcome(name, passed=False, detail=told, num_left=max(1, len(cases)))


def skip(name: str, why: str) -> Outcome:
    """A check that this machine cannot run."""
    return Outcome(name, passed=False, detail=why, skipped=True)

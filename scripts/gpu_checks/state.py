"""Keeps the results of runs of `check_gpu.py` in a file: the next run goes on with what is left.

An outcome holds on the device and with the versions that it was found with (`Identity`), and as long as the sources are the same: of
a kernel's case those of its op and of the checks, of any other those of the whole engine.

The file: {identity as JSON: {"hello": …, "jobs": {job: JobState}}}. It may hold several devices.
"""

import dataclasses
import functools
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pallas_kernels import verified
from scripts.gpu_checks import Outcome
from scripts.gpu_checks.jobs import SHARE_OF_MEMORY, Hello, Job
from scripts.gpu_checks.record import OPS_OF_CASES

ROOT = Path(__file__).resolve().parents[2]
RESUMABLE = ("kernels", "hosts")
"""Parts that leave out what has passed; all others begin again unless their process came to its end."""
_OF_SEVERAL_GPUS = ("collectives", "parallel_models", "tensor_parallel", "topologies")
"""Parts that one GPU skips."""
_OF_KERNELS = ("pallas_kernels/checking", "scripts/kernels", "scripts/gpu_checks/kernels.py")
_OF_ENGINES = (
    *("jaxllm", "pallas_kernels", "scripts/gpu_checks", "scripts/kernels", "scripts/measuring", "scripts/rehearsing"),
    *("tests/helpers/vision_checkpoint.py", "tests/helpers/whisper_checkpoint.py"),
)
_BOOKKEEPING = ("carrying.py", "compiled.py", "jobs.py", "lowered.py", "pages.py", "record.py", "state.py", "verified.json")
"""Files that decide no outcome."""


@dataclass(frozen=True)
class Identity:
    """Where outcomes hold."""

    device: str
    num_devices: int
    versions: Mapping[str, str]
    repeats: int
    tiny: bool

    def __str__(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


@dataclass
class JobState:
    """Results of a job."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    """By the name of an outcome: the digest of what it was found with."""
    finished: str = ""
    """The digest of what the whole job passed with."""
    seconds: float = 0.0
    """In all runs since it last began with nothing."""
    num_left: int = 0
    """Cases that the last run had no time for."""


@dataclass
class State:
    """The jobs of one identity. Without a path nothing is kept."""

    path: Path | None
    identity: Identity
    ops: Sequence[str] = tuple(OPS_OF_CASES)
    """The groups of kernel cases that are run."""
    jobs: dict[str, JobState] = field(default_factory=dict)
    hello: Hello | None = None
    _begun: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found = _read(self.path).get(str(self.identity), {})
        if found.get("hello"):
            self.hello = Hello(**found["hello"])
        for name, values in found.get("jobs", {}).items():
            outcomes = {outcome: Outcome(**fields) for outcome, fields in values["outcomes"].items()}
            self.jobs[name] = JobState(**{**values, "outcomes": outcomes})

    def kept(self, job: Job) -> list[Outcome]:
        """Results that need not be computed again: all of a job that passed as a whole, of another what passed if its part can go on."""
        return [found for found in self._held(job) if job.part != "kernels" or found.name.split(":")[0] in self.ops]

    def _held(self, job: Job) -> list[Outcome]:
        """Results of kernels that need not be computed again, by group of cases."""
        known = self.jobs.get(str(job), JobState())
        if self.is_finished(job):
            return list(known.outcomes.values())
        if job.part not in RESUMABLE:
            return []
        return [
            found for name, found in known.outcomes.items() if found.passed and known.sources[name] == self._source(job, name)
        ]

    def is_finished(self, job: Job) -> bool:
        """Whether the whole job has passed with the present sources."""
        return self.jobs.get(str(job), JobState()).finished == self._source(job)

    def begin(self, job: Job) -> None:
        """The job begins: what it has to run again is forgotten."""
        known, kept = self.jobs.get(str(job), JobState()), {outcome.name: outcome for outcome in self._held(job)}
        sources = {name: known.sources[name] for name in kept}
        self.jobs[str(job)] = JobState(kept, sources, seconds=known.seconds if kept else 0.0)
        self._begun[str(job)] = time.perf_counter()
        self._save()

    def add(self, job: Job, outcome: Outcome) -> None:
        """Note an outcome of a job that has begun."""
        if str(job) not in self._begun:
            return
        known = self.jobs[str(job)]
        if outcome.num_left:
            known.num_left += outcome.num_left
        else:
            known.outcomes[outcome.name] = outcome
            known.sources[outcome.name] = self._source(job, outcome.name)
        self._save()

    def end(self, job: Job) -> None:
        """The job's process has ended, after an outcome that says so if it failed."""
        if str(job) not in self._begun:
            return
        known = self.jobs[str(job)]
        known.seconds += time.perf_counter() - self._begun.pop(str(job))
        is_whole = not known.num_left and not any(found.failed for found in known.outcomes.values())
        known.finished = self._source(job) if is_whole else ""
        self._save()

    def meet(self, hello: Hello) -> None:
        """Note the device."""
        self.hello = hello

    def seconds(self, jobs: Iterable[Job]) -> float:
        """Seconds that a part took so far: its jobs run concurrently."""
        return max((self.jobs[str(job)].seconds for job in jobs if str(job) in self.jobs), default=0.0)

    def needed_seconds(self, job: Job) -> float:
        """An estimate for what is left of a job: by its own pace, else by the longest record of its part; 0 if nothing is known."""
        known = self.jobs.get(str(job), JobState())
        num_passed = sum(outcome.passed for outcome in known.outcomes.values())
        if known.seconds and known.num_left and num_passed:
            return known.seconds / num_passed * known.num_left
        if job.part in _OF_SEVERAL_GPUS and self.identity.num_devices == 1:
            return known.seconds
        recorded = (record["parts"][job.part] for record in verified.records().values() if job.part in record["parts"])
        return known.seconds or max((part["seconds"] for part in recorded if part["passed"]), default=0.0)

    def left(self, jobs: Sequence[Job], total_gib: float | None) -> str:
        """The rest of these jobs, with an estimate of its time when run concurrently; empty if there is none."""
        found = [job for job in jobs if not self.is_finished(job)]
        if not found:
            return ""
        seconds = {job: self.needed_seconds(job) for job in found}
        told = [f"{job}{self._cases(job)}{f' {needed:.0f} s' if needed else ''}" for job, needed in seconds.items()]
        room = (total_gib or 1.0) * SHARE_OF_MEMORY
        packed = sum(needed * min(1.0, (job.gib or room) / room) for job, needed in seconds.items())
        return f"left: {', '.join(told)}; about {max(packed, *seconds.values(), 0.0):.0f} s together"

    def _cases(self, job: Job) -> str:
        num_left = self.jobs.get(str(job), JobState()).num_left
        return f" ({num_left} cases)" if num_left and job.part in RESUMABLE else ""

    def _source(self, job: Job, outcome: str = "") -> str:
        """The digest of what an outcome of a job depends on, or without a name the whole job."""
        if job.part != "kernels":
            return _digest(_OF_ENGINES)
        group = outcome.split(":")[0]
        groups = [group] if group in OPS_OF_CASES else sorted(self.ops)
        return "-".join([_digest(_OF_KERNELS), *(f"{each}-{verified.source_digest(OPS_OF_CASES[each])}" for each in groups)])

    def _save(self) -> None:
        if self.path is None:
            return
        now = {
            "hello": self.hello and dataclasses.asdict(self.hello),
            "jobs": {name: dataclasses.asdict(known) for name, known in self.jobs.items()},
        }
        beside = self.path.with_name(self.path.name + ".new")
        beside.write_text(json.dumps(_read(self.path) | {str(self.identity): now}, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, self.path)


def _read(path: Path | None) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else {}


@functools.cache
def _digest(names: tuple[str, ...]) -> str:
    """Digest of files and folders, given from the root."""
    digest = hashlib.sha256()
    for name in names:
        path = ROOT / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts and file.name not in _BOOKKEEPING:
                digest.update(f"{file.relative_to(ROOT)}\0".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]

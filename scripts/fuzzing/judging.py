"""Reads damaged files within limits, in processes that may crash, and tells what each came to."""

import contextlib
import faulthandler
import json
import logging
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxllm.errors import JaxLLMError
from scripts.fuzzing.kinds import KINDS, Files

ACCEPTED, REFUSED = "accepted", "refused"
MAX_BYTES = 256 << 20
"""Most that a reader may add to the memory of its process."""
MAX_SECONDS = 2.0
"""Most CPU time of a reader."""
MAX_MESSAGE = 1024
"""Most characters of an error's message."""
_SPARE_BYTES = 2 << 30
"""Address space that a process may add before its allocations fail."""
_WALL_SECONDS = 60


@dataclass(frozen=True)
class Outcome:
    """Result of one file."""

    number: int
    kind: str
    what: str
    """ACCEPTED, REFUSED, or what is wrong."""
    seconds: float = 0.0
    num_bytes: int = 0
    """Memory that reading added at its peak, where it exceeded the peak before."""

    @property
    def is_finding(self) -> bool:
        return self.what not in (ACCEPTED, REFUSED)


def kind_of(number: int, kinds: Sequence[str]) -> str:
    return kinds[number % len(kinds)]


def files_of(seed: int, number: int, kind: str) -> Files:
    """The damaged file of a number, with those next to it."""
    return KINDS[kind].make(random.Random(f"{seed} {number} {kind}"))


def write(directory: Path, files: Files) -> None:
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)


def judge(number: int, kind: str, files: Files, folder: Path, before_bytes: int) -> Outcome:
    """Read the files in this process. before_bytes: its memory without them."""
    directory = Path(tempfile.mkdtemp(dir=folder))
    write(directory, files)
    peak, start = _peak_bytes(), time.process_time()
    try:
        KINDS[kind].read(directory)
        what = ACCEPTED
    except JaxLLMError as error:
        what = REFUSED if len(str(error)) <= MAX_MESSAGE else f"a message of {len(str(error))} characters: {str(error)[:100]!r}"
    except BaseException as error:  # the fault that is looked for; a panic of Rust is no Exception
        what = f"{type(error).__name__}: {str(error)[:200]} ({_place(error)})"
    seconds = time.process_time() - start
    num_bytes = _peak_bytes() - before_bytes if _peak_bytes() > peak else 0
    if seconds > MAX_SECONDS and what in (ACCEPTED, REFUSED):
        what = f"{seconds:.1f} s"
    if num_bytes > MAX_BYTES and what in (ACCEPTED, REFUSED):
        what = f"{num_bytes >> 20} MB"
    shutil.rmtree(directory, ignore_errors=True)
    return Outcome(number, kind, what, seconds, num_bytes)


def _place(error: BaseException) -> str:
    """The last line of the project's own code on the way to an error."""
    place, trace = "", error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if "/jaxllm/" in name:
            place = f"{name.rpartition('/jaxllm/')[2]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def warm_up(folder: Path) -> list[Outcome]:
    """Read a valid file of each kind, so that forked processes have what is imported. Returns what was not accepted."""
    faults = []
    for name, kind in KINDS.items():
        for files in kind.valid():
            outcome = judge(-1, name, files, folder, _resident_bytes())
            faults += [outcome] if outcome.what != ACCEPTED and outcome.seconds < MAX_SECONDS else []
    return faults


class Batch:
    """Files that a child process reads, one after the other."""

    def __init__(self, seed: int, numbers: range, kinds: Sequence[str], folder: Path):
        self._seed, self._numbers, self._kinds = seed, numbers, kinds
        self._folder = Path(tempfile.mkdtemp(dir=folder))
        self._results = self._folder / "results"
        self._current = mmap.mmap(-1, 8)
        """The number of the file that is read, which is known when the child has crashed."""
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._run()
            finally:
                os._exit(1)

    def _run(self) -> None:
        logging.disable(logging.CRITICAL)
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust reports its panics there
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used + _SPARE_BYTES, resource.RLIM_INFINITY))
        before = _resident_bytes()
        for signal_ in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(signal_, signal.SIG_DFL)
        with self._results.open("w", encoding="utf-8") as results:
            for number in self._numbers:
                kind = kind_of(number, self._kinds)
                self._current[:] = struct.pack("<q", number)
                try:
                    files = files_of(self._seed, number, kind)
                except Exception as error:
                    outcome = Outcome(number, kind, f"the fuzzer itself failed: {error!r}")
                    results.write(json.dumps(asdict(outcome)) + "\n")
                    continue
                signal.setitimer(signal.ITIMER_PROF, 3 * MAX_SECONDS)
                signal.setitimer(signal.ITIMER_REAL, _WALL_SECONDS)
                outcome = judge(number, kind, files, self._folder, before)
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.setitimer(signal.ITIMER_REAL, 0)
                results.write(json.dumps(asdict(outcome)) + "\n")
                results.flush()
        os._exit(0)

    def finish(self, status: int) -> tuple[list[Outcome], range]:
        """Results of its files, and the files that are left because one of them ended the process with this status."""
        lines = self._results.read_text(encoding="utf-8").splitlines() if self._results.exists() else []
        outcomes = [Outcome(**json.loads(line)) for line in lines]
        left = range(0)
        if os.waitstatus_to_exitcode(status):
            (number,) = struct.unpack("<q", self._current[:])
            outcomes.append(Outcome(number, kind_of(number, self._kinds), _ending(os.waitstatus_to_exitcode(status))))
            left = range(number + 1, self._numbers.stop)
        self._current.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return outcomes, left


def _ending(code: int) -> str:
    if code == -signal.SIGPROF:
        return f"more than {3 * MAX_SECONDS:g} s of CPU time"
    if code == -signal.SIGALRM:
        return f"more than {_WALL_SECONDS} s"
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def judge_all(seed: int, batches: Iterable[range], kinds: Sequence[str], folder: Path, jobs: int) -> Iterator[Outcome]:
    """Result of each file, in `jobs` processes at a time; in this process if jobs is 0, where a crash ends all."""
    if not jobs:
        before = _resident_bytes()
        for number in (number for batch in batches for number in batch):
            kind = kind_of(number, kinds)
            yield judge(number, kind, files_of(seed, number, kind), folder, before)
        return
    pending, running = iter(batches), dict[int, Batch]()
    left: list[range] = []
    try:
        while True:
            while len(running) < jobs and (numbers := left.pop() if left else next(pending, None)):
                batch = Batch(seed, numbers, kinds, folder)
                running[batch.pid] = batch
            if not running:
                return
            ended = [(pid, status) for pid in running for found, status in [os.waitpid(pid, os.WNOHANG)] if found]
            for pid, status in ended:
                outcomes, rest = running.pop(pid).finish(status)
                left += [rest] if rest else []
                yield from outcomes
            time.sleep(0 if ended else 0.01)
    finally:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

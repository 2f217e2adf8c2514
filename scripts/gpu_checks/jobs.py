"""Runs the parts of `check_gpu.py` as processes that share a GPU: while one traces or compiles, another computes.

Each process takes a stated amount of the GPU's memory, and a part that crashes takes no other with it. A process prints a line
of JSON per event, behind MARK; whatever else it prints goes to this process's standard error. Its standard input has the names of
the outcomes that it leaves out, as JSON.
"""

import dataclasses
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.gpu_checks import Outcome, left_out

MARK = "\x1echeck_gpu "
GRACE_SECONDS = 60.0
"""Seconds after the limit at which a running process is killed."""
SHARE_OF_MEMORY = 0.9
"""Share of the GPU's memory for all pools together: contexts and code lie outside."""
SCRIPT = Path(__file__).resolve().parent.parent / "check_gpu.py"


@dataclass(frozen=True)
class Job:
    """A part, or one of several shares of it, as a process."""

    part: str
    share: int = 0
    num_shares: int = 1
    gib: float | None = None
    """GiB of a GPU's memory; None: the default memory setting, and no concurrent job."""
    all_gpus: bool = False
    """Use every GPU, not only the first."""
    grows: bool = False
    """Allocate memory on demand instead of all at once."""

    def __str__(self) -> str:
        return self.part + f" ({self.share + 1} of {self.num_shares})" * (self.num_shares > 1)


JOBS = (
    *(Job("kernels", i, 3, gib=10, grows=True) for i in range(3)),
    Job("logits", gib=40),
    *(Job("engine", i, 4, gib=15) for i in range(3)),
    Job("tokens", gib=4),
    Job("failures", gib=4),
    Job("engine", 3, 4, gib=15),
    Job("collectives", gib=4, all_gpus=True),
    Job("adapters", gib=6, all_gpus=True),
    *(Job("images", i, 6, gib=10, all_gpus=True) for i in range(6)),
    *(Job("speech", i, 2, gib=6, all_gpus=True) for i in range(2)),
    Job("tiers", gib=20, all_gpus=True),
    *(Job("parallel_models", i, 5, gib=10, all_gpus=True) for i in range(5)),
    Job("topologies", gib=20, all_gpus=True),
    Job("hosts", gib=24, all_gpus=True),
    Job("tensor_parallel", 1, 2, gib=10, all_gpus=True),
    Job("tensor_parallel", 0, 2, all_gpus=True),
)
"""In the order of their starts: a job waits until its memory is free."""


@dataclass(frozen=True)
class Ended:
    """The last event of a job."""

    job: Job


@dataclass(frozen=True)
class Hello:
    """The first event of a job: what it runs on."""

    device_kind: str
    num_devices: int
    backend: str


Event = Outcome | Hello | Ended


def write(event: Hello | Outcome) -> None:
    """Report an event to the parent process."""
    print(MARK + json.dumps({"kind": type(event).__name__, **dataclasses.asdict(event)}), flush=True)


def read(line: str) -> Hello | Outcome | None:
    """The event of a line, behind whatever a library left unfinished there; None if it is none."""
    _, mark, text = line.partition(MARK)
    if not mark:
        return None
    fields = json.loads(text)
    return {"Hello": Hello, "Outcome": Outcome}[fields.pop("kind")](**fields)


def run(
    jobs: Sequence[Job],
    arguments: Sequence[str],
    *,
    total_gib: float,
    until: float,
    script: Path = SCRIPT,
    done: Callable[[Job], Collection[str]] = lambda job: (),
    needed_seconds: Callable[[Job], float] = lambda job: 0.0,
) -> Iterator[tuple[Job, Event]]:
    """The events of all jobs as they come. No job begins after `until` (`time.perf_counter`): what is left out has failed.

    done: outcomes that a job leaves out. needed_seconds: a job that would be ended before its end begins only as the first.
    """
    events: queue.Queue[tuple[Job, Event]] = queue.Queue()
    waiting, running = list(jobs), set[Job]()
    processes: list[subprocess.Popen[str]] = []
    limit = total_gib * SHARE_OF_MEMORY
    try:
        while waiting or running:
            while (job := _next(waiting, running, limit)) is not None:
                waiting.remove(job)
                now = time.perf_counter()
                if now > until or (processes and now + needed_seconds(job) > until + GRACE_SECONDS):
                    yield job, left_out(f"{job}")
                    continue
                running.add(job)
                process = _start(job, [*arguments, "--seconds", f"{until - now:.1f}"], total_gib, script, done(job))
                processes.append(process)
                threading.Thread(target=_follow, args=(job, process, until, events), daemon=True).start()
            if running:
                job, event = events.get()
                if isinstance(event, Ended):
                    running.discard(job)
                yield job, event
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()


def _next(waiting: Sequence[Job], running: set[Job], limit: float) -> Job | None:
    """The first job that fits next to those that run; a job for the whole machine waits for all before it."""
    used = sum(job.gib or limit for job in running)
    for job in waiting:
        if job.gib is None:
            return job if not running and job is waiting[0] else None
        if used + min(job.gib, limit) <= limit:
            return job
    return None


def environment(job: Job, total_gib: float) -> dict[str, str]:
    """Environment variables for a job's JAX on the GPU."""
    found = dict(os.environ)
    if job.gib is not None:
        fraction = min(job.gib / total_gib, SHARE_OF_MEMORY)
        found["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{fraction:.4f}"
        found["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false" if job.grows else "true"
    if not job.all_gpus:
        found["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return found


def _start(
    job: Job, arguments: Sequence[str], total_gib: float, script: Path, done: Collection[str]
) -> "subprocess.Popen[str]":
    share = f"{job.share}/{job.num_shares}"
    with tempfile.TemporaryFile("w+") as names:
        json.dump(sorted(done), names)
        names.seek(0)
        return subprocess.Popen(
            [sys.executable, str(script), "--as-job", "--parts", job.part, "--share", share, *arguments],
            env=environment(job, total_gib),
            stdin=names,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )


def _follow(job: Job, process: "subprocess.Popen[str]", until: float, events: "queue.Queue[tuple[Job, Event]]") -> None:
    """Pass on the events of one job, to its end."""
    killer = threading.Timer(until - time.perf_counter() + GRACE_SECONDS, process.kill)
    killer.start()
    num_outcomes, last = 0, ""
    assert process.stdout is not None
    for line in process.stdout:
        event = read(line)
        if event is None:
            last = line.strip() or last
            sys.stderr.write(line)
            continue
        num_outcomes += isinstance(event, Outcome)
        events.put((job, event))
    status = process.wait()
    killer.cancel()
    if status != 0:
        detail = f"the process ended with status {status} after {num_outcomes} outcomes; its last line: {last[:300]}"
        events.put((job, Outcome(f"{job}", False, detail)))
    events.put((job, Ended(job)))

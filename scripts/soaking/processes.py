"""A server that the script starts, and the memory of all its processes. Reads /proc: Linux only."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

RUN = "import sys; from jaxllm.cli.main import main; sys.exit(main())"
DEFAULT_COMMAND = f"{sys.executable} -c '{RUN}' serve demo --warmup all --port {{port}}"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@contextmanager
def started_server(
    command: str, log: Path, *, timeout_seconds: float, ready_path: str = "/health"
) -> Iterator[tuple[str, int]]:
    """Start a server ({port} in the command is replaced), wait until it is ready, stop it at the end: (url, process id)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        server = subprocess.Popen(
            shlex.split(command.format(port=port)), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_until_healthy(url, server, log, timeout_seconds, ready_path)
        yield url, server.pid
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def wait_until_healthy(
    url: str, server: subprocess.Popen[bytes], log: Path, timeout_seconds: float, path: str = "/health"
) -> None:
    """Until it answers this path with 200. Exits if it ends, or after the timeout."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        if server.poll() is not None:
            sys.exit(f"the server ended with code {server.returncode} before it was ready; see {log}")
        try:
            with urllib.request.urlopen(f"{url}{path}", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                sys.exit(f"the server is not healthy after {timeout_seconds:.0f} s; see {log}")
            time.sleep(0.2)


def processes_below(pid: int) -> dict[int, str]:
    """A process and all that descend from it, with what they are called."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        name, rest = stat[stat.index("(") + 1 : stat.rindex(")")], stat[stat.rindex(")") + 2 :].split()
        number = int(entry.name)
        parents[number] = int(rest[1])
        said = [word.decode("utf-8", "replace") for word in words if word]
        names[number] = " ".join([Path(said[0]).name, *said[1:]])[:80] if said else name
    found = {pid: names.get(pid, "")} if pid in names else {}
    todo = list(found)
    while todo:
        parent = todo.pop()
        children = [child for child, its in parents.items() if its == parent and child not in found]
        found |= {child: names[child] for child in children}
        todo += children
    return found


def resident_bytes(pid: int) -> int | None:
    """Memory of a process; None if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return None


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class MemoryCurve:
    """Samples of every process: seconds, requests done so far, bytes."""

    names: dict[int, str] = field(default_factory=dict)
    samples: dict[int, list[tuple[float, int, int]]] = field(default_factory=dict)

    def growth(self, first: tuple[int, int], last: tuple[int, int]) -> dict[int, tuple[int, int]]:
        """Median bytes while the requests done lay in the first range and in the last, of each process that has samples in both."""
        found = {}
        for pid, samples in self.samples.items():
            early = sorted(size for _, done, size in samples if first[0] <= done <= first[1])
            late = sorted(size for _, done, size in samples if last[0] <= done <= last[1])
            if early and late:
                found[pid] = (early[len(early) // 2], late[len(late) // 2])
        return found


class MemorySampler:
    """Sample memory in a thread during the `with` block; the caller keeps `done` up to date."""

    def __init__(self, pid: int, interval_seconds: float = 0.5):
        self.curve = MemoryCurve()
        self.done = 0
        self._pid = pid
        self._interval = interval_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "MemorySampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def sample(self, seconds: float) -> None:
        """Measure once."""
        for pid, name in processes_below(self._pid).items():
            if (size := resident_bytes(pid)) is not None:
                self.curve.names.setdefault(pid, name)
                self.curve.samples.setdefault(pid, []).append((seconds, self.done, size))

    def _run(self) -> None:
        began = time.monotonic()
        self.sample(0.0)
        while not self._stop.wait(self._interval):
            self.sample(time.monotonic() - began)
        self.sample(time.monotonic() - began)

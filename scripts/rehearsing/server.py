"""A server that may be broken on purpose, and what it must not leave behind. Reads /proc: Linux only."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from scripts.rehearsing.other_host import OtherHost, host_environment
from scripts.soaking.processes import RUN, processes_below, wait_until_healthy

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ("--host", "127.0.0.1", "--warmup", "all", "--max-num-seqs", "32", "--token-buckets", "512", "--decode-buckets", "8,32")
START_SECONDS = 300.0
PATIENCE_SECONDS = 20.0


class RehearsedServer:
    """`jaxllm serve demo` with a separate directory for temporary files."""

    def __init__(self, flags: Sequence[str], fault: str, directory: Path, *, has_other_host: bool = False, tree: Path = ROOT):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.other: OtherHost | None = None
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = directory / "log"
        self.temporary = directory / "t"
        self.temporary.mkdir()
        self._shared = _shared_memory()
        environment = {**os.environ, "TMPDIR": str(self.temporary), "PYTHONPATH": str(tree), **host_environment(0)}
        if fault:
            environment["JAXLLM_FAULT"] = fault
        model = () if "--model" in flags else ("demo",)
        command = [sys.executable, "-c", RUN, "serve", *model, *FLAGS, "--port", str(self.port), *flags]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True, cwd=tree
            )
        if has_other_host:
            port = int(flags[flags.index("--master-port") + 1])
            self.other = OtherHost([*FLAGS, *flags], port, directory)
        self.family: dict[int, str] = {}
        self._num_sockets: dict[int, int] = {}
        self._num_files = 0

    def wait_ready(self) -> None:
        wait_until_healthy(self.url, self.process, self.log, START_SECONDS)
        self.note_family()

    def note_family(self) -> None:
        """Record its processes, their sockets and its files, as those that it may have later."""
        self.family = processes_below(self.process.pid)
        self._num_sockets = {pid: _num_sockets(pid) for pid in self.family}
        self._num_files = _num_files(self.temporary)

    def pids(self, module: str) -> list[int]:
        """Its processes that run a module ("engine.process", "server.api_server")."""
        return [pid for pid, name in processes_below(self.process.pid).items() if module in name]

    def wait_whole(self) -> None:
        """Wait until the initial number of processes is running and all API servers serve."""
        _soon(lambda: len(processes_below(self.process.pid)) == len(self.family))
        for _ in range(4):  # connections are dealt out among the API servers
            wait_until_healthy(self.url, self.process, self.log, PATIENCE_SECONDS)

    def exit_code(self, timeout_seconds: float = 60.0) -> int:
        """Once it has ended by itself; the family to look for afterwards is who lived until then."""
        self.family |= processes_below(self.process.pid)
        return self.process.wait(timeout_seconds)

    def left_while_alive(self) -> list[str]:
        """Resources that an idle server holds and did not hold when it was ready."""
        found = []
        if not _soon(lambda: len(processes_below(self.process.pid)) == len(self.family)):
            found.append(f"processes: {sorted(processes_below(self.process.pid).values())}")

        def grown() -> list[int]:
            return [pid for pid, before in self._num_sockets.items() if _num_sockets(pid) > before]

        if not _soon(lambda: not grown()):
            found += [f"{_num_sockets(pid)} sockets, {self._num_sockets[pid]} before: {self.family[pid]}" for pid in grown()]
        if not _soon(lambda: _num_files(self.temporary) <= self._num_files):
            found.append(f"{_num_files(self.temporary)} temporary files, {self._num_files} before")

        def holding() -> list[int]:
            return holders_of_dead_memory(processes_below(self.process.pid))

        if not _soon(lambda: not holding()):
            found.append(f"blocks in host memory of a process that has ended, held by {holding()}")
        return found

    def left_behind(self) -> list[str]:
        """Resources left after its end."""
        found = []
        if not _soon(lambda: not any(map(_is_alive, self.family))):
            found.append(f"processes: {[name for pid, name in self.family.items() if _is_alive(pid)]}")
        if files := sorted(path.name for path in self.temporary.iterdir()):
            found.append(f"temporary files: {files}")
        if shared := sorted(_shared_memory() - self._shared):
            found.append(f"/dev/shm: {shared}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            found.append("the port still listens")
        return found

    def stop(self) -> None:
        """End it whatever it does."""
        for pid in (*self.family, self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        if self.other is not None:
            self.other.stop()


@contextlib.contextmanager
def rehearsed(
    flags: Sequence[str] = (), fault: str = "", *, has_other_host: bool = False, tree: Path = ROOT
) -> Iterator[RehearsedServer]:
    """A server that is ready, on two hosts if asked. It, and all that is left of it, ends with the block.

    tree: the checkout whose code it runs.
    """
    if has_other_host:
        with socket.create_server(("127.0.0.1", 0)) as free:
            flags = [*flags, "--master-port", str(free.getsockname()[1])]
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as directory:
        server = RehearsedServer(flags, fault, Path(directory), has_other_host=has_other_host, tree=tree)
        try:
            server.wait_ready()
            yield server
        finally:
            server.stop()


def _soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _num_sockets(pid: int) -> int:
    """Open sockets of a process; 0 if it has ended."""
    count = 0
    with contextlib.suppress(OSError):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                count += os.readlink(each).startswith("socket:")
    return count


def _num_files(directory: Path) -> int:
    return sum(1 for _ in directory.rglob("*"))


def holders_of_dead_memory(pids: Iterable[int]) -> list[int]:
    """Processes that map blocks in host memory (`Arena`) of a process that is not among them. Its owner alone may write to it."""
    owned, readers = set(), []
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "/memfd:jaxllm-kv" in line:
                    _, access, _, _, inode, *_ = line.split()
                    if "w" in access:
                        owned.add(inode)
                    else:
                        readers.append((pid, inode))
    return sorted({pid for pid, inode in readers if inode not in owned})


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()

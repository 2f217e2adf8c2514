"""The servers that are attacked: started when an attack needs them, kept for the next one that needs the same."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from scripts.attacking import wire
from scripts.rehearsing.server import ROOT, RehearsedServer, rehearsed
from scripts.soaking.processes import RUN, cpu_seconds, processes_below, resident_bytes

ALL_HAVE = ("--enable-lora", "--max-loras", "1", "--max-lora-rank", "8")
"""Flags of all servers, so that they run the same programs, which the first one compiles."""


class Attacked(Protocol):
    """A server, as attacks see it."""

    port: int

    def pids(self, module: str) -> list[int]:
        """Its processes that run a module ("engine.process", "server.api_server"); none if they cannot be distinguished."""


@dataclass(frozen=True)
class Ended:
    """A command that has ended, or was ended."""

    code: int | None
    """None: it did not end in time."""
    output: str
    seconds: float

    @property
    def last_line(self) -> str:
        return (self.output.strip().splitlines() or [""])[-1][:160]


class Target:
    """A checkout whose server and commands are attacked."""

    def __init__(self, tree: Path = ROOT):
        self.tree = tree
        self._stack = contextlib.ExitStack()
        self._flags: tuple[str, ...] | None = None
        self._server: RehearsedServer | None = None

    def server(self, *flags: str, fresh: bool = False) -> Attacked:
        """A server with these flags that is ready and well; `fresh`: an unused one."""
        if fresh or flags != self._flags or self._server is None or not _is_well(self._server):
            self.close()
            self._server = self._stack.enter_context(rehearsed([*ALL_HAVE, *flags], tree=self.tree))
            self._flags = flags
        return self._server

    def log(self) -> str:
        """Output of the latest server."""
        return "" if self._server is None else self._server.log.read_text(errors="replace")

    def close(self) -> None:
        """End the server that runs."""
        self._stack.close()
        self._server = self._flags = None

    def command(self, *words: str, timeout_seconds: float, memory_bytes: int | None = None, is_first: bool = False) -> Ended:
        """Run `jaxllm` to its end, or to its time limit.

        memory_bytes: of its address space. is_first: with a separate, empty cache.
        """
        started = time.monotonic()
        with tempfile.TemporaryFile() as output, directory() as cache:
            process = subprocess.Popen(
                [sys.executable, "-c", RUN, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(self.tree), **({"JAXLLM_CACHE_DIR": str(cache)} if is_first else {})},
                cwd=self.tree,
                start_new_session=True,
                preexec_fn=None if memory_bytes is None else lambda: _limit_memory(memory_bytes),
            )
            code: int | None = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout_seconds)
            seconds = time.monotonic() - started
            if code is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            return Ended(code, output.read().decode(errors="replace"), seconds)

    def python(self, script: str, *arguments: str, timeout_seconds: float) -> str:
        """Output of a script that imports this checkout."""
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(self.tree)},
            cwd=self.tree,
            timeout=timeout_seconds,
            check=False,
        )
        return done.stdout if done.returncode == 0 else f"{done.stdout}\n{done.stderr}"


def _limit_memory(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def _is_well(server: RehearsedServer) -> bool:
    return server.process.poll() is None and wire.get(server, "/health", seconds=5).status == 200


class PeakMemory:
    """The most memory that a process and all below it take during the `with` block, above what they took before."""

    def __init__(self, pid: int):
        self._pid = pid
        self._done = threading.Event()
        self._before = self._now()
        self.grown_bytes = 0

    def __enter__(self) -> "PeakMemory":
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _now(self) -> int:
        return sum(resident_bytes(pid) or 0 for pid in processes_below(self._pid))

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            self.grown_bytes = max(self.grown_bytes, self._now() - self._before)


def cpu_of(pids: Sequence[int]) -> float:
    """CPU seconds of these processes so far."""
    return sum(cpu_seconds(pid) for pid in pids)


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    """A directory of this attack's own."""
    with tempfile.TemporaryDirectory(prefix="attack-") as name:
        yield Path(name)

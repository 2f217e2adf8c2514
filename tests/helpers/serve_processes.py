"""Servers as processes of their own, and what to ask them."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.helpers import ending_with_parent
from tests.helpers.waiting import wait_until

ROOT = Path(__file__).parents[2]


class ServerProcess:
    """A server that listens at a Unix socket (unless it was given a port), with all processes that belong to it.

    Its core is a fake one, unless a `command` of `jaxllm` is given instead of options.
    """

    def __init__(self, model: Path | str, directory: Path, command: Sequence[str] = (), **options: Any):
        self.uds = None if "port" in options else str(directory / "http")
        self.errors = directory / "stderr"
        self.temporary = directory / "tmp"
        self.temporary.mkdir()
        given = {"model": str(model), **({"uds": self.uds} if self.uds else {"host": "127.0.0.1"}), **options}
        code = "import sys; from jaxllm.cli.main import main; sys.exit(main())"
        arguments = ["-m", "tests.helpers.serve_fake", json.dumps(given)]
        if command:
            arguments = ["-c", code, command[0], str(model), "--uds", str(self.uds), *command[1:]]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(self.temporary), "JAX_PLATFORMS": "cpu"}
        with self.errors.open("wb") as stderr:
            self.process = subprocess.Popen(
                ending_with_parent.python(*arguments),
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                cwd=ROOT,
            )
        self.port = 0

    def wait_ready(self) -> "ServerProcess":
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log()
        if (address := json.loads(line)["address"]) is not None:
            self.port = address[1]
        return self

    def client(self) -> httpx.Client:
        transport = httpx.HTTPTransport(uds=self.uds) if self.uds else None
        return httpx.Client(transport=transport, base_url=f"http://localhost:{self.port}", timeout=60)

    def log(self) -> str:
        return self.errors.read_text(errors="replace")

    def children(self, of: str = "") -> list[int]:
        """Process ids of the engine or the API servers, by a part of their command; of all by default."""
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                fields = (place / "stat").read_text().rpartition(")")[2].split()
                command = (place / "cmdline").read_text()
                if int(fields[1]) == self.process.pid and fields[0] != "Z" and of in command:
                    found.append(int(place.name))
        return found

    def end(self, seconds: float = 60) -> int:
        """Its exit code, once it has ended by itself."""
        return self.process.wait(seconds)

    def assert_nothing_left(self, children: list[int]) -> None:
        """No process and no file outlived it."""
        wait_until(lambda: not any(is_alive(pid) for pid in children), "a process was left behind")
        assert not list(self.temporary.iterdir())
        assert self.uds is None or not Path(self.uds).exists()


@contextlib.contextmanager
def serving(model: Path | str, directory: Path, **options: Any) -> Iterator[ServerProcess]:
    """A server for as long as the block lasts; nothing of it is left afterwards."""
    server = ServerProcess(model, directory, **options)
    try:
        yield server
    finally:
        children = server.children()
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGTERM)
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(60)
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert server.process.stdout is not None
        server.process.stdout.close()


def is_alive(pid: int) -> bool:
    """Whether there is such a process that is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
